"""A released checkpoint read as our tree, in place: no byte is read before a leaf, or a slice of one, is asked for."""

import itertools
import pathlib

import numpy as np

from k3jax.checkpoint import mxfp4
from k3jax.checkpoint.hf_check import Matched, match
from k3jax.checkpoint.hf_config import Layout, is_mxfp4, model_config
from k3jax.checkpoint.hf_folder import Folder, open_folder, read_config
from k3jax.checkpoint.hf_layout import K3_PREFIX, hf_tensors, leaf_shapes, to_ours
from k3jax.checkpoint.safetensors_file import DTYPES, StoredTensor, read
from k3jax.checkpoint.source import Index, Leaf, Path

_BFLOAT16 = DTYPES["BF16"]


def open_released(path: str | pathlib.Path) -> "ReleasedSource":
    """Opens a folder of a released checkpoint, Kimi Linear or Kimi K3, and checks every name, shape and dtype.

    Args:
        path: a folder with config.json and safetensors files.
    Returns:
        The checkpoint as a k3jax.checkpoint.source.Source.
    Raises:
        FolderNotFound: no config.json or no safetensors file.
        UserError: another model, or files or tensors that are not what config.json implies, all listed.
    Source: spec §10, §9.
    """
    model_config(read_config(pathlib.Path(path)))  # what it is comes before what it lacks
    return ReleasedSource(open_folder(path))


class ReleasedSource:
    """A released checkpoint's leaves: layers stacked, input axes first, packed experts decoded as they are read.

    Args:
        folder: an open folder.
    Attributes:
        path: of the folder.
        folder: its files.
        config: the architecture; how it is computed is left to ModelConfig's defaults.
        layout: whose names the tensors have.
        leaves: {path: Leaf}; packed experts count as bfloat16, which holds each of their values.
        matched: where each of the model's tensors is stored.
        aside: tensors that our model has no place for, in stored order.
    Raises:
        UserError: as `open_released`.
    """

    def __init__(self, folder: Folder):
        self.path, self.folder = folder.path, folder
        self.config = model_config(folder.values)
        is_mxfp4(folder.values)  # refuses other quantisations
        self.layout: Layout = folder.values["model_type"]
        prefix = K3_PREFIX if self.layout == "kimi_k3" else ""
        tensors = hf_tensors(self.config, prefix)
        contents = match(tensors, folder, vision=self.layout == "kimi_k3")
        self.matched, self.aside = contents.matched, contents.aside
        self._parts: dict[Path, dict[tuple[int, ...], Matched]] = {}
        for item in self.matched:
            self._parts.setdefault(item.tensor.path, {})[item.tensor.index] = item
        self.leaves = {path: self._leaf(path, shape) for path, shape in leaf_shapes(self.config, tensors).items()}

    def read(self, path: Path, index: Index = ()) -> np.ndarray:
        """A leaf, or a slice of it; of the files only the pages that hold it are read.

        Args:
            path: one of `leaves`.
            index: integers and slices of step 1 for the first axes; () = everything.
        Returns:
            The array in the leaf's dtype.
        Raises:
            UserError: a file has become shorter, or what follows A_log's heads is not zero.
        """
        leaf = self.leaves[path]
        spans = [_span(part, n) for part, n in itertools.zip_longest(index, leaf.shape, fillvalue=slice(None))]
        lead = len(next(iter(self._parts[path])))
        counts = [last - first for first, last in spans]
        starts = [first for first, _ in spans[:lead]]
        if all(n == 1 for n in counts[:lead]):  # without a second copy, for it may be large
            out = self._part(self._parts[path][tuple(starts)], spans[lead:]).astype(leaf.dtype, copy=False)
            out = np.expand_dims(out, tuple(range(lead)))
        else:
            out = np.empty(counts, leaf.dtype)
            for at in np.ndindex(*counts[:lead]):
                key = tuple(i + first for i, first in zip(at, starts, strict=True))
                out[at] = self._part(self._parts[path][key], spans[lead:])
        dropped = [axis for axis, part in enumerate(index) if not isinstance(part, slice)]
        return np.squeeze(out, tuple(dropped))

    def _leaf(self, path: Path, shape: tuple[int, ...]) -> Leaf:
        parts = self._parts[path].values()
        dtypes = {_BFLOAT16 if item.scale else DTYPES[item.values.dtype] for item in parts}
        nbytes = sum(item.values.nbytes + (item.scale.nbytes if item.scale else 0) for item in parts)
        return Leaf(shape, np.result_type(*dtypes), nbytes)

    def _part(self, item: Matched, spans: list[tuple[int, int]]) -> np.ndarray:
        """A box of one tensor in our axes."""
        tensor = item.tensor
        if item.scale is not None:
            return _read_packed(item.values, item.scale, *spans)
        box = tuple(slice(*span) for span in spans)
        if len(tensor.shape) == 1:  # perhaps with zeros at its end
            return to_ours(tensor, read(item.values))[box]
        if not tensor.inputs:
            return read(item.values, tensor.shape, box)
        k, n = tensor.inputs, len(tensor.shape)
        stored = read(item.values, tensor.shape[k:] + tensor.shape[:k], box[k:] + box[:k])
        return stored.transpose([*range(n - k, n), *range(n - k)])


def _read_packed(packed: StoredTensor, scale: StoredTensor, inputs, outputs) -> np.ndarray:
    """bfloat16 [inputs, outputs] of a packed matrix [out, in]; whole blocks of 32 inputs are read."""
    first, last = inputs[0] // mxfp4.BLOCK, -(-inputs[1] // mxfp4.BLOCK)
    half = mxfp4.BLOCK // 2
    rows = slice(*outputs)
    elements = read(packed, index=(rows, slice(first * half, last * half)))
    values = mxfp4.decode_bfloat16(elements, read(scale, index=(rows, slice(first, last))))
    start = first * mxfp4.BLOCK
    return values[:, inputs[0] - start : inputs[1] - start].T


def _span(part: int | slice, n: int) -> tuple[int, int]:
    if isinstance(part, slice):
        first, last, step = part.indices(n)
        if step != 1:
            raise ValueError(f"slices of step 1 only, not {part}")
        return first, max(first, last)
    at = range(n)[part]
    return at, at + 1
