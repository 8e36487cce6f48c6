"""`k3 ckpt import` and `k3 ckpt export`: released checkpoints (Hugging Face folders) in and out of run directories."""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import typing
from collections.abc import Callable, Iterator

from k3jax.errors import UserError
from launch.ckpt_common import nbytes_text

if typing.TYPE_CHECKING:
    from k3jax.checkpoint.hf_export import Plan

DTYPES = ("bfloat16", "float32")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=pathlib.Path, metavar="HF_DIR", help="config.json and safetensors files")
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the run directory to make; new or empty")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=pathlib.Path, metavar="RUN", help="a run, or a released checkpoint to convert")
    parser.add_argument("folder", type=pathlib.Path, metavar="HF_DIR", help="the folder to make; new or empty")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint of the run; the newest by default")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of tensors; what the layout has in float32 stays so. By default a released checkpoint's own, "
        "and for a run that of the checkpoint it came from, or bfloat16",
    )
    parser.add_argument(
        "--experts",
        choices=("keep", "mxfp4", "unpacked"),
        default="keep",
        help="routed experts: packed in MXFP4, as values, or as they were in the checkpoint that the model came from; "
        "without one, values",
    )
    parser.add_argument(
        "--scale_rule",
        choices=("floor", "round", "ceil"),
        default="floor",
        help="the exponent of a packed block's scale, from its largest magnitude amax: floor(log2 amax) - 2 as in the "
        "OCP specification, the same from an amax rounded to one mantissa bit, or ceil(log2(amax / 6)), which never "
        "saturates. Elements go to the nearest value, ties to the even code",
    )
    parser.add_argument(
        "--shard_size", type=_size, metavar="SIZE", help="of tensors in a file, such as 500MB (5GB, or as they are)"
    )
    parser.add_argument(
        "--like",
        type=pathlib.Path,
        metavar="HF_DIR",
        help="the checkpoint that a run came from, for what the model has no place for (vision) and the tokeniser; "
        "by default what the run kept of it",
    )


def _import(args: argparse.Namespace) -> int:
    """Copies a released checkpoint into a new run directory, once every tensor in it is accounted for."""
    from k3jax.checkpoint.hf_export import plan_export, write_plan
    from k3jax.checkpoint.hf_source import open_released
    from k3jax.checkpoint.hf_write import new_folder
    from k3jax.checkpoint.open import RELEASED
    from k3jax.config import Config, DataConfig, MeshConfig, OptimConfig, TrainConfig, to_dict
    from k3jax.config_text import config_to_gin
    from k3jax.train.run_dir import RunDir

    source = open_released(args.source)
    plan = plan_export(source)
    train = TrainConfig(init_from=str(args.run.absolute() / RELEASED))
    config = Config(source.config, DataConfig(), OptimConfig(), MeshConfig(), train)
    with _whole_or_not(args.run), new_folder(args.run) as folder:
        run = RunDir(folder)
        (folder / RELEASED).mkdir()
        with progress_bar(f"importing {args.source}", plan.nbytes) as advance:
            write_plan(folder / RELEASED, plan, source, advance=advance)
        run.config_gin.write_text(config_to_gin(config), encoding="utf-8")
        run.config_json.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    count = sum(leaf.size // leaf.dtype.itemsize for leaf in source.leaves.values())
    print(f"{args.run}: {source.layout}, {count:,} parameters, {_describe(plan)}")
    if source.aside:
        print(f"kept aside, for the export: {len(source.aside)} tensors that the model has no place for")
    there = {shard.name for shard in plan.shards} | plan.texts.keys() | {file.name for file in plan.files}
    left = sorted(child.name for child in args.source.iterdir() if child.name not in there)
    if left:
        print(f"not part of the checkpoint, left behind: {', '.join(left)}")
    print(f"to train from it: k3 train --gin_file={args.run}/config.gin, with your own DataConfig and OptimConfig")
    return 0


def _export(args: argparse.Namespace) -> int:
    """Writes a run's checkpoint, or a released one, as a released checkpoint."""
    from k3jax.checkpoint.hf_aside import kept_aside, open_aside
    from k3jax.checkpoint.hf_config import stored_dtype
    from k3jax.checkpoint.hf_export import plan_export, write_plan
    from k3jax.checkpoint.hf_source import ReleasedSource
    from k3jax.checkpoint.hf_write import new_folder
    from k3jax.checkpoint.open import open_any

    source, dtype, aside = open_any(args.source, args.step), args.dtype, None
    if isinstance(source, ReleasedSource):
        if args.like is not None:
            raise UserError(f"--like: {args.source} is a released checkpoint itself, and keeps what lies beside it")
    else:
        if source.config is None:
            raise UserError(f"{args.source}: no config.json of a run tells what the model is; give the run directory")
        like = args.like or kept_aside(source)
        aside = None if like is None else open_aside(like)
        dtype = dtype or ("bfloat16" if aside is None else stored_dtype(aside.values))
    plan = plan_export(source, aside=aside, dtype=dtype, experts=args.experts, shard_bytes=args.shard_size)
    with (
        _whole_or_not(args.folder),
        new_folder(args.folder) as folder,
        progress_bar(f"exporting {args.source}", plan.nbytes) as advance,
    ):
        write_plan(folder, plan, source, args.scale_rule, advance)
    print(f"{args.folder}: {json.loads(plan.texts['config.json'])['model_type']}, {_describe(plan)}")
    return 0


@dataclasses.dataclass(frozen=True)
class Verb:
    """One of `k3 ckpt`'s verbs, in the form of a module of launch."""

    HELP: str
    EXAMPLE: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


IMPORT = Verb(
    "Checks a released checkpoint of Kimi Linear or Kimi K3 against its config.json and makes a run directory of it. "
    "Its files are kept byte for byte in RUN/released; every verb reads them in place.",
    "k3 ckpt import Kimi-Linear-48B-A3B-Base runs/kimi-linear",
    _import_arguments,
    _import,
)
EXPORT = Verb(
    "Writes a checkpoint of a run as a folder that vLLM, SGLang and transformers read. An imported checkpoint that "
    "nothing changes comes back byte for byte.",
    "k3 ckpt export runs/mine exported --experts=mxfp4 --shard_size=5GB",
    _export_arguments,
    _export,
)


def _size(text: str) -> int:
    """Bytes of a size such as 5GB, in powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = 0 if found is None else int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 5GB, got {text!r}")
    return size


def _describe(plan: "Plan") -> str:
    tensors = sum(len(shard.pieces) for shard in plan.shards)
    files = f"{len(plan.shards)} file{'s' if len(plan.shards) > 1 else ''}"
    also = f"; also {', '.join(file.name for file in plan.files)}" if plan.files else ""
    return f"{tensors:,} tensors in {files}, {nbytes_text(plan.nbytes)}{also}"


@contextlib.contextmanager
def _whole_or_not(path: pathlib.Path) -> Iterator[None]:
    """Turns what the system refuses, such as a full disk, into one line; nothing is left behind."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} could not be written ({error.strerror or error}); nothing of it is left") from None


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; yields what is called with bytes done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
