"""`k3 train`: trains a model, or goes on where a run stopped."""

import argparse
import contextlib
import os
import pathlib
import signal
import sys

from k3jax.config import Config
from k3jax.config_checks import require
from k3jax.errors import UserError
from k3jax.train.claim import Claim, new_workdir
from launch import configure, session

HELP = "Trains a model. With the --workdir of a run that was stopped or killed, goes on where it was."
EXAMPLE = "k3 train --gin_file=experiments/quickstart.gin --workdir=runs/mine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    configure.add_config_arguments(parser)
    parser.add_argument(
        "--workdir",
        type=session.directory,
        metavar="DIR",
        help="the run's directory, new or that of the same run; by default a new one under runs/. "
        "Without --gin_file, the run's own configuration is used",
    )


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit status: 0 finished, 1 stopped by an error, 2 refused, 128 + N after signal N."""
    if not args.gin_file and not args.print_config:
        own = pathlib.Path(args.workdir or "") / "config.gin"
        if args.workdir is None or not os.path.isfile(own):
            configure.from_arguments(args)  # a mistake in what was given comes first
            files = " ".join(str(file) for file in configure.experiment_files())
            raise UserError(f"no configuration; give --gin_file=F, such as {files}")
        args.gin_file = [str(own)]
    loaded = configure.from_arguments(args)
    if args.print_config:
        print(loaded.operative, end="")
        return 0
    check_trainable(loaded.config)
    with contextlib.ExitStack() as stack:
        workdir = args.workdir or stack.enter_context(new_workdir(pathlib.Path(args.gin_file[-1]).stem))
        return _train(loaded.config, stack.enter_context(Claim(workdir, loaded.config)))


def check_trainable(config: Config) -> None:
    """Raises ConfigError for what cannot be trained on any devices; loads no jax."""
    from k3jax.data import check_source, check_vocabulary, load_tokenizer
    from k3jax.train.mesh import check_mesh

    check_mesh(config.mesh)
    check_source(config.data.source, config.data.paths, config.data.text_field)
    in_python = "for parity checks in Python under jax.enable_x64(True); train in 'float32' or 'bfloat16'"
    require(config.model.dtype != "float64", config.model, "dtype", in_python)
    check_vocabulary(config, load_tokenizer(config.data.tokenizer, config.data.document_token).vocab_size)


def _train(config: Config, claim: Claim) -> int:
    path = claim.run.path
    if claim.status == "finished":
        print(f"{path} is finished: {config.train.steps} steps; report: {claim.run.report}")
        return 0
    for change in claim.changes:
        print(f"changed for the rest of the run: {change}")
    print(f"run directory: {path}", flush=True)
    session.configure_logging()

    from k3jax.train.loop import RunError, train

    try:
        outcome = train(config, claim)
    except RunError as error:
        print(f"k3 train: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # such as a full disk
        print(f"k3 train: error: {error}; {path} can be resumed once that is mended", file=sys.stderr)
        return 1
    if outcome.status == "stopped":
        name = signal.Signals(outcome.signal).name
        print(f"stopped at step {outcome.step} by {name}, saved; to go on: k3 train --workdir={path}")
        return 128 + outcome.signal
    report = claim.run.report if claim.run.report.exists() else "none"
    print(f"finished: {outcome.step} steps; report: {report}")
    return 0
