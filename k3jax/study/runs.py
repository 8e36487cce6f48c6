"""Run directories read for a comparison: configuration, status, and the curves of their losses. No jax import here."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from k3jax.config import Config
from k3jax.models.accounting import count_parameters, train_flops_per_token
from k3jax.study.plan import Plan, SweepDir, read_plan
from k3jax.train.metrics import read_whole_records
from k3jax.train.run_dir import RunDir, RunRefused

RunState = Literal["finished", "unfinished", "failed", "not begun"]


class Curve(NamedTuple):
    """A loss over the tokens that had been trained on; two arrays of one length, tokens ascending."""

    tokens: np.ndarray
    loss: np.ndarray


class Run(NamedTuple):
    """One run, as far as it has come.

    Attributes:
        path: its directory.
        config: its configuration.
        state: "failed" is known of a sweep's runs alone.
        reason: of a failure, else empty.
        step: the last one logged.
        labels: the choices of its sweep, or None for a run outside of one.
        swept: fields that its sweep varies on purpose; empty for a run outside of one.
        adjusted: what its sweep adjusted to hold a quantity; empty without.
        train: training loss, at each logged step.
        heldout: loss on held-out text, at each evaluation.
        speed: median tokens a second, or None.
    """

    path: pathlib.Path
    config: Config
    state: RunState
    reason: str
    step: int
    labels: dict[str, str] | None
    swept: tuple[str, ...]
    adjusted: str
    train: Curve
    heldout: Curve
    speed: float | None

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of training on one token."""
        return train_flops_per_token(self.config.model, self.config.data.seq_len)

    @property
    def parameters(self) -> int:
        return count_parameters(self.config.model).total

    @property
    def active(self) -> int:
        return count_parameters(self.config.model).active


def read_runs(paths: Sequence[pathlib.Path]) -> list[Run]:
    """The runs of run directories, of sweep directories, and of folders that hold run directories.

    Args:
        paths: of any of these; a run that two of them name is taken once.
    Returns:
        Runs in the order of the paths; those of a sweep in its own, begun or not.
    Raises:
        RunRefused: a path that is none of these, or a run that cannot be read.
    """
    found: dict[pathlib.Path, Run] = {}
    for path in paths:
        for run in _read(path):
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def _read(path: pathlib.Path) -> Iterable[Run]:
    if SweepDir(path).plan.exists():
        plan = read_plan(SweepDir(path).plan)
        return [_read_run(path / run.name, plan) for run in plan.runs]
    if RunDir(path).config_json.exists():
        beside = SweepDir(path.parent)
        return [_read_run(path, read_plan(beside.plan) if beside.plan.exists() else None)]
    inside = sorted(p.parent for p in path.glob("*/config.json")) if path.is_dir() else []
    if not inside:
        what = "no run, no sweep and no folder of runs" if path.exists() else "not there"
        raise RunRefused(f"{path} is {what}; give run directories or the directory of a sweep")
    return [_read_run(p, None) for p in inside]


def _read_run(path: pathlib.Path, plan: Plan | None) -> Run:
    run = RunDir(path)
    planned = next((p for p in plan.runs if p.name == path.name), None) if plan else None
    begun = run.config_json.exists()
    config = run.load_config() if begun or planned is None else planned.config
    reason = SweepDir(path.parent).read_failures().get(path.name, "") if planned else ""
    state: RunState = {"finished": "finished", "resumable": "unfinished", "new": "not begun"}[run.status()]
    if reason and state != "finished":
        state = "failed"
    records = read_whole_records(run.metrics)
    speeds = [r["tokens_per_second"] for r in records if isinstance(r.get("tokens_per_second"), (int, float))]
    train, heldout = _curves(records, config)
    return Run(
        path,
        config,
        state,
        reason if state == "failed" else "",
        max((r["step"] for r in records), default=0),
        planned.labels if planned else None,
        plan.swept() if plan and planned else (),
        planned.adjusted if planned else "",
        train,
        heldout,
        float(np.median(speeds)) if speeds else None,
    )


def _curves(records: list[dict], config: Config) -> tuple[Curve, Curve]:
    """The losses over tokens; an evaluation's tokens come from the logged steps around it."""
    logged = {r["step"]: r["tokens"] for r in records if isinstance(r.get("tokens"), (int, float))}
    steps = np.array([0, *logged], float)
    tokens = np.array([0, *logged.values()], float)
    row_tokens = config.data.batch_size * config.data.seq_len  # at most: padding is no token

    def curve(name: str) -> Curve:
        by_step = {r["step"]: r[name] for r in records if isinstance(r.get(name), (int, float))}
        at, values = np.array(list(by_step), float), np.array(list(by_step.values()), float)
        kept = np.isfinite(values)
        at, values = at[kept], values[kept]
        return Curve(np.interp(at, steps, tokens) if logged else at * row_tokens, values)

    return curve("loss"), curve("eval_loss")
