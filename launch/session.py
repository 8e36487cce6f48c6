"""What the verbs that use a finished or running run share."""

import argparse
import logging
import math
import os
import pathlib
import sys
import typing
import warnings
from typing import Any, NamedTuple

from k3jax.checkpoint.run_source import no_checkpoint
from k3jax.config import Config
from k3jax.train.run_dir import RunDir, RunRefused

if typing.TYPE_CHECKING:
    import jax

    from k3jax.checkpoint.hf_source import ReleasedSource


class LoadedRun(NamedTuple):
    """A run's model, read from a checkpoint.

    Attributes:
        run: where it lies.
        config: its configuration.
        step: of the checkpoint.
        mesh: the devices it was put on.
        variables: {"params": ..., "router": ...}, a copy on every device of the mesh.
    """

    run: RunDir
    config: Config
    step: int
    mesh: "jax.sharding.Mesh"
    variables: dict[str, Any]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which run, and which of its checkpoints."""
    parser.add_argument("--workdir", required=True, type=directory, metavar="RUN", help="the run's directory")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint; the newest by default")


def directory(text: str) -> str:
    """An option's directory; not empty, as it is where a shell's variable is not set."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a directory")
    return text


def load_run(workdir: str, step: int | None, devices: int | None = None) -> LoadedRun:
    """Reads the model of a run, and changes nothing in its directory.

    Args:
        workdir: the run's directory; of an imported one the model is read in its stored dtypes.
        step: which checkpoint; None = the newest.
        devices: how many to use; None = as many as its batch can be split over.
    Raises:
        UserError: no run, no checkpoint, or one that is damaged or does not fit.
    """
    run = RunDir(pathlib.Path(workdir))
    config = run.load_config()
    imported = _open_imported(run, step)
    if imported is None:
        _check_checkpoint(run, step)

    import jax

    from k3jax.checkpoint.manager import Checkpoints
    from k3jax.train.mesh import DATA_AXIS, replicated
    from k3jax.train.state import abstract_state

    if devices is None:
        rows = config.data.batch_size // config.train.num_microbatches
        devices = math.gcd(rows, jax.local_device_count())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), (DATA_AXIS,), axis_types=auto, devices=jax.local_devices()[:devices])
    if imported is not None:
        from k3jax.checkpoint.hf import load_variables

        return LoadedRun(run, config, 0, mesh, load_variables(imported, sharding=replicated(mesh)))
    like = abstract_state(config, mesh).variables
    with Checkpoints(run.checkpoints, keep=None) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise RunRefused(no_checkpoint(run.path))
        return LoadedRun(run, config, step, mesh, checkpoints.restore_part(step, like))


def _open_imported(run: RunDir, step: int | None) -> "ReleasedSource | None":
    """What was imported into a run, as long as the run has no checkpoint of its own."""
    from k3jax.checkpoint.hf_source import open_released
    from k3jax.checkpoint.open import RELEASED, released_folder

    if run.checkpoints.exists() or not (run.path / RELEASED).is_dir():
        return None
    return open_released(released_folder(run.path, step) or run.path / RELEASED)


def _check_checkpoint(run: RunDir, step: int | None) -> None:
    """Refuses a checkpoint that is not there, before anything is loaded; of the others, orbax knows which are whole."""
    try:
        steps = sorted(int(name) for name in os.listdir(run.checkpoints) if name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        steps = []
    except OSError as error:
        raise RunRefused(f"{run.checkpoints} cannot be read ({error.strerror}); make it readable") from None
    if not steps:
        raise RunRefused(no_checkpoint(run.path))
    if step is not None and step not in steps:
        raise RunRefused(f"{run.path}: no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")


def configure_logging() -> None:
    """k3jax's messages a line each on standard error; orbax and its kin say nothing of their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("k3: %(message)s"))
    logger = logging.getLogger("k3jax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # What goes wrong there reaches the user as one line of ours.
    for name in ("absl", "orbax", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # When one of many reads or writes has failed, the others have nobody to report to.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    report = sys.unraisablehook
    sys.unraisablehook = lambda what: None if str(what.exc_value) == "Event loop is closed" else report(what)
