"""A comparison as one HTML page that needs nothing else, in the style of a run's report."""

import textwrap

from k3jax.study import curves
from k3jax.study.groups import Comparison, at_tokens
from k3jax.study.plan import flatten
from k3jax.study.tables import NONE, loss_text, notes, summary_table
from k3jax.train.figures import short
from k3jax.train.report_page import Fact, Grid, Picture, Section, page
from k3jax.train.report_style import png


def comparison_page(comparison: Comparison, title: str) -> str:
    """The whole page.

    Args:
        comparison: of at least one group.
        title: of the page.
    Returns:
        HTML.
    """
    sections = [
        _overview(comparison),
        _table(comparison),
        _pictures(comparison),
        _runs(comparison),
        _settings(comparison),
    ]
    return page(title, [s for s in sections if s.facts or s.grids or s.pictures or s.texts])


def _overview(comparison: Comparison) -> Section:
    groups = comparison.groups
    runs = [run for group in groups for run in group.runs]
    states = {
        state: sum(run.state == state for run in runs) for state in ("finished", "unfinished", "failed", "not begun")
    }
    others = ", ".join(f"{n} {state}" for state, n in states.items() if n and state != "finished")
    facts = [
        Fact("runs", str(len(runs)), others or "all finished"),
        Fact("configurations", str(len(groups)), "runs that differ in seeds alone are one"),
    ]
    found = [(value.mean, value, g) for g in groups if (value := at_tokens(g, comparison.tokens)) is not None]
    if len(found) > 1:
        _, value, group = min(found, key=lambda item: item[0])
        facts.append(
            Fact("lowest held-out loss", loss_text(value), f"{group.name}, at {short(comparison.tokens)} tokens")
        )
    flagged = sum(len(group.runs) for group in groups if group.extra)
    if flagged:
        facts.append(Fact("flagged", str(flagged), "differ in more than what is compared"))
    return Section("Overview", facts=facts)


def _table(comparison: Comparison) -> Section:
    table = summary_table(comparison)
    grid = Grid(table.heading, table.rows, table.left, table.best)
    return Section("Table", grids=[grid], texts=[("Notes", "\n\n".join(_wrapped(note) for note in notes(comparison)))])


def _pictures(comparison: Comparison) -> Section:
    groups = curves.shown_groups(comparison)
    pictures = []
    if any(len(run.heldout.loss) for group in groups for run in group.counted):
        image = png(curves.loss_bars, comparison)
        caption = "Dots: each run. Upright: their mean; bar: its standard error, where there is more than one run."
        pictures.append(Picture("losses", image, "Held-out loss of each configuration with error bars", caption))
        image = png(curves.heldout_curves, groups, (comparison.tokens, comparison.flops))
        caption = "Mean over seeds; band: standard error. Dotted: the budget at which the table compares."
        pictures.append(Picture("heldout", image, "Held-out loss over tokens and over FLOPs", caption))
    if any(len(run.train.loss) for group in groups for run in group.counted):
        image = png(curves.training_curves, groups)
        caption = "Running mean, mean over seeds; band: standard error."
        pictures.append(Picture("training", image, "Training loss over tokens", caption))
    left_out = sum(bool(group.counted) for group in comparison.groups) - len(groups)
    note = (
        f"The {len(groups)} configurations with the lowest losses; {left_out} more are in the table."
        if left_out
        else ""
    )
    return Section("Learning curves", note=note, pictures=pictures)


def _runs(comparison: Comparison) -> Section:
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            loss = f"{run.heldout.loss[-1]:.4f}" if len(run.heldout.loss) else NONE
            speed = short(run.speed) if run.speed is not None else NONE
            steps = f"{run.step:,} of {run.config.train.steps:,}"
            rows.append([run.path.name, run.state, steps, loss, speed])
    return Section("Runs", grids=[Grid(["run", "state", "steps", "held-out loss", "tokens/s"], rows, 2, set())])


def _settings(comparison: Comparison) -> Section:
    """What the runs share, and what each configuration has of its own."""
    values = [flatten(run.config) for group in comparison.groups for run in group.runs]
    varying = [field for field in values[0] if len({repr(value[field]) for value in values}) > 1]
    shared = "\n".join(f"{field} = {value!r}" for field, value in values[0].items() if field not in varying)
    own = []
    for group in comparison.groups:
        own.append(group.name)
        for run in group.runs:
            config = flatten(run.config)
            own.append(f"  {run.path}: " + ", ".join(f"{field} = {config[field]!r}" for field in varying))
    texts = [("In which the runs differ", "\n".join(own)), ("What all runs share", shared)]
    return Section("Configurations", texts=texts)


def _wrapped(text: str, width: int = 110) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
