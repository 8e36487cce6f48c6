"""A tensor of a checkpoint as matrices, a block of rows at a time. No jax import here."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.source import Source, Tensor, parts
from k3jax.nn.parameters import PARAMETERS

BLOCK_BYTES = 32 * 2**20  # of what is read at a time


class Matrix(NamedTuple):
    """One matrix: an expert's, or the whole tensor.

    Attributes:
        shape: (inputs, outputs); a vector is one row.
        blocks: each call yields its rows in order, in blocks of at most about `BLOCK_BYTES`, as they are stored.
    """

    shape: tuple[int, int]
    blocks: Callable[[], Iterator[np.ndarray]]


class Form(NamedTuple):
    """How a tensor's axes form matrices: `batch` of them, [rows, columns] each."""

    batch: int
    rows: int
    columns: int

    @property
    def is_matrix(self) -> bool:
        return min(self.rows, self.columns) > 1


def form(tensor: Tensor) -> Form:
    """By the table of parameters where the leaf is in it; else the last axis is the columns."""
    shape, spec = tensor.shape, PARAMETERS.get(tensor.path[-1])
    batch = rows = 0
    if spec is not None and len(spec.axes) == len(shape):
        if spec.muon is not None:
            batch, rows = len(spec.muon.batch), len(spec.muon.rows)
        else:
            rows = len(shape) - 1
    else:
        rows = max(len(shape) - 1, 0)
    sizes = shape[:batch], shape[batch : batch + rows], shape[batch + rows :]
    return Form(*(int(np.prod(part, dtype=np.int64)) for part in sizes))


def matrices(source: Source, tensor: Tensor) -> Iterator[Matrix]:
    """The matrices of a tensor, in order.

    What fits into a block is read once, together with its neighbours; a larger matrix is read again by each call of
    its `blocks`.

    Args:
        source: an open checkpoint.
        tensor: one of `source.tensors`.
    """
    leaf, (batch, rows, columns) = source.leaves[tensor.path], form(tensor)
    one = rows * columns * leaf.dtype.itemsize
    if one > BLOCK_BYTES:
        has_batch = batch > 1 or (len(tensor.shape) > 2 and tensor.shape[0] == batch)
        for number in range(batch):
            at = (*tensor.index, number) if has_batch else tensor.index
            yield Matrix((rows, columns), _reader(source, tensor, at, columns))
        return
    for index in parts(leaf, tensor.index, max(BLOCK_BYTES, one)):
        together = source.read(tensor.path, index).reshape(-1, rows, columns)
        for values_RC in together:
            yield Matrix((rows, columns), lambda values_RC=values_RC: iter([values_RC]))


def _reader(source: Source, tensor: Tensor, at: tuple[int, ...], columns: int) -> Callable[[], Iterator[np.ndarray]]:
    leaf = source.leaves[tensor.path]

    def blocks() -> Iterator[np.ndarray]:
        for index in parts(leaf, at, BLOCK_BYTES):
            yield source.read(tensor.path, index).reshape(-1, columns)

    return blocks
