"""`k3 sweep`: the runs that a few lists of values span, trained one after the other or several at a time."""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import typing

from k3jax.config import Config, ConfigError
from k3jax.config_text import config_to_gin
from k3jax.errors import UserError
from k3jax.study.hold import UNITS, Hold, Quantity, adjust, measure
from k3jax.study.plan import Plan, PlannedRun, SweepDir, differences, read_plan, refusal, write_plan
from k3jax.train.claim import FREE_FIELDS, config_changes, lock_directory, new_workdir
from k3jax.train.figures import short
from k3jax.train.run_dir import RunDir, RunRefused, write_atomically
from launch import configure, session
from launch.sweep_axes import Point, parse_axis, points
from launch.sweep_jobs import run_all
from launch.tables import print_rows
from launch.train import check_trainable

HELP = """Trains a run for every combination of the values given, each in a directory of its own. With the --workdir of
a sweep that was stopped or killed, goes on where it was; its runs go on bit for bit.

what --sweep takes:
  "FIELD=V1,V2,..."                         values; commas inside brackets and quotes belong to a value
  "NAME: A{X.y=1; Z.w=2}, B{X.y=3}"         several bindings together, under a name
  "FIELD=@FILE", "NAME: @FILE"              a value, or NAME{...}, a line of the file; # begins a comment"""
EXAMPLE = """k3 sweep --gin_file=experiments/quickstart.gin --workdir=runs/ratio \\
    --sweep="ModelConfig.kda_per_mla=0,1,3,7,15" --sweep="TrainConfig.seed=0,1,2"
  k3 sweep --gin_file=experiments/quickstart.gin --hold=parameters --adjust=ModelConfig.moe_intermediate_size \\
    --sweep="shape: wide{ModelConfig.hidden_size=192; ModelConfig.num_layers=4}, deep{ModelConfig.num_layers=12}"
  k3 sweep --workdir=runs/ratio
  k3 compare runs/ratio"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    configure.add_config_arguments(parser)
    add = parser.add_argument
    add("--sweep", action="append", default=[], metavar="'X.y=V,V'", help="what is varied, see above; repeatable")
    add(
        "--zip",
        dest="order",
        action="store_const",
        const="zip",
        default="product",
        help="take the first values together, then the second ones, and so on, in place of every combination",
    )
    add(
        "--workdir",
        type=session.directory,
        metavar="DIR",
        help="the sweep's directory, new or that of the same sweep; by default a new one under runs/. "
        "Without --sweep, the sweep that is there goes on",
    )
    add("--jobs", type=int, default=1, metavar="N", help="runs at a time on this machine; 1 by default")
    add(
        "--failed",
        choices=("keep", "retry"),
        default="keep",
        help="whether runs that have failed before are left as they are, the default, or tried again",
    )
    add("--list", action="store_true", help="print the runs, checked, and stop")
    group = parser.add_argument_group("a fair comparison")
    group.add_argument(
        "--hold",
        choices=typing.get_args(Quantity),
        help="keep all parameters, those active for a token, or FLOPs a token as they are without the sweep",
    )
    group.add_argument("--adjust", metavar="ModelConfig.F", help="the integer field that is adjusted for --hold")
    group.add_argument("--multiple", type=int, default=1, metavar="N", help="adjust it to multiples of N")
    group.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="P",
        help="refuse a point further off than this; 0.02 by default",
    )


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit status: 0 all finished, 1 some did not, 2 refused, 128 + N after signal N."""
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs}: must be at least 1")
    if args.print_config:
        print(configure.from_arguments(args).operative, end="")
        return 0
    plan = _plan(args)
    if args.list:
        _print_runs(plan)
        return 0
    with contextlib.ExitStack() as stack:
        name = f"sweep-{pathlib.Path(args.gin_file[-1]).stem}" if args.gin_file else "sweep"
        path = pathlib.Path(args.workdir or stack.enter_context(new_workdir(name)))
        sweep = SweepDir(path)
        _check_directory(sweep, plan)
        try:
            path.mkdir(parents=True, exist_ok=True)
            stack.callback(os.close, lock_directory(path))
            _prepare(sweep, plan)
        except OSError as error:
            raise RunRefused(f"{path} cannot be used ({error.strerror or error}); choose another --workdir") from None
        if args.failed == "retry":
            sweep.write_failures({})
        print(f"sweep directory: {path}, {len(plan.runs)} runs", flush=True)
        for planned in plan.runs:
            if planned.adjusted:
                print(f"{planned.name}: {planned.adjusted}", flush=True)
        return _finish(sweep, plan, args.jobs)


def _plan(args: argparse.Namespace) -> Plan:
    """The sweep that is asked for, or the one that is there, with every configuration checked."""
    there = SweepDir(pathlib.Path(args.workdir)) if args.workdir else None
    if not args.sweep:
        asked = [args.gin_file, args.gin_bindings, args.hold, args.order == "zip"]
        if any(asked) or there is None or not there.plan.exists():
            raise UserError(
                'nothing is swept; give --sweep="FIELD=V1,V2,...", or the --workdir of a sweep to go on with'
            )
        plan = read_plan(there.plan)
        for planned in plan.runs:
            _checked(planned.name, planned.config)
        return plan
    if not args.gin_file:
        files = " ".join(str(file) for file in configure.experiment_files())
        raise UserError(f"no configuration; give --gin_file=F, such as {files}")
    if bool(args.hold) != bool(args.adjust):
        raise UserError("--hold and --adjust go together: what is kept, and the field that is adjusted for it")
    hold = Hold(args.hold, args.adjust, args.multiple, args.tolerance) if args.hold else None
    if hold:
        hold.check()
    axes = [parse_axis(text) for text in args.sweep]
    base = configure.from_arguments(args).config
    target = measure(base, hold.quantity) if hold else 0.0
    runs = [_planned(args, point, hold, target) for point in points(axes, args.order)]
    for number, planned in enumerate(runs):
        same = next((other.name for other in runs[:number] if other.config == planned.config), None)
        if same is not None:
            raise ConfigError(f"{planned.name}: the same configuration as {same}; give each once")
        alike = next(
            (other.name for other in runs[:number] if _spelt_out(other.config) == _spelt_out(planned.config)), ""
        )
        if alike:
            layers = " ".join(map(str, planned.config.model.global_layers)) or "none"
            print(f"note: {planned.name} is the same model as {alike}: MLA layers {layers}", flush=True)
    return Plan(base, {axis.name: [c.label for c in axis.choices] for axis in axes}, args.order, hold, runs)


def _spelt_out(config: Config) -> Config:
    """The configuration with its MLA layers listed: two ratios can come to the same in few layers."""
    listed = {"mla_layers": config.model.global_layers, "kda_per_mla": None, "last_layer": "by_ratio"}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **listed))


def _planned(args: argparse.Namespace, point: Point, hold: Hold | None, target: float) -> PlannedRun:
    """One run; an impossible one is a line that names the point."""
    try:
        if hold and any(binding.partition("=")[0].strip() == hold.field for binding in point.bindings):
            raise ConfigError(f"{hold.field} is swept, so it cannot be adjusted too; --adjust another field")
        config, adjusted = configure.load_config(args.gin_file, [*args.gin_bindings, *point.bindings]).config, ""
        if hold:
            config, adjusted = adjust(config, hold, target)
    except UserError as error:
        raise ConfigError(f"{point.name}: {error}") from None
    _checked(point.name, config)
    return PlannedRun(point.name, point.labels, config, adjusted)


def _checked(name: str, config: Config) -> None:
    try:
        check_trainable(config)
    except UserError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_directory(sweep: SweepDir, plan: Plan) -> None:
    """Refuses what is no sweep's directory, or another sweep's; changes nothing."""
    path = sweep.path
    if sweep.plan.exists():
        lines = differences(read_plan(sweep.plan), plan)
        if lines:
            raise refusal(path, lines)
        for planned in plan.runs:
            _check_run(RunDir(path / planned.name), planned.config)
        return
    if path.is_dir() and any(name not in (".lock", ".sweep.json.tmp", "configs", "logs") for name in os.listdir(path)):
        what = "a run" if RunDir(path).status() != "new" else "something else"
        raise RunRefused(f"{path} holds {what}, not a sweep; choose another --workdir")


def _check_run(run: RunDir, config: Config) -> None:
    """Refuses a run directory that somebody has put another run into."""
    if run.status() != "new":
        changes = [change for change in config_changes(run.load_config(), config) if change.field not in FREE_FIELDS]
        if changes:
            raise RunRefused(f"{run.path} holds another run than the sweep's ({changes[0]}); move it away")


def _prepare(sweep: SweepDir, plan: Plan) -> None:
    """Writes what the runs are started with, and the plan last: with it the directory is a sweep."""
    for file in (sweep.config("any"), sweep.log("any")):
        file.parent.mkdir(exist_ok=True)
    for planned in plan.runs:
        write_atomically(sweep.config(planned.name), config_to_gin(planned.config))
    write_plan(plan, sweep.plan)


def _finish(sweep: SweepDir, plan: Plan, jobs: int) -> int:
    outcome = run_all(sweep, plan.runs, jobs)
    total, path = len(plan.runs), sweep.path
    print(f"finished: {len(outcome.finished)} of {total} runs; to compare: k3 compare {path}", flush=True)
    if outcome.failed:
        print(f"k3 sweep: error: {len(outcome.failed)} of {total} runs failed:", file=sys.stderr)
        for name, line in outcome.failed.items():
            print(f"  {name}: {line}\n    all it said: {sweep.log(name)}", file=sys.stderr)
        print(f"to try them again: k3 sweep --workdir={path} --failed=retry", file=sys.stderr)
    if outcome.signal is not None:
        name, begun = signal.Signals(outcome.signal).name, len(outcome.stopped)
        print(f"stopped by {name}, {begun} runs part way; to go on: k3 sweep --workdir={path}", flush=True)
        return 128 + outcome.signal
    if outcome.stopped:
        print(f"stopped by a signal of their own: {', '.join(outcome.stopped)}; to go on: k3 sweep --workdir={path}")
    return 1 if outcome.failed or outcome.stopped else 0


def _print_runs(plan: Plan) -> None:
    rows = [("run", "adjusted", "parameters", "active", "FLOPs a token")]
    for planned in plan.runs:
        figures = [short(measure(planned.config, quantity)) for quantity in UNITS]
        rows.append((planned.name, planned.adjusted or "-", *figures))
    print_rows(rows, left=2)
