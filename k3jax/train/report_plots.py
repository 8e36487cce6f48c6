"""The report's pictures of training: loss, optimiser, throughput and the balance of experts.

Each function draws one figure out of plain arrays; `report_style.png` renders it.
"""

import math

import numpy as np

from k3jax.train.report_style import (
    ALERT,
    DIVERGING,
    HELDOUT,
    INK,
    MAX_NUMBERS,
    MUTED,
    SEQUENTIAL,
    TRAIN,
    Series,
    depth_colours,
    draw_curve,
    evenly_spread,
    heat_map_axes,
    integer_ticks,
    label_steps,
    log_scale,
    log_scale_from_zero,
    log_ticks,
    panel_grid,
    panel_rows,
    running_mean,
    thousands,
    ticks_from_zero,
    zoom_late,
)

MAX_COLUMNS = 160  # steps side by side in a heat map; more are pooled
MAX_PANELS = 12  # layers shown as a panel each; of more, evenly spaced ones
MAX_LINES = 10  # layers shown as a line each
MIN_VIOLATION = 1e-3  # where there are lower ones, the scale is linear from here down to 0, the perfect balance


def loss_curves(loss: Series, heldout_loss: Series, bits: Series, heldout_bits: Series):
    """Training and held-out loss; below it, where known, the same in bits per byte, scaled to the later part."""
    panels = [(loss, heldout_loss, "Loss", "nats per token")]
    if bits or heldout_bits:
        panels.append((bits, heldout_bits, "Loss in bits per byte", "bits per byte"))
    figure, axes = panel_rows(len(panels), height=2.7)
    for axis, (train, heldout, title, unit) in zip(axes, panels, strict=True):
        if train:
            draw_curve(axis, train, TRAIN, "training")
        if heldout:
            axis.plot(*heldout, color=HELDOUT, marker="o", markersize=4.5, label="held out", zorder=4)
            end = heldout.steps[-1], heldout.values[-1]
            axis.annotate(
                f"{end[1]:.3f}", end, (4, 8), textcoords="offset points", color=HELDOUT, ha="center", zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
            )  # fmt: skip
        axis.set(title=title, ylabel=unit)
        axis.legend(loc="upper right")
    if len(panels) > 1:
        zoom_late(axes[1], bits, heldout_bits)
    label_steps(axes[-1])
    return figure


def optimizer_curves(learning_rate: Series, grad_norm: Series, skipped_steps: np.ndarray):
    """Learning rate, and the gradient's norm before clipping with the steps that were skipped."""
    panels = [name for name, series in (("rate", learning_rate), ("norm", grad_norm)) if series]
    figure, axes = panel_rows(len(panels), height=2.0)
    for axis, panel in zip(axes, panels, strict=True):
        if panel == "rate":
            axis.plot(*learning_rate, color=TRAIN)
            axis.set(title="Learning rate", ylabel="learning rate")
            axis.set_ylim(bottom=0)
        else:
            draw_curve(axis, grad_norm, TRAIN, "gradient norm")
            axis.set(title="Gradient norm", ylabel="global 2-norm")
            log_scale(axis)
            for i, step in enumerate(skipped_steps[:100]):
                axis.axvline(step, color=ALERT, linewidth=0.8, label="steps skipped before here" if i == 0 else None)
            if len(skipped_steps):
                axis.legend(loc="upper right")
    label_steps(axes[-1])
    return figure


def throughput_curves(rate: Series, mfu: Series):
    """Tokens a second, and the part of the device's peak that is used where the peak is known."""
    panels = [
        (rate, "Throughput", "tokens per second", 1.0, ""),
        (mfu, "Model FLOPs utilisation", "% of peak", 100.0, "%"),
    ]
    panels = [panel for panel in panels if panel[0]]
    figure, axes = panel_rows(len(panels), height=2.2)
    for axis, (series, title, unit, factor, sign) in zip(axes, panels, strict=True):
        scaled = Series(series.steps, series.values * factor)
        draw_curve(axis, scaled, TRAIN, "")
        median = float(np.median(scaled.values))
        axis.axhline(median, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set(title=f"{title} (median {median:,.4g}{sign})", ylabel=unit)
        axis.set_ylim(0, 1.15 * float(np.max(scaled.values)) or 1)
        axis.yaxis.set_major_formatter(thousands)
    label_steps(axes[-1])
    return figure


def load_over_time(steps: np.ndarray, load_SNE: np.ndarray, layers: list[int]):
    """Each expert's load over the mean, over time; a panel a MoE layer."""
    shown = evenly_spread(len(layers), MAX_PANELS)
    columns = min((3, 4, 2), key=lambda n: -len(shown) % n) if len(shown) > 3 else len(shown)
    rows = -(-len(shown) // columns)
    figure, grid = panel_grid(rows, columns, height=1.1 + 1.55 * rows)
    relative = _relative(_pool(steps, load_SNE[:, shown]))  # [columns, panels, E]
    extent = (steps[0], steps[-1], load_SNE.shape[2] + 0.5, 0.5)
    for i, axis in enumerate(grid.flat):
        if i >= len(shown):
            axis.set_axis_off()
            continue
        image = axis.imshow(relative[:, i].T, aspect="auto", extent=extent, cmap=DIVERGING, norm=_load_norm())
        heat_map_axes(axis)
        axis.set_title(f"layer {layers[shown[i]]}", fontsize=9)
        axis.yaxis.set_major_locator(integer_ticks(5))
        axis.xaxis.set_major_locator(integer_ticks(4))
        axis.xaxis.set_major_formatter(thousands)
        if i % columns == 0:
            axis.set_ylabel("expert")
        bottom = i >= columns * (rows - 1)
        axis.tick_params(labelbottom=bottom, labelleft=i % columns == 0)
        if bottom:
            axis.set_xlabel("step")
    _load_bar(figure, image, grid)
    return figure


def load_by_layer(load_NE: np.ndarray, layers: list[int]):
    """Each layer's loads near the end, experts in order."""
    N, E = load_NE.shape
    figure, grid = panel_grid(1, 1, height=min(9.0, 1.5 + 0.26 * max(N, 4)))
    axis, relative = grid[0, 0], _relative(load_NE)
    extent = (0.5, E + 0.5, N - 0.5, -0.5)
    image = axis.imshow(relative, aspect="auto", extent=extent, cmap=DIVERGING, norm=_load_norm())
    heat_map_axes(axis)
    ticks = evenly_spread(N, 24)
    axis.set_yticks(ticks, [str(layers[i]) for i in ticks])
    axis.xaxis.set_major_locator(integer_ticks(16))
    axis.set(xlabel="expert", ylabel="layer", title="Expert load by layer at the end")
    if E <= 24 and N * E <= MAX_NUMBERS:
        for n, e in np.ndindex(N, E):
            dark = abs(math.log2(relative[n, e])) > 1.2
            axis.text(
                e + 1, n, f"{relative[n, e]:.2f}", ha="center", va="center", fontsize=7, color="w" if dark else INK
            )
    _load_bar(figure, image, grid)
    return figure


def violation_curves(by_layer: dict[int, Series], mean: Series, worst: Series, rule: str):
    """MaxVio over time: a line a layer; of many layers the mean and the worst, and all of them as a heat map."""
    many = len(by_layer) > MAX_LINES and len({len(series.steps) for series in by_layer.values()}) == 1
    figure, axes = panel_rows(2 if many else 1, height=3.0)
    axis = axes[0]

    def line(series: Series, **style):
        axis.plot(series.steps, running_mean(series.values), **style)

    if 0 < len(by_layer) <= MAX_LINES:
        colours = depth_colours(len(by_layer))
        for colour, (layer, series) in zip(colours, by_layer.items(), strict=True):
            line(series, color=colour, linewidth=1.3, label=f"layer {layer}")
    elif worst:
        line(worst, color=ALERT, linewidth=1.3, label="worst layer")
    if mean:
        line(mean, color=INK, linewidth=2.0, linestyle=(0, (4, 1.5)), label="mean of layers")
    axis.set(title=f"MaxVio by layer, balancing: {rule}", ylabel="busiest expert / mean load - 1")
    if any(np.any(drawn.get_ydata() < MIN_VIOLATION) for drawn in axis.lines):
        log_scale_from_zero(axis, MIN_VIOLATION)
    else:
        log_scale(axis)
    if many or not by_layer:
        axis.legend(loc="upper right")
    else:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    if many:
        _violation_map(figure, axes[1], by_layer)
    label_steps(axes[-1])
    return figure


def _violation_map(figure, axis, by_layer: dict[int, Series]) -> None:
    from matplotlib.colors import LogNorm, SymLogNorm

    steps = next(iter(by_layer.values())).steps
    values_SN = np.stack([series.values for series in by_layer.values()], axis=1)
    pooled_SN = _pool(steps, values_SN) / _pool(steps, np.ones_like(values_SN))
    low, high = pooled_SN.min(), pooled_SN.max()
    from_zero = low < MIN_VIOLATION
    if from_zero:
        norm = SymLogNorm(MIN_VIOLATION, 0.5, vmin=0, vmax=max(high, 10 * MIN_VIOLATION))
    else:
        norm = LogNorm(low, max(high, 1.1 * low))
    extent = (steps[0], max(steps[-1], steps[0] + 1), len(by_layer) - 0.5, -0.5)
    image = axis.imshow(pooled_SN.T, aspect="auto", extent=extent, cmap=SEQUENTIAL, norm=norm)
    heat_map_axes(axis)
    layers, ticks = list(by_layer), evenly_spread(len(by_layer), 12)
    axis.set_yticks(ticks, [str(layers[i]) for i in ticks])
    axis.set_ylabel("layer")
    bar = figure.colorbar(image, ax=axis, aspect=20, pad=0.02)
    if from_zero:
        ticks_from_zero(bar.ax.yaxis, MIN_VIOLATION)
    else:
        log_ticks(bar.ax.yaxis)
    bar.set_label("MaxVio")
    bar.outline.set_visible(False)


def _pool(steps: np.ndarray, load_SNE: np.ndarray) -> np.ndarray:
    """Sums neighbouring steps, so that no more than `MAX_COLUMNS` evenly spaced columns remain."""
    columns = min(len(steps), MAX_COLUMNS)
    place = ((steps - steps[0]) * columns // max(steps[-1] - steps[0] + 1, 1)).astype(int)
    pooled = np.zeros((columns, *load_SNE.shape[1:]))
    np.add.at(pooled, place, load_SNE)
    for i in sorted(set(range(columns)) - set(place)):  # nothing was logged in this stretch: what was before
        pooled[i] = pooled[i - 1]
    return pooled


def _relative(load: np.ndarray) -> np.ndarray:
    """Loads over their mean in the last axis; none at all becomes a small number, for the logarithm."""
    mean = load.mean(-1, keepdims=True)
    return np.maximum(load / np.where(mean > 0, mean, 1), 1e-3)


def _load_norm():
    from matplotlib.colors import LogNorm

    return LogNorm(0.25, 4.0)  # even in logarithm on both sides of the mean


def _load_bar(figure, image, grid) -> None:
    from matplotlib.ticker import NullLocator

    bar = figure.colorbar(image, ax=grid, extend="both", aspect=30, pad=0.02, fraction=0.05)
    bar.set_ticks([0.25, 0.5, 1, 2, 4], labels=["1/4", "1/2", "mean", "2x", "4x"])
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_label("expert load over the mean load")
    bar.outline.set_visible(False)
