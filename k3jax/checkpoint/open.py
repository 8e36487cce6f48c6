"""One way to open a checkpoint, whoever wrote it: by what lies at the place that the user names."""

import pathlib

from k3jax.checkpoint.hf_folder import Folder, open_folder
from k3jax.checkpoint.hf_source import open_released
from k3jax.checkpoint.run_source import open_run, open_step
from k3jax.checkpoint.source import Source
from k3jax.errors import UserError

RELEASED = "released"  # in a run directory: the files of an imported checkpoint


def open_any(path: str | pathlib.Path, step: int | None = None) -> Source:
    """Opens a checkpoint for reading.

    Args:
        path: a run directory, a step's folder in it (RUN/checkpoints/STEP), or a folder of a released checkpoint.
        step: which checkpoint of a run; None = the newest, or what was imported if there is none.
    Raises:
        UserError: nothing of the kind, no such step, or damaged files.
    """
    path = pathlib.Path(path)
    folder = released_folder(path, step)
    if folder is not None:
        return open_released(folder)
    return open_step(path) if _is_step(path) else open_run(path, step)


def open_stored(path: str | pathlib.Path, step: int | None = None) -> Source | Folder:
    """As `open_any`, but a released checkpoint under the names and in the forms that its files have."""
    path = pathlib.Path(path)
    folder = released_folder(path, step)
    return open_any(path, step) if folder is None else open_folder(folder)


def released_folder(path: pathlib.Path, step: int | None) -> pathlib.Path | None:
    """The folder of a released checkpoint that a path means; None if it means a run's own checkpoint.

    Raises:
        UserError: a step was asked for where there are none.
    """
    has_steps = any(child.name.isdigit() for child in path.glob("checkpoints/*"))
    for folder in (path, path / RELEASED):
        if any(folder.glob("*.safetensors")) and not has_steps and not _is_step(path):
            if step is not None:
                raise UserError(f"{path}: a released checkpoint has no steps; leave out --step")
            return folder
    return None


def _is_step(path: pathlib.Path) -> bool:
    return (path / "_CHECKPOINT_METADATA").is_file() or (path / "state" / "_METADATA").is_file()
