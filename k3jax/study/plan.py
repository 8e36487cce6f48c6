"""What a sweep is: its runs and their configurations, as `sweep.json` keeps them. No jax import here."""

import dataclasses
import json
import pathlib
from typing import NamedTuple

from k3jax.config import SECTIONS, Config, ConfigError, from_dict, to_dict
from k3jax.study.hold import Hold
from k3jax.train.claim import FREE_FIELDS, config_changes
from k3jax.train.run_dir import RunRefused, read_json, write_atomically

MAX_SHOWN = 20  # lines of a refusal


class PlannedRun(NamedTuple):
    """One point of a sweep.

    Attributes:
        name: of its run directory, in that of the sweep.
        labels: the choice on each axis, in words.
        config: of the run.
        adjusted: what was adjusted to hold a quantity, and how close it came; empty without.
    """

    name: str
    labels: dict[str, str]
    config: Config
    adjusted: str = ""


class Plan(NamedTuple):
    """A whole sweep.

    Attributes:
        base: the configuration without the sweep.
        axes: the choices on each axis, in words.
        order: "product" or "zip".
        hold: what is held, or None.
        runs: in the order in which they start.
    """

    base: Config
    axes: dict[str, list[str]]
    order: str
    hold: Hold | None
    runs: list[PlannedRun]

    def swept(self) -> tuple[str, ...]:
        """Every field that differs from the base in some run, in the order of their declaration."""
        changed = {change.field for run in self.runs for change in config_changes(self.base, run.config)}
        return tuple(field for field in flatten(self.base) if field in changed)


class SweepDir(NamedTuple):
    """Where the parts of a sweep lie.

    Attributes:
        path: the sweep's directory; each run is a directory in it.
    """

    path: pathlib.Path

    @property
    def plan(self) -> pathlib.Path:
        return self.path / "sweep.json"

    @property
    def failures(self) -> pathlib.Path:
        """{run: why it failed}."""
        return self.path / "failures.json"

    @property
    def compilations(self) -> pathlib.Path:
        """What jax has compiled; nothing is lost with it but time."""
        return self.path.absolute() / "compilations"

    def config(self, name: str) -> pathlib.Path:
        """The gin file that a run is started with."""
        return self.path / "configs" / f"{name}.gin"

    def log(self, name: str) -> pathlib.Path:
        """What a run printed."""
        return self.path / "logs" / f"{name}.log"

    def read_failures(self) -> dict[str, str]:
        return dict(read_json(self.failures)) if self.failures.exists() else {}

    def write_failures(self, failures: dict[str, str]) -> None:
        write_atomically(self.failures, json.dumps(failures, indent=2) + "\n")


def flatten(config: Config) -> dict[str, object]:
    """{"ModelConfig.num_layers": 93, ...}: every field in the order of their declaration."""
    parts = [(cls.__name__, getattr(config, section)) for section, cls in SECTIONS.items()]
    return {f"{cls}.{f.name}": getattr(part, f.name) for cls, part in parts for f in dataclasses.fields(part)}


def write_plan(plan: Plan, path: pathlib.Path) -> None:
    """Writes `sweep.json`: the base whole, of each run only what differs from it."""
    runs = []
    for run in plan.runs:
        changes = {change.field: change.new for change in config_changes(plan.base, run.config)}
        runs.append({"name": run.name, "labels": run.labels, "changes": changes, "adjusted": run.adjusted})
    hold = plan.hold._asdict() if plan.hold else None
    values = {"order": plan.order, "axes": plan.axes, "hold": hold, "runs": runs, "base": to_dict(plan.base)}
    write_atomically(path, json.dumps(values, indent=2) + "\n")


def read_plan(path: pathlib.Path) -> Plan:
    """The inverse of `write_plan`.

    Raises:
        RunRefused: not readable, or written by another version of k3jax.
    """
    values = read_json(path)
    try:
        base = from_dict(values["base"])
        runs = [
            PlannedRun(run["name"], dict(run["labels"]), _changed(base, run["changes"]), run["adjusted"])
            for run in values["runs"]
        ]
        hold = Hold(**values["hold"]) if values["hold"] else None
        return Plan(base, dict(values["axes"]), values["order"], hold, runs)
    except ConfigError as error:
        raise RunRefused(f"{path} cannot be read: {error}; give the directory of a sweep") from None
    except (KeyError, ValueError, TypeError, AttributeError):  # JSON of another form
        raise RunRefused(f"{path} cannot be read: not a sweep as k3jax writes it; give the directory of one") from None


def differences(old: Plan, new: Plan) -> list[str]:
    """In what two sweeps differ, a line each; settings that have no say in the results are left out."""
    lines = [str(change) for change in config_changes(old.base, new.base) if change.field not in FREE_FIELDS]
    for axis in [*old.axes, *(axis for axis in new.axes if axis not in old.axes)]:
        before, after = (", ".join(plan.axes.get(axis, ["not swept"])) for plan in (old, new))
        if before != after:
            lines.append(f"{axis}: {before} -> {after}")
    if old.order != new.order:
        lines.append(f"order: {old.order} -> {new.order}")
    if old.hold != new.hold:
        lines.append(f"hold: {_describe(old.hold)} -> {_describe(new.hold)}")
    there = {run.name: run for run in old.runs}
    if not lines and list(there) != [run.name for run in new.runs]:
        lines.append("the axes are in another order")
    if not lines:  # a named choice that stands for other settings now
        for run in new.runs:
            changes = config_changes(there[run.name].config, run.config)
            lines += [f"{run.name}: {change}" for change in changes if change.field not in FREE_FIELDS]
    return lines


def refusal(path: pathlib.Path, lines: list[str]) -> RunRefused:
    """The error of a sweep directory that holds another sweep."""
    more = [f"  ... and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    shown = [f"  {line}" for line in lines[:MAX_SHOWN]]
    heading = f"{path} holds another sweep (what is there -> what is asked for):"
    end = "Nothing was changed. Choose another --workdir, or go on with the sweep that is there: k3 sweep "
    return RunRefused("\n".join([heading, *shown, *more, f"{end}--workdir={path}"]))


def _changed(base: Config, changes: dict[str, object]) -> Config:
    values = to_dict(base)
    for field, value in changes.items():
        cls, _, name = field.partition(".")
        section = next(section for section, its_class in SECTIONS.items() if its_class.__name__ == cls)
        values[section][name] = value
    return from_dict(values)


def _describe(hold: Hold | None) -> str:
    if hold is None:
        return "nothing"
    step = f" in steps of {hold.multiple}" if hold.multiple > 1 else ""
    return f"{hold.quantity} by {hold.field}{step} within {hold.tolerance:.2%}"
