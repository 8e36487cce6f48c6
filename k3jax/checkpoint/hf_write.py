"""Writing released checkpoints: what goes into which file, then every byte to its place, a tensor at a time."""

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from k3jax.checkpoint import mxfp4
from k3jax.checkpoint.hf_layout import PACKED, SCALE, HFTensor, outputs_first
from k3jax.checkpoint.safetensors_file import DTYPES, StoredTensor, make_header, num_bytes, read
from k3jax.checkpoint.source import Index, Leaf, Path, Source
from k3jax.errors import UserError

SHARD_BYTES = 5 * 10**9
_STEP = 64 * 2**20  # bytes that are converted or copied at a time
Advance = Callable[[int], object]  # is told how many more bytes are written


class Piece(NamedTuple):
    """A tensor of an export, either copied or made.

    Attributes:
        name: released.
        dtype: the format's name of it.
        shape: as stored.
        stored: its bytes, copied as they are; None where they are made.
        tensor: what it is made from.
        role: which of its forms it is.
        scale: the scales that its values may have been decoded with.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: StoredTensor | None = None
    tensor: HFTensor | None = None
    role: Literal["values", "packed", "scale"] = "values"
    scale: StoredTensor | None = None

    @property
    def nbytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


class Shard(NamedTuple):
    """A file of an export.

    Attributes:
        name: of the file.
        header: its bytes before the first tensor.
        pieces: in the order of their bytes.
    """

    name: str
    header: bytes
    pieces: list[Piece]


def copied(stored: StoredTensor) -> Piece:
    """A tensor that is taken over byte for byte."""
    return Piece(stored.name, stored.dtype, stored.shape, stored)


def made(tensor: HFTensor, dtype: str) -> Piece:
    """A tensor that is made from a leaf of ours."""
    return Piece(tensor.name, dtype, tensor.stored, tensor=tensor)


def packed(tensor: HFTensor, scale: StoredTensor | None) -> list[Piece]:
    """A routed expert's matrix in MXFP4: elements and scales."""
    rows, columns = tensor.stored
    if columns % mxfp4.BLOCK:
        raise UserError(
            f"{tensor.name}: {columns} input columns do not divide into MXFP4 blocks of {mxfp4.BLOCK}; export unpacked"
        )
    return [
        Piece(tensor.name + PACKED, "U8", (rows, columns // 2), None, tensor, "packed", scale),
        Piece(tensor.name + SCALE, "U8", (rows, columns // mxfp4.BLOCK), None, tensor, "scale", scale),
    ]


def split(pieces: list[Piece], shard_bytes: int) -> list[Shard]:
    """Distributes tensors over files, in order; a file exceeds the size only when a single tensor does.

    Args:
        pieces: all tensors.
        shard_bytes: of tensors in a file.
    Returns:
        Shards with the usual names.
    """
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + piece.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    count = len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = ["model.safetensors"] if count == 1 else names
    return [
        Shard(name, make_header([(p.name, p.dtype, p.shape) for p in group]), group)
        for name, group in zip(names, groups, strict=True)
    ]


def index_text(shards: list[Shard]) -> str:
    """The content of an index file."""
    total = sum(piece.nbytes for shard in shards for piece in shard.pieces)
    weight_map = {piece.name: shard.name for shard in shards for piece in shard.pieces}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that is there whole or not at all: filled under a name that says so, and renamed at the end.

    Args:
        path: does not exist, or is an empty folder.
    Yields:
        The folder to fill, beside `path`; it is removed if filling it fails, and left as it is by a kill.
    Raises:
        UserError: there is something at `path`.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already; choose another folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_shards(
    folder: pathlib.Path, shards: list[Shard], source: Source, rule: mxfp4.ScaleRule, advance: Advance
) -> None:
    """Writes files of tensors.

    Args:
        folder: exists.
        shards: what goes where.
        source: the leaves that tensors are made from.
        rule: for the scales of what is packed.
        advance: is told of progress.
    Raises:
        UserError: values that MXFP4 cannot hold, damaged or missing files.
    Host memory: the largest tensor's part of a leaf, and a few times 64 MiB.
    """
    with contextlib.ExitStack() as stack:
        places: dict[str, _Place] = {}
        for shard in shards:
            file = os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, file)
            _write(file, 0, np.frombuffer(shard.header, np.uint8))
            at = len(shard.header)
            for piece in shard.pieces:
                places[piece.name] = _Place(piece, file, at)
                at += piece.nbytes
            os.truncate(file, at)
        _copy(list(places.values()), advance)
        _make([place for place in places.values() if place.piece.tensor is not None], source, rule, advance)


class _Place(NamedTuple):
    piece: Piece
    file: int
    start: int


def _copy(places: list[_Place], advance: Advance) -> None:
    """Copies what is taken over; neighbours in both files go as one."""
    runs: list[list] = []  # [source file, its start, file, start, length]
    for piece, file, start in places:
        if piece.stored is None or piece.nbytes == 0:
            continue
        last = runs[-1] if runs else None
        there = piece.stored
        if last and last[:3:2] == [there.file, file] and [last[1] + last[4], last[3] + last[4]] == [there.start, start]:
            last[4] += piece.nbytes
        else:
            runs.append([there.file, there.start, file, start, piece.nbytes])
    with contextlib.ExitStack() as stack:
        opened: dict[pathlib.Path, int] = {}
        for name, begin, file, start, length in runs:
            if name not in opened:
                opened[name] = os.open(name, os.O_RDONLY)
                stack.callback(os.close, opened[name])
            done = 0
            while done < length:
                count = _copy_step(opened[name], begin + done, file, start + done, min(_STEP, length - done))
                if count == 0:
                    raise UserError(f"{name}: truncated: ends at byte {begin + done}, expected {begin + length}")
                done += count
                advance(count)


def _copy_step(source: int, begin: int, file: int, start: int, count: int) -> int:
    """Copies at most so many bytes, by the kernel alone where it can; returns how many."""
    try:
        return os.copy_file_range(source, file, count, begin, start)
    except OSError:  # another file system, or a kernel that cannot
        return os.pwrite(file, os.pread(source, count, begin), start)


def _make(places: list[_Place], source: Source, rule: mxfp4.ScaleRule, advance: Advance) -> None:
    """Converts what is made, leaf by leaf, so that each part of a leaf is read once."""
    leaves: dict[Path, dict[tuple[int, ...], list[_Place]]] = {}
    for place in places:
        tensor = place.piece.tensor
        leaves.setdefault(tensor.path, {}).setdefault(tensor.index, []).append(place)
    for path, parts in leaves.items():
        for index, keys in _reads(source.leaves[path], len(next(iter(parts)))):
            if not any(key in parts for key in keys):
                continue
            values = source.read(path, index)
            for i, key in enumerate(keys):
                for pair in _pairs(parts.get(key, [])):
                    _convert(pair, values[i] if len(key) == 3 else values, rule, advance)
            del values  # before the next is read


def _reads(leaf: Leaf, lead: int) -> Iterator[tuple[Index, list[tuple[int, ...]]]]:
    """Indices that cover a leaf a layer at a time, experts as many as a stored chunk holds; and the parts in each."""
    if lead == 0:
        yield (), [()]
        return
    for block, repeat in np.ndindex(*leaf.shape[:2]):
        if lead == 2:
            yield (block, repeat), [(block, repeat)]
            continue
        step = leaf.chunks[2] if leaf.chunks is not None else 1
        for first in range(0, leaf.shape[2], step):
            experts = range(first, min(first + step, leaf.shape[2]))
            yield (block, repeat, slice(first, experts.stop)), [(block, repeat, expert) for expert in experts]


def _pairs(places: list[_Place]) -> list[list[_Place]]:
    """Elements and scales belong together; anything else is alone."""
    return [[place] for place in places] if all(x.piece.role == "values" for x in places) else [places]


def _convert(places: list[_Place], part: np.ndarray, rule: mxfp4.ScaleRule, advance: Advance) -> None:
    """Writes one tensor, some rows at a time, so that no second copy of it is made."""
    piece = places[0].piece
    turned = outputs_first(piece.tensor, part)
    columns = math.prod(turned.shape[1:])
    as_values = piece.role == "values"
    step = _STEP if as_values else _STEP // 8  # packing needs several copies
    slab = max(1, step // max(1, columns * turned.dtype.itemsize))
    scale = None if piece.scale is None else read(piece.scale)
    for first in range(0, turned.shape[0], slab):
        rows = turned[first : first + slab]
        if as_values:
            arrays = [rows.astype(DTYPES[piece.dtype], order="C", copy=False)]
        else:
            try:
                arrays = list(mxfp4.encode(rows, rule, None if scale is None else scale[first : first + slab]))
            except ValueError as error:
                raise UserError(f"{piece.tensor.name}: {error}") from None
        for place, data in zip(places, arrays, strict=True):
            row_bytes = data.nbytes // len(rows)
            _write(place.file, place.start + first * row_bytes, data.reshape(-1).view(np.uint8))
            advance(data.nbytes)


def _write(file: int, start: int, data: np.ndarray) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(file, memoryview(data)[done:], start + done)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
