"""What every reader of a checkpoint offers, whatever the files below it look like. No jax import here.

A checkpoint is a table of leaves in our tree's form, layers stacked under [block, repeat]; nothing is read until a
leaf, or a slice of one, is asked for. `run_source` reads what training wrote, `hf_source` released checkpoints.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from k3jax.config import ModelConfig
from k3jax.models.plan import layer_slots

Path = tuple[str, ...]
Index = tuple[int | slice, ...]


class Leaf(NamedTuple):
    """An array of a checkpoint, as far as is known without reading it.

    Attributes:
        shape: of the whole array, whatever devices wrote it.
        dtype: of what `Source.read` returns.
        nbytes: bytes in the files; compressed, or packed, they are fewer than the array's.
        sharding: how it lay on devices when it was written, in a few words; "" = not known.
        chunks: shape of the parts that are stored, each of which is read as a whole; None = any slice can be read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    sharding: str = ""
    chunks: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Bytes of the array in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(Protocol):
    """A checkpoint that is open for reading.

    Attributes:
        path: what the user named.
        config: the architecture; None where nothing tells it.
        leaves: {keys from the collection on: Leaf}; collections are params, router and, of a run, opt_state and more.
    """

    path: pathlib.Path
    config: ModelConfig | None
    leaves: dict[Path, Leaf]

    def read(self, path: Path, index: Index = ()) -> np.ndarray:
        """A leaf, or a slice of it.

        Args:
            path: one of `leaves`.
            index: integers and slices for the leading axes; () = everything.
        Returns:
            The array in the leaf's dtype.
        Raises:
            UserError: damaged files, by name.
        """


class Tensor(NamedTuple):
    """One layer's part of a leaf, or a leaf that belongs to no layer.

    Attributes:
        name: collection, layer and keys, such as "params/layer 3/kda/q_proj".
        layer: counted from 1; 0 = none.
        path: of the leaf.
        index: of the layer in it, (block, repeat); () = the leaf itself.
        shape: of the part.
    """

    name: str
    layer: int
    path: Path
    index: tuple[int, ...]
    shape: tuple[int, ...]


def tensors(source: Source) -> list[Tensor]:
    """Every tensor of a checkpoint, stacked leaves taken apart by layer.

    Args:
        source: an open checkpoint; without a configuration a stacked layer is called by its place in the tree.
    Returns:
        In the order of collections, then layers, then the leaves' own.
    """
    numbers = {}
    if source.config is not None:
        for number, slot in enumerate(layer_slots(source.config), start=1):
            numbers[slot] = number
    found = []
    for order, (path, leaf) in enumerate(source.leaves.items()):
        at = next((i for i, key in enumerate(path) if key.startswith("stage_")), None)
        if at is None or len(path) < at + 4 or len(leaf.shape) < 2:
            found.append(((path[0], 0, order), Tensor("/".join(path), 0, path, (), leaf.shape)))
            continue
        above, place, below = path[:at], path[at : at + 3], path[at + 3 :]
        for block, repeat in np.ndindex(*leaf.shape[:2]):
            number = numbers.get((*place, block, repeat), 0)
            called = f"layer {number}" if number else f"{'/'.join(place)}[{block},{repeat}]"
            name = "/".join((*above, called, *below))
            tensor = Tensor(name, number, path, (block, repeat), leaf.shape[2:])
            found.append(((path[0], number, order), tensor))
    collections = {path[0]: i for i, path in reversed(list(enumerate(source.leaves)))}
    found.sort(key=lambda item: (collections[item[0][0]], *item[0][1:]))
    return [tensor for _, tensor in found]


def parts(leaf: Leaf, index: tuple[int, ...], limit: int) -> Iterator[Index]:
    """Cuts a tensor into slices of bounded size along its first axes, at the borders of chunks where it can.

    Args:
        leaf: of the tensor.
        index: the tensor's place in the leaf.
        limit: bytes of a slice; one row of the last axis is never cut.
    Yields:
        Indices for `Source.read`, which together cover the tensor once, in order.
    """
    shape = leaf.shape[len(index) :]
    size = int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize
    if size <= limit or len(shape) < 2:
        yield index
        return
    row = size // max(shape[0], 1)
    if row > limit and len(shape) > 2:
        for i in range(shape[0]):
            yield from parts(leaf, (*index, i), limit)
        return
    step = max(1, limit // row)
    if leaf.chunks is not None:
        chunk = leaf.chunks[len(index)]
        step = max(step // chunk, 1) * chunk if chunk * row <= 2 * limit else step
    for start in range(0, shape[0], step):
        yield (*index, slice(start, min(start + step, shape[0])))
