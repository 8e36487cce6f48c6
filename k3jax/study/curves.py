"""The pictures of a comparison: losses over tokens and FLOPs, and the groups' losses with their error bars."""

from collections.abc import Callable, Sequence

import numpy as np

from k3jax.study.groups import Comparison, Group, at_flops, at_tokens, best_within
from k3jax.study.runs import Curve, Run
from k3jax.train.figures import short
from k3jax.train.report_style import INK, MUTED, TRAIN, WIDTH, depth_colours, running_mean

MAX_LINES = 12  # groups with a line each; of more, those with the lowest losses
LEGEND_LETTERS = 105  # beside each other
POINTS = 200  # where curves of unequal runs are averaged


def shown_groups(comparison: Comparison) -> list[Group]:
    """Those that get a line: all, or the best of many, in order."""
    groups = [group for group in comparison.groups if group.counted]
    if len(groups) <= MAX_LINES:
        return groups

    def loss(group: Group) -> float:
        value = at_tokens(group, comparison.tokens)
        return value.mean if value else float("inf")

    kept = {id(group) for group in sorted(groups, key=loss)[:MAX_LINES]}
    return [group for group in groups if id(group) in kept]


def heldout_curves(groups: Sequence[Group], budgets: tuple[float | None, float | None]):
    """Held-out loss over tokens, and below it over FLOPs; dotted: the budgets."""
    figure, axes = _panels(2)
    panels = (("tokens", lambda run: 1.0, budgets[0]), ("training FLOPs", lambda run: run.flops_per_token, budgets[1]))
    for axis, (unit, scale, budget) in zip(axes, panels, strict=True):
        _draw(axis, groups, lambda run: run.heldout, scale, marker="o")
        if budget:
            axis.axvline(budget, color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
        axis.set(title=f"Held-out loss over {unit}", xlabel=unit, ylabel="nats per token")
        _zoom(axis, [run.heldout for group in groups for run in group.counted])
    _legend(figure, axes[0])
    return figure


def training_curves(groups: Sequence[Group]):
    """Training loss over tokens, as a running mean."""
    figure, axes = _panels(1)
    smooth = [Curve(r.train.tokens, running_mean(r.train.loss)) for group in groups for r in group.counted]
    _draw(axes[0], groups, lambda run: Curve(run.train.tokens, running_mean(run.train.loss)), lambda run: 1.0)
    axes[0].set(title="Training loss over tokens", xlabel="tokens", ylabel="nats per token")
    _zoom(axes[0], smooth)
    _legend(figure, axes[0])
    return figure


def loss_bars(comparison: Comparison):
    """Each group's best held-out loss within the budgets: a dot a run, and their mean with its standard error."""
    from matplotlib.figure import Figure

    groups = [group for group in comparison.groups if group.counted]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.32 * len(groups)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    budgets = (
        (comparison.tokens, "tokens", lambda run: comparison.tokens, at_tokens),
        (comparison.flops, "FLOPs", lambda run: comparison.flops / run.flops_per_token, at_flops),
    )
    for axis, (budget, unit, tokens_of, measure) in zip(axes, budgets, strict=True):
        for row, group in enumerate(groups):
            found = [best_within(run.heldout, tokens_of(run)) for run in group.counted]
            losses = [pair[0] for pair in found if pair is not None]
            axis.plot(
                losses, [row + 0.25] * len(losses), "o", color=TRAIN, alpha=0.6, markersize=4.5, markeredgewidth=0
            )
            value = measure(group, budget)
            if value is not None:
                axis.errorbar(value.mean, row, xerr=value.error, fmt="|", color=INK, markersize=12, capsize=3)
        axis.set(title=f"At {short(budget)} {unit}", xlabel="held-out loss, nats per token")
        axis.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(groups)), [group.name for group in groups])
    axes[0].set_ylim(len(groups) - 0.5, -0.5)
    return figure


def _draw(axis, groups: Sequence[Group], curve_of: Callable[[Run], Curve], scale: Callable[[Run], float], marker=""):
    """A line a group, the mean of its runs as far as all of them reach, with a band of the standard error."""
    for colour, group in zip(depth_colours(len(groups)), groups, strict=True):
        curves = [curve_of(run) for run in group.counted]
        curves = [curve for curve in curves if len(curve.tokens)]
        if not curves:
            continue
        mean, error = average(curves)
        x = mean.tokens * scale(group.runs[0])
        few = marker if len(x) <= 20 else ""
        axis.plot(x, mean.loss, color=colour, marker=few, markersize=3.5, label=group.name)
        if error is not None:
            axis.fill_between(x, mean.loss - error, mean.loss + error, color=colour, alpha=0.2, linewidth=0)
    axis.xaxis.set_major_formatter(lambda value, _: short(value) if value >= 0 else "")


def average(curves: Sequence[Curve]) -> tuple[Curve, np.ndarray | None]:
    """The mean of several curves and its standard error, where all of them are known; None for one curve."""
    if len(curves) == 1:
        return curves[0], None
    first, last = max(c.tokens[0] for c in curves), min(c.tokens[-1] for c in curves)
    same = len({len(c.tokens) for c in curves}) == 1
    if same:  # one evaluation after the other; packing can make their tokens differ a little
        at, losses = np.mean([c.tokens for c in curves], 0), np.array([c.loss for c in curves])
    else:
        at = np.linspace(first, last, POINTS) if last > first else np.array([last])
        losses = np.array([np.interp(at, c.tokens, c.loss) for c in curves])
    return Curve(at, losses.mean(0)), losses.std(0, ddof=1) / np.sqrt(len(curves))


def _panels(count: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.5 + 2.9 * count), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _legend(figure, axis) -> None:
    """Below the panels, because names can be long and curves lie anywhere."""
    handles, names = axis.get_legend_handles_labels()
    if names:
        columns = max(1, LEGEND_LETTERS // (max(map(len, names)) + 6))
        figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)))


def _zoom(axis, curves: Sequence[Curve]) -> None:
    """Limits the losses to those after the first tenth, where there are enough of them."""
    late = [c.loss[c.tokens >= 0.1 * c.tokens[-1]] for c in curves if len(c.tokens) > 10]
    if late:
        values = np.concatenate(late)
        low, high = float(values.min()), float(values.max())
        margin = 0.08 * (high - low) or 0.05
        axis.set_ylim(low - margin, high + margin)
