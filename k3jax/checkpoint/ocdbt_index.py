"""The table of contents of an orbax checkpoint: what is in it, and whether the files hold it. No jax import here.

orbax stores every array in chunks under one tree of keys (TensorStore's OCDBT format). Reading through TensorStore
gives zeros where a chunk is missing and an error of many lines where a file is cut off; here the tree itself is
read, a few kilobytes, and held against the files.
"""

import itertools
import math
import pathlib
import urllib.parse
from typing import Any, NamedTuple

from k3jax.errors import UserError


class Stored(NamedTuple):
    """Where the value of a key lies.

    Attributes:
        file: which holds it, or the node of the tree it lies in.
        offset: of the value, or of that node.
        nbytes: length of the value.
        inline: the value itself, where it is small enough to lie in the tree.
    """

    file: pathlib.Path
    offset: int
    nbytes: int
    inline: bytes | None

    def __str__(self):
        return f"{self.file} at offset {self.offset}"


def read_index(folder: pathlib.Path) -> dict[str, Stored]:
    """Every key of a checkpoint's item, and a check that the bytes of each are there.

    Args:
        folder: of the item, with `manifest.ocdbt`.
    Returns:
        {key: Stored}.
    Raises:
        UserError: a file that is missing, cut off, damaged or outside of the folder: its name, and the offset.
    """
    import tensorstore as ts

    manifest = folder / "manifest.ocdbt"
    if not manifest.is_file():
        raise UserError(f"{manifest}: missing; the checkpoint was not written to its end, or not copied whole")
    base = ts.KvStore.open({"driver": "file", "path": f"{folder.absolute()}/"}).result()
    context = ts.Context()

    def node(reference: str | None) -> Any:
        try:
            return ts.ocdbt.dump(base, reference, context=context).result()
        except ValueError as error:
            where = manifest if reference is None else _located(folder, reference)
            raise UserError(f"{where}: damaged ({_first(error)}); restore the file from a copy") from None

    index: dict[str, Stored] = {}
    sizes: dict[pathlib.Path, int] = {}
    waiting = []
    versions = node(None)["versions"]
    if versions and "location" in versions[-1]["root"]:
        waiting.append(versions[-1]["root"]["location"])
    while waiting:
        reference = waiting.pop()
        here = _located(folder, reference)
        _check(here, sizes)
        for entry in node(reference)["entries"]:
            if "location" in entry:
                waiting.append(entry["location"])
            elif "inline_value" in entry:
                value = entry["inline_value"]
                index[entry["key"].decode()] = here._replace(nbytes=len(value), inline=value)
            else:
                place = _located(folder, entry["indirect_value"])
                _check(place, sizes)
                index[entry["key"].decode()] = place
    return index


def read_value(folder: pathlib.Path, index: dict[str, Stored], key: str) -> bytes:
    """The value of a key of `read_index`, as it is stored."""
    import tensorstore as ts

    if index[key].inline is not None:
        return index[key].inline
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}
    return ts.KvStore.open(spec).result().read(key).result().value


def missing_chunks(index: dict[str, Stored], name: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> list[str]:
    """The keys of an array's chunks that are not in the index.

    Args:
        index: from `read_index`.
        name: of the array.
        shape, chunks: from its metadata.
    """
    grid = [range(math.ceil(size / chunk)) for size, chunk in zip(shape, chunks, strict=True)]
    keys = (f"{name}/{'.'.join(map(str, cell)) or '0'}" for cell in itertools.product(*grid))
    return [key for key in keys if key not in index]


def _located(folder: pathlib.Path, reference: str) -> Stored:
    """A reference "kind:base:file:offset:length", base and file percent-encoded."""
    _, base, file, offset, length = reference.split(":")
    inside = urllib.parse.unquote(base) + urllib.parse.unquote(file)
    path = folder / inside
    if ".." in pathlib.PurePosixPath(inside).parts or path.is_absolute() != folder.is_absolute():
        raise UserError(f"{folder}: refers to {inside}, a file outside of it; do not use this checkpoint")
    return Stored(path, int(offset), int(length), None)


def _check(place: Stored, sizes: dict[pathlib.Path, int]) -> None:
    """Refuses a place beyond the end of its file."""
    if place.file not in sizes:
        try:
            sizes[place.file] = place.file.stat().st_size
        except FileNotFoundError:
            raise UserError(f"{place.file}: missing; copy the checkpoint again, whole") from None
    if place.offset + place.nbytes > sizes[place.file]:
        raise UserError(
            f"{place.file}: cut off at offset {sizes[place.file]}, of {place.offset + place.nbytes} bytes at least; "
            "copy the checkpoint again, whole"
        )


def _first(error: Exception) -> str:
    """The beginning of TensorStore's message, without the places in its own sources."""
    return str(error).partition(" [")[0].splitlines()[0]
