"""Runs that differ in their seeds alone are one group: what its mean is, how sure, and what it may be compared with."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from k3jax.config_checks import ConfigError
from k3jax.study.plan import flatten
from k3jax.study.runs import Curve, Run
from k3jax.train.claim import FREE_FIELDS

SEEDS = ("TrainConfig.seed", "DataConfig.seed")
NO_SAY = frozenset({*SEEDS, *FREE_FIELDS})  # fields in which the runs of one group may differ
MAX_INFERRED = 3  # swept fields that are looked for where nobody says which they are


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
        mean: of the values.
        error: standard error of the mean, from the standard deviation of n - 1; None for one value.
        count: of the values.
        interpolated: whether a value lies between two evaluations.
    """

    mean: float
    error: float | None
    count: int
    interpolated: bool = False


class Swept(NamedTuple):
    """Fields that the comparison is about, and how that is known."""

    fields: tuple[str, ...]
    known: Literal["sweep", "told", "inferred"]


class Group(NamedTuple):
    """Runs of one configuration but for the seeds.

    Attributes:
        labels: what tells it from the other groups, by column.
        runs: all of them.
        counted: those that the figures are of.
        extra: {field: (its value, what most runs have)} beyond the swept fields.
    """

    labels: dict[str, str]
    runs: list[Run]
    counted: list[Run]
    extra: dict[str, tuple[object, object]]

    @property
    def name(self) -> str:
        own = ", ".join(f"{column}={value}" for column, value in self.labels.items())
        beside = ", ".join(f"{field.rpartition('.')[2]}={value}" for field, (value, _) in self.extra.items())
        return f"{own} [{beside}]" if beside else own


class Comparison(NamedTuple):
    """Groups in order, and the budgets at which they are compared.

    Attributes:
        groups: in the order of the sweep, or of the swept values.
        swept: fields.
        tokens: the most tokens that every counted run with an evaluation has been evaluated at; None without one.
        flops: the same in FLOPs.
    """

    groups: list[Group]
    swept: Swept
    tokens: float | None
    flops: float | None


def compare(runs: Sequence[Run], by: Sequence[str] = (), unfinished: Literal["leave", "count"] = "leave") -> Comparison:
    """Groups runs by configuration.

    Args:
        runs: at least one.
        by: the swept fields; by default those of the runs' sweeps, or the fewest that tell the runs apart.
        unfinished: whether the figures count runs that have not finished, as far as they have come.
    Returns:
        Comparison.
    Raises:
        ConfigError: `by` names a field that does not exist.
    """
    values = [flatten(run.config) for run in runs]
    varying = [f for f in values[0] if f not in NO_SAY and len({repr(v[f]) for v in values}) > 1]
    swept = _swept(runs, values, varying, by)
    usual = {f: _most_common([v[f] for v in values]) for f in varying}
    columns = _columns(runs, values, swept, varying)
    members: dict[tuple, list[int]] = {}
    for i, value in enumerate(values):
        members.setdefault(tuple(repr(value[f]) for f in varying), []).append(i)
    states = ("finished", "unfinished") if unfinished == "count" else ("finished",)
    groups = []
    for indices in members.values():
        first = values[indices[0]]
        extra = {f: (first[f], usual[f]) for f in varying if f not in swept.fields and first[f] != usual[f]}
        own = [runs[i] for i in indices]
        groups.append(Group(columns[indices[0]], own, [r for r in own if r.state in states], extra))
    if swept.known != "sweep":
        groups.sort(key=lambda group: [_order(flatten(group.runs[0].config)[f]) for f in swept.fields])
    ends = [
        (run.heldout.tokens[-1], run.flops_per_token) for g in groups for run in g.counted if len(run.heldout.tokens)
    ]
    return Comparison(
        groups,
        swept,
        min((tokens for tokens, _ in ends), default=None),
        min((tokens * flops for tokens, flops in ends), default=None),
    )


def estimate(values: Sequence[float], interpolated: bool = False) -> Estimate | None:
    """Mean and standard error; None of no values."""
    if not len(values):
        return None
    n = len(values)
    error = float(np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else None
    return Estimate(float(np.mean(values)), error, n, interpolated)


def best_within(curve: Curve, tokens: float) -> tuple[float, bool] | None:
    """The lowest loss of a run that may take so many tokens.

    The loss at the budget itself, between two evaluations, is interpolated linearly in tokens.

    Args:
        curve: held-out loss.
        tokens: the budget.
    Returns:
        The loss, and whether it is the interpolated one; None where the first evaluation comes later.
    """
    inside = curve.tokens <= tokens * (1 + 1e-9)
    if not inside.any():
        return None
    best, interpolated = float(curve.loss[inside].min()), False
    if not inside.all() and curve.tokens[inside][-1] < tokens * (1 - 1e-9):
        between = float(np.interp(tokens, curve.tokens, curve.loss))
        best, interpolated = (between, True) if between < best else (best, False)
    return best, interpolated


def at_tokens(group: Group, tokens: float | None) -> Estimate | None:
    """The best held-out loss within a budget of tokens, over seeds."""
    found = [best_within(run.heldout, tokens) for run in group.counted] if tokens is not None else []
    kept = [pair for pair in found if pair is not None]
    return estimate([loss for loss, _ in kept], any(between for _, between in kept))


def at_flops(group: Group, flops: float | None) -> Estimate | None:
    """The best held-out loss within a budget of FLOPs, over seeds."""
    return at_tokens(group, None if flops is None else flops / group.runs[0].flops_per_token)


def at_end(group: Group) -> Estimate | None:
    """The last held-out loss, over seeds."""
    return estimate([float(run.heldout.loss[-1]) for run in group.counted if len(run.heldout.loss)])


def _swept(runs: Sequence[Run], values: list[dict], varying: list[str], by: Sequence[str]) -> Swept:
    unknown = next((field for field in by if field not in values[0]), None)
    if unknown is not None:
        raise ConfigError(f"--by={unknown}: no such field; write it with its class, such as ModelConfig.kda_per_mla")
    if by:
        return Swept(tuple(by), "told")
    known = {field for run in runs for field in run.swept}
    if known:
        return Swept(tuple(f for f in values[0] if f in known and f not in NO_SAY), "sweep")
    different = {tuple(repr(v[f]) for f in varying) for v in values}
    for count in range(min(MAX_INFERRED, len(varying)) + 1):
        apart = [
            fields
            for fields in itertools.combinations(varying, count)
            if len({tuple(repr(v[f]) for f in fields) for v in values}) == len(different)
        ]
        if apart:  # the first of them in the order of declaration
            return Swept(apart[0], "inferred")
    return Swept(tuple(varying), "inferred")


def _columns(runs: Sequence[Run], values: list[dict], swept: Swept, varying: list[str]) -> list[dict[str, str]]:
    """What each run is called by: the axes of a sweep that all share, and the swept fields they do not cover."""
    axes = [tuple(run.labels or ()) for run in runs]
    shared = axes[0] if len(set(axes)) == 1 else ()
    shared = tuple(axis for axis in shared if axis not in SEEDS)
    named = any(axis not in values[0] for axis in shared)  # the user's names stand for several fields
    adjusted = [f for f in swept.fields if f in varying and f not in shared]
    fields = adjusted if not named else adjusted[:0]
    short = {name: name.rpartition(".")[2] for name in (*shared, *fields)}
    ends = list(short.values())
    short = {name: end if ends.count(end) == 1 else name for name, end in short.items()}
    columns = []
    for run, value in zip(runs, values, strict=True):
        column = {short[axis]: run.labels[axis] for axis in shared if run.labels}
        column |= {short[f]: str(value[f]) for f in fields}
        columns.append(column or {"configuration": "the same"})
    return columns


def _most_common(values: list[object]) -> object:
    name = Counter(map(repr, values)).most_common(1)[0][0]
    return next(value for value in values if repr(value) == name)


def _order(value: object) -> tuple:
    """Numbers by size, then text, then None."""
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (2, 0, "") if value is None else (1, 0, str(value))
