"""A comparison as rows of text, and those as Markdown and LaTeX."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from k3jax.study.groups import SEEDS, Comparison, Estimate, Group, at_end, at_flops, at_tokens, estimate
from k3jax.train.figures import short

NONE = "-"
PLUS_MINUS = "±"


class Table(NamedTuple):
    """Cells of text.

    Attributes:
        heading: of each column.
        rows: in order.
        left: how many columns, from the first, are words.
        best: (row, column) of the lowest losses.
    """

    heading: list[str]
    rows: list[list[str]]
    left: int
    best: set[tuple[int, int]]


def summary_table(comparison: Comparison) -> Table:
    """A row a group: what it is, what it costs, how fast it was, and its held-out losses."""
    groups = comparison.groups
    labels = list(dict.fromkeys(column for group in groups for column in group.labels))
    flagged = any(group.extra for group in groups)
    tokens = f"at {short(comparison.tokens)} tokens" if comparison.tokens else "at equal tokens"
    flops = f"at {short(comparison.flops)} FLOPs" if comparison.flops else "at equal FLOPs"
    losses: list[tuple[str, Callable[[Group], Estimate | None]]] = [
        ("held-out loss", at_end),
        (tokens, lambda group: at_tokens(group, comparison.tokens)),
        (flops, lambda group: at_flops(group, comparison.flops)),
    ]
    heading = [*labels, *(["also differs in"] if flagged else []), "runs", "parameters", "active", "FLOPs/token"]
    heading += ["tokens", "tokens/s", *(name for name, _ in losses)]
    rows, means = [], []
    for group in groups:
        run = group.runs[0]
        row = [group.labels.get(column, NONE) for column in labels]
        row += [", ".join(field.rpartition(".")[2] for field in group.extra) or NONE] if flagged else []
        row += [count(group), short(run.parameters), short(run.active), short(run.flops_per_token)]
        trained = estimate([float(r.train.tokens[-1]) for r in group.counted if len(r.train.tokens)])
        speed = estimate([r.speed for r in group.counted if r.speed is not None])
        found = [measure(group) for _, measure in losses]
        row += [short(trained.mean) if trained else NONE, speed_text(speed), *map(loss_text, found)]
        rows.append(row)
        means.append([value.mean if value else None for value in found])
    best = set()
    for i in range(len(losses)):
        known = [(mean[i], row) for row, mean in enumerate(means) if mean[i] is not None]
        if len(known) > 1:
            best.add((min(known)[1], len(heading) - len(losses) + i))
    return Table(heading, rows, len(labels) + flagged, best)


def count(group: Group) -> str:
    """How many runs the figures are of: 3, or 2 of 3."""
    return (
        f"{len(group.counted)}"
        if len(group.counted) == len(group.runs)
        else f"{len(group.counted)} of {len(group.runs)}"
    )


def loss_text(value: Estimate | None) -> str:
    """1.4701 ± 0.0031, with ~ where it was interpolated, and no ± for one run alone."""
    if value is None:
        return NONE
    error = "" if value.error is None else f" {PLUS_MINUS} {value.error:.4f}"
    return f"{'~' if value.interpolated else ''}{value.mean:.4f}{error}"


def speed_text(value: Estimate | None) -> str:
    """Tokens a second with their standard error."""
    if value is None:
        return NONE
    return short(value.mean) + ("" if value.error is None else f" {PLUS_MINUS} {short(value.error)}")


def notes(comparison: Comparison) -> list[str]:
    """What a reader of the table has to know, a sentence or two each."""
    groups = comparison.groups
    lines = [
        f"Mean {PLUS_MINUS} standard error over runs that differ in {' or '.join(SEEDS)} alone. FLOPs are model FLOPs "
        "of training. Held-out loss in nats a token: at the last evaluation, and the best within the largest budget "
        "that every run had."
    ]
    ended = {run.config.train.steps for group in groups for run in group.counted}
    if comparison.tokens is not None and (len(ended) > 1 or _unequal_flops(groups)):
        lines.append(
            "A run that was longer than a budget had not finished its learning-rate schedule there, which favours the "
            "run that the budget was taken from."
        )
    if any(
        v and v.interpolated for g in groups for v in (at_tokens(g, comparison.tokens), at_flops(g, comparison.flops))
    ):
        lines.append("~ lies between two evaluations and is interpolated linearly in tokens.")
    alone = [group.name for group in groups if len(group.counted) == 1]
    if alone:
        lines.append(f"One run alone, so no error bar: {_listed(alone)}.")
    silent = [run.path.name for group in groups for run in group.counted if not len(run.heldout.loss)]
    if silent:
        lines.append(f"No evaluation on held-out text, so not among the losses: {_listed(silent)}.")
    lines += _left_out(groups) + _flags(comparison)
    adjusted = {run.adjusted: None for group in groups for run in group.runs if run.adjusted}
    if adjusted:
        lines.append("Adjusted to hold a quantity: " + "; ".join(adjusted) + ".")
    return lines


def markdown(table: Table) -> str:
    """The table in Markdown, the lowest losses bold."""
    heading = [_escape_markdown(cell) for cell in table.heading]
    rule = [":--" if i < table.left else "--:" for i in range(len(heading))]
    rows = [
        [f"**{_escape_markdown(x)}**" if (r, c) in table.best else _escape_markdown(x) for c, x in enumerate(row)]
        for r, row in enumerate(table.rows)
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heading, rule, *rows))


def latex(table: Table) -> str:
    """The table in LaTeX, for the package booktabs, the lowest losses bold."""
    columns = "l" * table.left + "r" * (len(table.heading) - table.left)
    rows = [
        [rf"\textbf{{{_escape_latex(x)}}}" if (r, c) in table.best else _escape_latex(x) for c, x in enumerate(row)]
        for r, row in enumerate(table.rows)
    ]
    heading = " & ".join(map(_escape_latex, table.heading))
    body = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            heading + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _unequal_flops(groups: Sequence[Group]) -> bool:
    return len({run.flops_per_token for group in groups for run in group.counted}) > 1


def _left_out(groups: Sequence[Group]) -> list[str]:
    lines = []
    for group in groups:
        for run in group.runs:
            if run in group.counted:
                continue
            at = f" at step {run.step} of {run.config.train.steps}" if run.step else ""
            lines.append(f"Not counted: {run.path.name}, {run.state}{at}{': ' if run.reason else ''}{run.reason}.")
    return lines


def _flags(comparison: Comparison) -> list[str]:
    fields = ", ".join(comparison.swept.fields)
    lines = []
    if comparison.swept.known == "inferred" and fields:
        lines.append(f"Taken to be compared: {fields}, the fewest fields that tell the runs apart; --by names others.")
    for group in comparison.groups:
        for field, (value, usual) in group.extra.items():
            names = _listed([run.path.name for run in group.runs])
            lines.append(
                f"FLAG: {names}: differs in more than {fields or 'the seed'}: {field} = {value!r}, not {usual!r}."
            )
    return lines


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _escape_markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*")


def _escape_latex(text: str) -> str:
    text = text.replace("\\", r"\textbackslash ")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return text.replace(PLUS_MINUS, r"$\pm$").replace("~", r"$\sim$").replace("^", r"\^{}")
