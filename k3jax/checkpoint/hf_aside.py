"""What a released checkpoint holds beside our model's tensors, kept so that an export gives it back."""

import json
import pathlib
import shutil
from typing import Any, NamedTuple

from k3jax.checkpoint.hf_folder import CONFIG, INDEX, is_weights, other_files, read_config
from k3jax.checkpoint.hf_source import ReleasedSource, open_released
from k3jax.checkpoint.safetensors_file import StoredTensor, make_header, read_bytes, read_header
from k3jax.checkpoint.source import Source

ASIDE = "aside"  # in a run directory
TENSORS = "aside.safetensors"
_STEP = 64 * 2**20  # bytes that are copied at a time


class Aside(NamedTuple):
    """What an export takes over from the checkpoint that its model came from.

    Attributes:
        values: its config.json.
        tensors: those that our model has no place for, such as a vision tower's.
        files: tokeniser, chat template, licence and the like.
        scales: name -> the scales of its packed experts, where they can still be read.
    """

    values: dict[str, Any]
    tensors: list[StoredTensor]
    files: list[pathlib.Path]
    scales: dict[str, StoredTensor]


def aside_of(source: ReleasedSource) -> Aside:
    """What an open released checkpoint holds beside the model."""
    scales = {item.tensor.name: item.scale for item in source.matched if item.scale is not None}
    return Aside(source.folder.values, source.aside, other_files(source.path), scales)


def kept_aside(source: Source) -> pathlib.Path | None:
    """Where the run that a checkpoint belongs to has kept what `keep_aside` wrote; None = nowhere."""
    folder = source.path.parent.parent / ASIDE  # of RUN/checkpoints/STEP
    return folder if folder.is_dir() else None


def keep_aside(source: ReleasedSource, folder: pathlib.Path) -> None:
    """Copies it all into a new folder, without the scales: they belong to weights that training changes.

    Args:
        source: an open released checkpoint.
        folder: made here; an existing one is kept as it is.
    """
    if folder.exists():
        return
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    aside = aside_of(source)
    (temporary / CONFIG).write_text(json.dumps(aside.values, indent=2) + "\n", encoding="utf-8")
    for file in aside.files:
        shutil.copyfile(file, temporary / file.name)
    if aside.tensors:
        with open(temporary / TENSORS, "wb") as out:
            out.write(make_header([(x.name, x.dtype, x.shape) for x in aside.tensors]))
            for tensor in aside.tensors:
                for start in range(0, tensor.nbytes, _STEP):
                    out.write(read_bytes(tensor.file, tensor.start + start, min(_STEP, tensor.nbytes - start)))
    temporary.rename(folder)


def open_aside(folder: pathlib.Path) -> Aside:
    """What `keep_aside` wrote, or what a whole released checkpoint holds beside the model.

    Args:
        folder: either of the two.
    Raises:
        FolderNotFound: neither.
        UserError: a damaged file.
    """
    values = read_config(folder)
    if (folder / INDEX).exists() or any(is_weights(file.name) for file in folder.iterdir()):
        return aside_of(open_released(folder))
    tensors = read_header(folder / TENSORS).tensors if (folder / TENSORS).exists() else []
    return Aside(values, tensors, other_files(folder), {})
