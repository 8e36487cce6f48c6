"""What a run's model did on held-out text, for the subverbs that show it beside the parameters."""

import argparse
import pathlib
from typing import TYPE_CHECKING

from k3jax.errors import UserError

if TYPE_CHECKING:
    from k3jax.checkpoint.source import Source
    from k3jax.train.diagnostics import Diagnostics


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Adds the option that asks for a forward pass."""
    parser.add_argument(
        "--measure", action="store_true",
        help="of a run: run its model on held-out text now; else what the end of training left is used, if it is there",
    )  # fmt: skip


def measured(args: argparse.Namespace, source: "Source") -> "Diagnostics | None":
    """Diagnostics of the checkpoint that is shown, where the run has them or --measure asks for them.

    Args:
        args: with `measure`.
        source: a run's checkpoint, or a released one, which has none.
    Raises:
        UserError: --measure of a released checkpoint, which comes without text.
    """
    step = getattr(source, "step", None)
    if step is None:
        if args.measure:
            raise UserError(f"{source.path}: --measure needs a run, whose configuration says which text is held out")
        return None
    workdir = pathlib.Path(source.path).parent.parent
    return _measure(workdir, step) if args.measure else _left_by_training(workdir, step)


def _left_by_training(workdir: pathlib.Path, step: int) -> "Diagnostics | None":
    """diagnostics.npz, if it is of this step: training writes it at its last one."""
    import json

    try:
        last = json.loads((workdir / "summary.json").read_text()).get("step")
    except (OSError, ValueError, AttributeError):
        return None
    if last != step or not (workdir / "diagnostics.npz").is_file():
        return None
    from k3jax.train.diagnostics import read_diagnostics

    return read_diagnostics(workdir)


def _measure(workdir: pathlib.Path, step: int) -> "Diagnostics":
    import contextlib

    from launch import session

    session.configure_logging()
    loaded = session.load_run(str(workdir), step)

    from k3jax.data import load_dataset
    from k3jax.train.diagnostics import collect_diagnostics

    dataset = load_dataset(loaded.config.data)
    if not dataset.heldout.num_rows:
        raise UserError(f"{workdir}: no held-out text; DataConfig.heldout_fraction was too small")
    with contextlib.closing(dataset.heldout_batches(0, 1)) as batches:
        return collect_diagnostics(loaded.config, loaded.variables, next(batches))
