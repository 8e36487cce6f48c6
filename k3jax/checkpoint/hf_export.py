"""Any checkpoint as a released one: which tensors are copied, which are made and how, and what lies beside them."""

import json
import pathlib
import shutil
from typing import Any, Literal, NamedTuple

import numpy as np

from k3jax.checkpoint.hf_aside import Aside, aside_of
from k3jax.checkpoint.hf_config import Layout, hf_config, is_mxfp4, layout_of, stored_dtype
from k3jax.checkpoint.hf_folder import CONFIG, INDEX
from k3jax.checkpoint.hf_layout import K3_PREFIX, HFTensor, hf_tensors, leaf_shapes
from k3jax.checkpoint.hf_source import ReleasedSource
from k3jax.checkpoint.hf_write import (
    SHARD_BYTES,
    Advance,
    Piece,
    Shard,
    copied,
    index_text,
    made,
    new_folder,
    packed,
    split,
    write_shards,
)
from k3jax.checkpoint.mxfp4 import ScaleRule
from k3jax.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, StoredTensor
from k3jax.checkpoint.source import Source
from k3jax.errors import UserError

Experts = Literal["keep", "mxfp4", "unpacked"]


class Plan(NamedTuple):
    """What an export will write.

    Attributes:
        shards: files of tensors.
        texts: other files' contents, by name.
        files: files that are copied as they are.
    """

    shards: list[Shard]
    texts: dict[str, bytes]
    files: list[pathlib.Path]

    @property
    def nbytes(self) -> int:
        """Bytes of tensors."""
        return sum(piece.nbytes for shard in self.shards for piece in shard.pieces)


def plan_export(
    source: Source,
    *,
    aside: Aside | None = None,
    dtype: Any = None,
    experts: Experts = "keep",
    shard_bytes: int | None = None,
) -> Plan:
    """Decides what an export holds, and refuses what cannot be exported, before anything is written.

    Args:
        source: its collections params and router are exported. A ReleasedSource is its own aside, and what nothing
            changes is copied byte for byte, A_log's padding and scales included.
        aside: of the checkpoint that the model came from.
        dtype: of tensors; None keeps each leaf's own. What the layout has in float32 stays float32 or wider.
        experts: routed experts packed ("mxfp4"), as values ("unpacked"), or as the aside has them ("keep"; without
            one, values).
        shard_bytes: of tensors in a file; None = 5 GB, and a released checkpoint that nothing changes keeps its files.
    Returns:
        Plan.
    Raises:
        UserError: a setting that the layout has no word for, or leaves that do not fit the configuration.
    """
    if isinstance(source, ReleasedSource):
        pieces = _released_pieces(source, None if dtype is None else np.dtype(dtype), experts)
        aside, layout = aside_of(source), source.layout
        if shard_bytes is None and all(piece.stored is not None for piece in pieces):
            return _unchanged(source, aside)
    else:
        layout = layout_of(source.config) if aside is None else aside.values["model_type"]
        pieces = _pieces(source, layout, aside, None if dtype is None else np.dtype(dtype), experts)
    pieces += [copied(stored) for stored in aside.tensors] if aside is not None else []
    base = None if aside is None else aside.values
    given = stored_dtype(base) if base is not None else DTYPES[pieces[0].dtype].name  # of the embedding
    values = hf_config(
        source.config,
        layout=layout,
        dtype=given if dtype is None else np.dtype(dtype).name,
        mxfp4=any(piece.role == "packed" or piece.name.endswith("_packed") for piece in pieces),
        base=base,
    )
    shards = split(pieces, SHARD_BYTES if shard_bytes is None else shard_bytes)
    texts = {CONFIG: (json.dumps(values, indent=2) + "\n").encode()}
    if len(shards) > 1:
        texts[INDEX] = index_text(shards).encode()
    return Plan(shards, texts, [] if aside is None else aside.files)


def write_plan(
    folder: pathlib.Path,
    plan: Plan,
    source: Source,
    scale_rule: ScaleRule = "floor",
    advance: Advance = lambda count: None,
) -> None:
    """Writes an export into an empty folder.

    Args:
        folder: exists.
        plan: from `plan_export`.
        source: the same as there.
        scale_rule: of packed blocks.
        advance: is told how many more bytes are written.
    Raises:
        UserError: values that MXFP4 cannot hold, damaged files.
    """
    write_shards(folder, plan.shards, source, scale_rule, advance)
    for name, content in plan.texts.items():
        (folder / name).write_bytes(content)
    for file in plan.files:
        shutil.copyfile(file, folder / file.name)


def export(
    path: str | pathlib.Path,
    source: Source,
    *,
    scale_rule: ScaleRule = "floor",
    advance: Advance = lambda count: None,
    **options,
) -> None:
    """Writes a checkpoint as a released one, a tensor at a time.

    Args:
        path: the folder; new or empty. It appears when all is in it.
        source: an open checkpoint.
        scale_rule, advance: as in `write_plan`.
        options: as in `plan_export`.
    Raises:
        UserError: as in both, or a path that exists.
    """
    plan = plan_export(source, **options)
    with new_folder(pathlib.Path(path)) as folder:
        write_plan(folder, plan, source, scale_rule, advance)


def _unchanged(source: ReleasedSource, aside: Aside) -> Plan:
    """A copy: the same files with the same bytes."""
    shards = [
        Shard(name, header.raw, [copied(stored) for stored in header.tensors])
        for name, header in source.folder.files.items()
    ]
    names = [name for name in (CONFIG, INDEX) if (source.path / name).is_file()]
    return Plan(shards, {name: (source.path / name).read_bytes() for name in names}, aside.files)


def _released_pieces(source: ReleasedSource, dtype: np.dtype | None, experts: Experts) -> list[Piece]:
    pieces: list[Piece] = []
    for tensor, values, scale in source.matched:
        if tensor.expert is not None and (experts == "mxfp4" or (experts == "keep" and scale is not None)):
            pieces += packed(tensor, None) if scale is None else [copied(values), copied(scale)]
            continue
        stored = DTYPES[values.dtype] if scale is None else DTYPES["BF16"]
        wanted = _dtype(tensor, stored, dtype)
        pieces.append(copied(values) if scale is None and wanted == stored else made(tensor, DTYPE_NAMES[wanted]))
    return pieces


def _pieces(
    source: Source, layout: Layout, aside: Aside | None, dtype: np.dtype | None, experts: Experts
) -> list[Piece]:
    tensors = hf_tensors(source.config, K3_PREFIX if layout == "kimi_k3" else "")
    _check_leaves(source, tensors)
    pack = experts == "mxfp4" or (experts == "keep" and aside is not None and is_mxfp4(aside.values))
    scales: dict[str, StoredTensor] = {} if aside is None else aside.scales
    pieces: list[Piece] = []
    for tensor in tensors:
        if pack and tensor.expert is not None:
            pieces += packed(tensor, scales.get(tensor.name))
        else:
            pieces.append(made(tensor, DTYPE_NAMES[_dtype(tensor, source.leaves[tensor.path].dtype, dtype)]))
    return pieces


def _dtype(tensor: HFTensor, own: np.dtype, wanted: np.dtype | None) -> np.dtype:
    if wanted is None:
        return own
    return np.promote_types(wanted, np.float32) if tensor.wide else wanted


def _check_leaves(source: Source, tensors: list[HFTensor]) -> None:
    """Raises UserError unless a checkpoint's leaves are those of its configuration."""
    expected = leaf_shapes(source.config, tensors)
    found = {path: leaf.shape for path, leaf in source.leaves.items() if path[0] in ("params", "router")}
    lines = [
        f"  {'/'.join(path)}: {list(found[path]) if path in found else 'absent'}, "
        f"expected {list(expected[path]) if path in expected else 'nothing'}"
        for path in sorted(found.keys() | expected.keys())
        if found.get(path) != expected.get(path)
    ]
    if lines:
        raise UserError("\n".join(["the checkpoint's leaves are not those of its configuration:", *lines]))
