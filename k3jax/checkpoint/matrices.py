"""A tensor of a checkpoint as matrices, a block of rows at a time. No jax import here."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.source import Source, Tensor, parts
from k3jax.nn.parameters import PARAMETERS

BLOCK_BYTES = 32 * 2**20  # of what is read at a time


class Matrices(NamedTuple):
    """Matrices of one shape that are looked at together. Dimensions: N matrices, R rows, C columns.

    Attributes:
        shape: (N, R, C); rows are inputs, a vector is one row, experts are matrices of their own.
        blocks: each call yields their rows in order, [N, some rows, C], in blocks of at most about `BLOCK_BYTES`, as
            they are stored.
    """

    shape: tuple[int, int, int]
    blocks: Callable[[], Iterator[np.ndarray]]


def matrices(source: Source, tensor: Tensor) -> Iterator[Matrices]:
    """The matrices of a tensor, in order.

    What fits into a block is read once, with its neighbours; a larger matrix is read again by each call of `blocks`.

    Args:
        source: an open checkpoint.
        tensor: one of `source.tensors`.
    """
    leaf, batch_axes, (N, R, C) = source.leaves[tensor.path], *form(tensor)
    if R * C * leaf.dtype.itemsize <= BLOCK_BYTES:
        for index in parts(leaf, tensor.index, BLOCK_BYTES):
            block_NRC = source.read(tensor.path, index).reshape(-1, R, C)
            yield Matrices(block_NRC.shape, lambda block_NRC=block_NRC: iter([block_NRC]))
        return
    for number in range(N):
        at = (*tensor.index, number) if batch_axes else tensor.index
        yield Matrices((1, R, C), _reader(source, tensor, at, C))


def form(tensor: Tensor) -> tuple[int, tuple[int, int, int]]:
    """(number of axes that number matrices, (N, R, C)): by the table of parameters where the leaf is in it, gains,
    biases and convolutions as one row; of other leaves the last axis is the columns."""
    shape, spec = tensor.shape, PARAMETERS.get(tensor.path[-1])
    batch, rows = 0, max(len(shape) - 1, 0)
    if spec is not None and len(spec.axes) == len(shape):
        if spec.muon is not None:
            batch, rows = len(spec.muon.batch), len(spec.muon.rows)
        elif not spec.weight_decay:
            rows = 0
    sizes = shape[:batch], shape[batch : batch + rows], shape[batch + rows :]
    N, R, C = (int(np.prod(part, dtype=np.int64)) for part in sizes)
    return batch, (N, R, C)


def _reader(source: Source, tensor: Tensor, at: tuple[int, ...], C: int) -> Callable[[], Iterator[np.ndarray]]:
    leaf = source.leaves[tensor.path]

    def blocks() -> Iterator[np.ndarray]:
        for index in parts(leaf, at, BLOCK_BYTES):
            yield source.read(tensor.path, index).reshape(1, -1, C)

    return blocks
