"""The report of a run: one HTML file that needs nothing else, and its pictures beside it.

It is made from what the run directory holds; what is not there is left out.
"""

import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from k3jax.config import Config
from k3jax.models.accounting import count_parameters
from k3jax.models.plan import layer_kinds
from k3jax.train import report_inside, report_plots
from k3jax.train.diagnostics import Diagnostics, read_diagnostics
from k3jax.train.figures import duration, short
from k3jax.train.metrics import read_whole_records, violations
from k3jax.train.report_page import Fact, Picture, Section, page
from k3jax.train.report_style import Series, is_smoothed, png
from k3jax.train.run_dir import RunDir, write_atomically

REPORT = "report.html"
PICTURES = "report"  # folder of the PNG files
NAMES = {
    "loss", "optimizer", "throughput", "load_over_time", "load_by_layer", "max_violation", "depth_weights",
    "half_lives", "half_life_by_head",
}  # fmt: skip

RULES = {
    "quantile": "Quantile Balancing",
    "quantile_exact": "exact quantiles",
    "sign": "sign update",
    "aux_loss": "auxiliary loss",
    "none": "none",
}
END = 0.1  # "at the end" is a mean over this part of what was logged


class Loads(NamedTuple):
    """Expert loads, where they were logged: steps [S], tokens [S, N, E] and the N layers' numbers."""

    steps: np.ndarray
    load_SNE: np.ndarray
    layers: list[int]


class _Run(NamedTuple):
    """What a run directory says about the run."""

    path: pathlib.Path
    config: Config | None
    records: list[dict[str, Any]]
    diagnostics: Diagnostics | None

    def series(self, name: str) -> Series:
        """The finite values of a metric."""
        return _series((r["step"], r.get(name)) for r in self.records)

    def last(self, name: str) -> float | None:
        series = self.series(name)
        return float(series.values[-1]) if series else None


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes `report.html`, and the pictures in it to the folder `report`.

    Args:
        workdir: a run directory; metrics, configuration and diagnostics are read where they exist.
    Returns:
        The HTML file.
    """
    path = pathlib.Path(workdir)
    run = _Run(path, _config(path), read_whole_records(path / "metrics.jsonl"), _diagnostics(path))
    sections = [_overview(run), _training(run), _experts(run), _depth(run), _decay(run), _settings(run)]
    sections = [s for s in sections if s.note or s.facts or s.pictures or s.texts]
    _write_pictures(path / PICTURES, [p for section in sections for p in section.pictures])
    title = f"Training run {path.resolve().name}"
    write_atomically(path / REPORT, page(title, sections))
    return path / REPORT


def _overview(run: _Run) -> Section:
    facts = []

    def fact(label: str, value: float | None, form: Callable[[float], str], note: str = "") -> None:
        if value is not None:
            facts.append(Fact(label, form(value), note))

    evaluated = run.series("eval_loss")
    at = f"step {evaluated.steps[-1]:,.0f}" if evaluated else ""
    fact("held-out loss", run.last("eval_loss"), "{:.4f}".format, f"nats per token, {at}")
    fact("held-out bits per byte", run.last("eval_bits_per_byte"), "{:.3f}".format, at)
    fact("training loss", _at_end(run.series("loss")), "{:.4f}".format, "nats per token, last tenth of the run")
    steps = max((r["step"] for r in run.records), default=None)
    fact("steps", steps, "{:,}".format, f"of {run.config.train.steps:,}" if run.config else "")
    fact("tokens", run.last("tokens"), short, "trained on")
    fact("time", _seconds(run), duration, "steps and evaluation")
    speed = run.series("tokens_per_second")
    fact("throughput", float(np.median(speed.values)) if speed else None, "{:,.0f}".format, "tokens per second, median")
    mfu = run.series("mfu")
    fact("MFU", float(np.median(mfu.values)) if mfu else None, "{:.1%}".format, "of the peak, median")
    fact("MaxVio", _at_end(run.series("max_violation")), "{:.3f}".format, "mean of layers, last tenth of the run")
    fact("steps skipped", run.last("skipped") or None, "{:,.0f}".format, "gradient not finite")
    if run.config is not None:
        table = count_parameters(run.config.model)
        fact("parameters", table.total, short, f"{short(table.active)} active per token")
    return Section("Overview", facts=facts, note="" if run.records else "No step has been logged.")


def _training(run: _Run) -> Section:
    pictures = []
    loss, heldout = run.series("loss"), run.series("eval_loss")
    if loss or heldout:
        image = png(
            report_plots.loss_curves, loss, heldout, run.series("bits_per_byte"), run.series("eval_bits_per_byte")
        )
        # Faint values behind a mean are drawn only where there are many.
        smoothed = is_smoothed(loss) or is_smoothed(run.series("bits_per_byte"))
        caption = "Faint: each logged step. Solid: running mean." if smoothed else "Each logged step."
        if run.series("bits_per_byte") or run.series("eval_bits_per_byte"):
            caption += " Bits per byte are scaled to the run after its first tenth."
        pictures.append(Picture("loss", image, "Training and held-out loss by step", caption))
    rate, norm = run.series("learning_rate"), run.series("grad_norm")
    if rate or norm:
        image = png(report_plots.optimizer_curves, rate, norm, _skipped_steps(run))
        caption = "The norm is that before clipping."
        pictures.append(Picture("optimizer", image, "Learning rate and gradient norm by step", caption))
    speed, mfu = run.series("tokens_per_second"), run.series("mfu")
    if speed or mfu:
        image = png(report_plots.throughput_curves, speed, mfu)
        caption = "Without pauses for compilation, evaluation and checkpoints. Dashed: the median."
        pictures.append(Picture("throughput", image, "Tokens per second by step", caption))
    return Section("Training", pictures=pictures)


def _experts(run: _Run) -> Section:
    pictures = []
    loads = _loads(run)
    if loads is not None:
        if len(loads.steps) > 1:
            image = png(report_plots.load_over_time, *loads)
            alternative = "Heat maps of each expert's load over time, one for each MoE layer"
            caption = "White: the mean load of the layer's experts. Red: more, blue: less."
            pictures.append(Picture("load_over_time", image, alternative, caption))
        count = max(1, round(END * len(loads.steps)))
        image = png(report_plots.load_by_layer, loads.load_SNE[-count:].sum(0), loads.layers)
        caption = f"Summed over the last {count} logged steps." if count > 1 else "At the last logged step."
        pictures.append(Picture("load_by_layer", image, "Heat map of expert load by layer at the end", caption))
    by_layer, mean, worst = _violations(run, loads)
    if by_layer or mean or worst:
        rule = RULES.get(run.config.model.balancing, run.config.model.balancing) if run.config else "unknown"
        image = png(report_plots.violation_curves, by_layer, mean, worst, rule)
        caption = "MaxVio is the busiest expert's load over the mean load, minus 1: 0 is perfect balance."
        pictures.append(Picture("max_violation", image, "MaxVio of each layer over time", caption))
    return Section("Expert balance", pictures=pictures)


def _depth(run: _Run) -> Section:
    d = run.diagnostics
    if d is None or not d.consumers:
        return Section("Attention Residuals")
    if d.sources[1:2] == ("layer 1 mixer",):
        names = "1m, 1f: mixer and feed-forward of layer 1, and so on"
    else:
        names = "b1, b2, ...: sums of finished blocks; sum: the running sum of the block that the layer is in"
    caption = f"Mean softmax weights over {d.tokens:,} held-out tokens. emb: the embedding; {names}."
    image = png(report_inside.depth_weights, d)
    picture = Picture("depth_weights", image, "Heat maps of depth weights, layers by sources", caption)
    return Section("Attention Residuals", pictures=[picture])


def _decay(run: _Run) -> Section:
    d = run.diagnostics
    if d is None or not d.decay_counts_NJX.any():
        return Section("Decay of KDA layers")
    floor = row = None
    if run.config is not None:
        model, row = run.config.model, run.config.data.seq_len
        floor = float(np.log(2) / -model.kda_decay_lower_bound) if model.kda_decay == "bounded" else None
    return Section(
        "Decay of KDA layers",
        pictures=[
            Picture(
                "half_lives",
                png(report_inside.half_lives, d, floor, row),
                "Histogram of half-lives for each KDA layer",
                f"Every channel of every head over {d.tokens:,} held-out tokens, by the half-life ln 2 / -g that its "
                "decay at that token would give. Marked: the median.",
            ),
            Picture(
                "half_life_by_head",
                png(report_inside.half_life_by_head, d),
                "Heat map of the median half-life, heads by KDA layers",
                "Median over tokens and channels, in tokens.",
            ),
        ],
    )


def _settings(run: _Run) -> Section:
    texts = []
    for title, name in (("Configuration (gin)", "config.gin"), ("Parameters", "parameters.txt")):
        text = _text(run.path / name)
        if text:
            texts.append((title, text))
    versions = _json(run.path / "versions.json")
    if versions:
        width = max(map(len, versions))
        lines = [f"{k:<{width}}  {v if isinstance(v, str) else json.dumps(v)}" for k, v in versions.items()]
        texts.append(("Versions", "\n".join(lines)))
    return Section("Configuration and versions", texts=texts)


def _config(path: pathlib.Path) -> Config | None:
    try:
        return RunDir(path).load_config()
    except (ValueError, OSError):  # no run, or one of another version: its numbers can still be shown
        return None


def _diagnostics(path: pathlib.Path) -> Diagnostics | None:
    try:
        return read_diagnostics(path)
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile):  # damaged, or of another version
        return None


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(_text(path) or "{}")
    except json.JSONDecodeError:
        return {}
    return values if isinstance(values, dict) else {}


def _series(pairs: Iterable[tuple[int, Any]]) -> Series:
    kept = [(s, v) for s, v in pairs if isinstance(v, (int, float)) and np.isfinite(v)]
    return Series(np.array([s for s, _ in kept], float), np.array([v for _, v in kept], float))


def _loads(run: _Run) -> Loads | None:
    """The loads of all records that have them; None where there are none, or they do not fit together."""
    found = [(r["step"], _by_layer(r["load"], run.config)) for r in run.records if r.get("load")]
    if not found:
        return None
    layers = list(found[-1][1])
    found = [(step, load) for step, load in found if list(load) == layers]
    try:
        load_SNE = np.array([list(load.values()) for _, load in found], float)
    except ValueError:
        return None
    return Loads(np.array([step for step, _ in found], float), load_SNE, layers) if load_SNE.ndim == 3 else None


def _by_layer(values: Any, config: Config | None) -> dict[int, Any]:
    """{layer from 1: value}, of a dictionary by layer or a list of the MoE layers in order."""
    if isinstance(values, dict):
        return {int(layer): value for layer, value in values.items()}
    layers = range(1, len(values) + 1)
    if config is not None:
        moe = [n for n, kind in enumerate(layer_kinds(config.model), start=1) if kind.ffn == "moe"]
        layers = moe if len(moe) == len(values) else layers
    return dict(zip(layers, values, strict=True))


def _violations(run: _Run, loads: Loads | None) -> tuple[dict[int, Series], Series, Series]:
    """MaxVio by layer, its mean and its worst; what was not logged is computed from the loads."""
    name = "max_violation_by_layer"
    logged = [(r["step"], _by_layer(r[name], run.config)) for r in run.records if r.get(name)]
    if not logged and loads is not None:
        logged = [
            (step, dict(zip(loads.layers, violations(load_NE.tolist()), strict=True)))
            for step, load_NE in zip(loads.steps, loads.load_SNE, strict=True)
        ]
    layers = sorted({layer for _, values in logged for layer in values})
    by_layer = {layer: _series((step, values.get(layer)) for step, values in logged) for layer in layers}
    mean, worst = run.series("max_violation"), run.series("max_violation_worst")
    if not mean and logged:
        mean = _series((step, float(np.mean(list(values.values())))) for step, values in logged)
        worst = _series((step, max(values.values())) for step, values in logged)
    return by_layer, mean, worst


def _skipped_steps(run: _Run) -> np.ndarray:
    """Logged steps at which more steps had been skipped than at the one before."""
    skipped = run.series("skipped")
    return skipped.steps[np.diff(skipped.values, prepend=0) > 0]


def _at_end(series: Series) -> float | None:
    if not series:
        return None
    late = series.values[series.steps > (1 - END) * series.steps[-1]]
    return float(late.mean())


def _seconds(run: _Run) -> float | None:
    """Time in steps and evaluations, as far as it was measured; None if it was not."""
    seconds, previous = 0.0, 0
    for record in run.records:
        if isinstance(record.get("step_seconds"), (int, float)):
            seconds += (record["step"] - previous) * record["step_seconds"]
        if "loss" in record:
            previous = record["step"]
        if isinstance(record.get("eval_seconds"), (int, float)):
            seconds += record["eval_seconds"]
    return seconds or None


def _write_pictures(folder: pathlib.Path, pictures: list[Picture]) -> None:
    """Writes each picture whole, and takes away those that an earlier report had and this one has not."""
    folder.mkdir(exist_ok=True)
    for picture in pictures:
        temporary = folder / f".{picture.name}.png.tmp"
        temporary.write_bytes(picture.image)
        os.replace(temporary, folder / f"{picture.name}.png")
    for name in NAMES - {picture.name for picture in pictures}:
        (folder / f"{name}.png").unlink(missing_ok=True)
