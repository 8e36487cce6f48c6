"""A released checkpoint's folder: its config.json and which file holds each tensor. Only headers are read."""

import json
import pathlib
import re
from typing import Any, NamedTuple

from k3jax.checkpoint.safetensors_file import Header, StoredTensor, read_header
from k3jax.errors import UserError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Weights, of this checkpoint or in forms that are never read here.
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"}


class FolderNotFound(UserError, FileNotFoundError):
    """A folder without config.json or without safetensors files."""


class Folder(NamedTuple):
    """What a folder holds.

    Attributes:
        path: of the folder.
        values: config.json.
        files: each safetensors file's header, by file name.
        tensors: every stored tensor, by name.
    """

    path: pathlib.Path
    values: dict[str, Any]
    files: dict[str, Header]
    tensors: dict[str, StoredTensor]


def open_folder(path: str | pathlib.Path) -> Folder:
    """Reads a folder's config.json, index and headers.

    Args:
        path: a folder with config.json and safetensors files; with an index, only the files it names are read.
    Returns:
        Folder.
    Raises:
        FolderNotFound: no config.json or no safetensors file.
        UserError: a file that is not what its name says, truncated or corrupt, or named by a path or link that
            leaves the folder; an index that is wrong about what a file holds.
    """
    folder = pathlib.Path(path)
    values = read_config(folder)
    weight_map = None
    if (folder / INDEX).is_file():
        weight_map = _weight_map(folder / INDEX)
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(file.name for file in folder.iterdir() if is_weights(file.name))
        if not names:
            raise FolderNotFound(f"{folder}: no model.safetensors and no model-*-of-*.safetensors")
    files = {name: read_header(_inside(folder, name)) for name in names}
    tensors: dict[str, StoredTensor] = {}
    for header in files.values():
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise UserError(f"{tensor.name} is in two files: {tensors[tensor.name].file} and {tensor.file}")
            tensors[tensor.name] = tensor
    if weight_map is not None:
        lines = [
            f"  {name}: {weight_map.get(name, 'absent')} in the index, "
            f"{tensors[name].file.name if name in tensors else 'absent'} on disk"
            for name in sorted(weight_map.keys() | tensors.keys())
            if name not in weight_map or name not in tensors or tensors[name].file.name != weight_map[name]
        ]
        if lines:
            more = [f"  ... and {len(lines) - 50} more"] if len(lines) > 50 else []
            raise UserError("\n".join([f"{folder / INDEX} is wrong about where tensors are:", *lines[:50], *more]))
    return Folder(folder, values, files, tensors)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """A folder's config.json.

    Raises:
        FolderNotFound: there is none.
        UserError: it is not a JSON object.
    """
    if not (folder / CONFIG).is_file():
        raise FolderNotFound(f"{folder}: no config.json; expected a folder of a released checkpoint")
    return _read_json(folder / CONFIG)


def is_weights(name: str) -> bool:
    """Whether a file name is one that released checkpoints give their weights."""
    return name == "model.safetensors" or re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) is not None


def other_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """What lies in a folder beside its weights, index and config.json: tokeniser, chat template, licence."""
    skip = {CONFIG, INDEX}
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name not in skip]
    return [_inside(folder, file.name) for file in files if file.suffix not in _WEIGHT_SUFFIXES]


def _weight_map(file: pathlib.Path) -> dict[str, str]:
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
        raise UserError(f"{file}: no weight_map from tensor names to file names")
    return weight_map


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: expected an object, got {type(values).__name__}")
    return values


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A file of a folder, refused if the name or a link leads elsewhere.

    The one exception are links of the Hugging Face cache, from snapshots/REVISION to blobs beside snapshots.
    """
    file = folder / name
    if pathlib.PurePosixPath(name).name != name or "\\" in name:
        raise UserError(f"{folder}: the index names {name!r}, which is not a file of this folder")
    home, target = folder.resolve(), file.resolve()
    in_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not in_cache:
        raise UserError(f"{file} is a link that leaves the folder, to {target}; put the file itself there")
    if not file.is_file():
        raise UserError(f"{file}: no such file, although the index names it")
    return file
