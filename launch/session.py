"""What the verbs that use a finished or running run share."""

import argparse
import logging
import math
import pathlib
import typing
from typing import Any, NamedTuple

from k3jax.config import Config
from k3jax.train.run_dir import RunDir

if typing.TYPE_CHECKING:
    import jax


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
    parser.add_argument("--workdir", required=True, metavar="RUN", help="the run's directory")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint; the newest by default")


def load_run(workdir: str, step: int | None, devices: int | None = None) -> LoadedRun:
    """Reads the model of a run, and changes nothing in its directory.

    Args:
        workdir: the run's directory.
        step: which checkpoint; None = the newest.
        devices: how many to use; None = as many as its batch can be split over.
    Raises:
        RunRefused, CheckpointMismatch: no run, no checkpoint, or one that does not fit.
    """
    run = RunDir(pathlib.Path(workdir))
    config = run.load_config()

    import jax

    from k3jax.checkpoint.manager import CheckpointMismatch, Checkpoints
    from k3jax.train.mesh import DATA_AXIS
    from k3jax.train.state import abstract_state

    if not run.checkpoints.is_dir():
        raise CheckpointMismatch(f"{run.path} has no checkpoint yet; wait for its first")
    if devices is None:
        rows = config.data.batch_size // config.train.num_microbatches
        devices = math.gcd(rows, jax.local_device_count())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), (DATA_AXIS,), axis_types=auto, devices=jax.local_devices()[:devices])
    like = abstract_state(config, mesh).variables
    with Checkpoints(run.checkpoints, keep=None) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise CheckpointMismatch(f"{run.path} has no checkpoint yet; wait for its first")
        return LoadedRun(run, config, step, mesh, checkpoints.restore_part(step, like))


def configure_logging() -> None:
    """k3jax's messages a line each on standard error; orbax and its kin say nothing of their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("k3: %(message)s"))
    logger = logging.getLogger("k3jax")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # What goes wrong there reaches the user as one line of ours.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("orbax").setLevel(logging.CRITICAL)
