"""Pictures of `k3 ckpt`: plain numbers in, a figure out; `report_style.png` renders it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from k3jax.train.report_inside import format_tokens
from k3jax.train.report_style import (
    ALERT,
    DIVERGING,
    EMPTY,
    INK,
    MAX_NUMBERS,
    SEQUENTIAL,
    TRAIN,
    evenly_spread,
    heat_map_axes,
    integer_ticks,
    log_ticks,
    panel_grid,
)

MAX_PANELS = 24  # layers shown as a panel each; of more, evenly spaced ones
MOST_TOKENS = 1e7  # half-lives above it are drawn as this long


def over_depth(values: dict[tuple[str, int], float], title: str, unit: str):
    """A number of each tensor by layer.

    Args:
        values: {(name within the layer, layer from 1): a positive number}; at least one.
        title, unit: of the figure and of its colour bar.
    """
    from matplotlib.colors import LogNorm

    names = list(dict.fromkeys(name for name, _ in values))
    names.sort(key=lambda name: (name.rpartition("/")[0], name))
    layers = sorted({layer for _, layer in values})
    grid_NL = np.full((len(names), len(layers)), np.nan)
    for (name, layer), value in values.items():
        grid_NL[names.index(name), layers.index(layer)] = value
    figure, axes = panel_grid(1, 1, height=min(14.0, 1.2 + 0.2 * len(names)))
    axis = axes[0, 0]
    axis.set_facecolor(EMPTY)
    low, high = np.nanmin(grid_NL), np.nanmax(grid_NL)
    norm = LogNorm(low / 1.05, high * 1.05)
    image = axis.imshow(np.ma.masked_invalid(grid_NL), aspect="auto", cmap=SEQUENTIAL, norm=norm)
    heat_map_axes(axis)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    _layer_ticks(axis, layers)
    axis.set(xlabel="layer", title=title)
    if len(layers) <= 12:
        for (n, i), value in np.ndenumerate(grid_NL):
            if not math.isnan(value):
                axis.text(i, n, f"{value:.2g}", ha="center", va="center", fontsize=6, color=_on(norm(value)))
    bar = figure.colorbar(image, ax=axis, aspect=40, pad=0.02, fraction=0.05)
    log_ticks(bar.ax.yaxis)
    bar.set_label(unit)
    bar.outline.set_visible(False)
    return figure


def expert_maps(entries: Sequence[dict[str, Any]]):
    """Load, bias and size of weights of every expert of every layer.

    Args:
        entries: per layer a dictionary with layer, bias, load (over the mean, or None), weight_rms and dead.
    """
    from matplotlib.colors import LogNorm, Normalize

    layers = [e["layer"] for e in entries]
    bias_NE = np.array([e["bias"] for e in entries])
    weight_NE = np.array([e["weight_rms"] for e in entries])
    weight_NE = weight_NE / np.maximum(np.median(weight_NE, axis=1, keepdims=True), 1e-30)
    most = float(np.max(np.abs(bias_NE))) or 1.0
    panels = [
        ("Router bias", bias_NE, Normalize(-most, most), "added to scores", "{:+.2f}"),
        ("Weights", np.maximum(weight_NE, 1e-3), LogNorm(0.5, 2.0), "rms / layer's median", "{:.2f}"),
    ]
    if any(e["load"] for e in entries):
        load_NE = np.array([e["load"] or [np.nan] * len(e["bias"]) for e in entries])
        panels.insert(0, ("Load", np.maximum(load_NE, 1e-3), LogNorm(0.25, 4.0), "load / layer's mean", "{:.2f}"))
    N, E = bias_NE.shape
    wide = E > 24
    rows, columns = (len(panels), 1) if wide else (1, len(panels))
    one = min(4.5, 1.3 + 0.26 * max(N, 4))
    figure, grid = panel_grid(rows, columns, height=one * rows)
    for axis, (title, values_NE, norm, unit, form) in zip(grid.flat, panels, strict=True):
        extent = (0.5, E + 0.5, N - 0.5, -0.5)
        axis.set_facecolor(EMPTY)
        image = axis.imshow(np.ma.masked_invalid(values_NE), aspect="auto", extent=extent, cmap=DIVERGING, norm=norm)
        heat_map_axes(axis)
        ticks = evenly_spread(N, 24)
        axis.set_yticks(ticks, [str(layers[i]) for i in ticks])
        axis.xaxis.set_major_locator(integer_ticks(8 if not wide else 16))
        axis.set(xlabel="expert", title=title)
        if E <= 10 and N * E <= MAX_NUMBERS:
            for (n, e), value in np.ndenumerate(values_NE):
                dark = abs(float(norm(value)) - 0.5) > 0.35
                axis.text(
                    e + 1, n, form.format(value), ha="center", va="center", fontsize=5.5, color="w" if dark else INK
                )
        dead = [(e + 1, n) for n, entry in enumerate(entries) for e in entry["dead"]]
        if dead:
            axis.scatter(*zip(*dead, strict=True), marker="x", color=ALERT, s=30)
        bar = figure.colorbar(
            image, ax=axis, pad=0.02, fraction=0.06, extend="neither" if title == "Router bias" else "both",
            **({} if wide else {"location": "bottom", "aspect": 25}),
        )  # fmt: skip
        if isinstance(norm, LogNorm):
            ticks = [0.25, 0.5, 1, 2, 4] if norm.vmax > 2 else [0.5, 0.7, 1, 1.4, 2]
            bar.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
            bar.ax.minorticks_off()
        bar.set_label(unit)
        bar.outline.set_visible(False)
    grid.flat[0].set_ylabel("layer")
    return figure


def half_lives_at_rest(layers):
    """Each KDA layer's half-lives: channels of every head, sorted from short to long.

    Args:
        layers: of `inspect_model.LayerGates`.
    """
    from matplotlib.colors import LogNorm

    shown = [layers[i] for i in evenly_spread(len(layers), MAX_PANELS)]
    J, K = shown[0].half_life_JK.shape
    columns = 1 if len(shown) == 1 else 2 if len(shown) <= 4 else 3 if len(shown) <= 12 else 4
    rows = -(-len(shown) // columns)
    figure, grid = panel_grid(rows, columns, height=0.9 + rows * (0.8 + min(1.3, 0.12 * J)))
    everything = np.concatenate([g.half_life_JK.ravel() for g in shown])
    low, high = (float(np.clip(np.quantile(everything, q), 1e-3, MOST_TOKENS)) for q in (0.001, 0.999))
    norm = LogNorm(low / 1.05, high * 1.05)
    for i, axis in enumerate(grid.flat):
        if i >= len(shown):
            axis.set_axis_off()
            continue
        extent = (0.5, K + 0.5, J + 0.5, 0.5)
        half_life_JK = np.sort(np.minimum(shown[i].half_life_JK, MOST_TOKENS), axis=1)
        image = axis.imshow(half_life_JK, aspect="auto", extent=extent, cmap=SEQUENTIAL, norm=norm)
        heat_map_axes(axis)
        axis.set_title(f"layer {shown[i].layer}", fontsize=9)
        axis.yaxis.set_major_locator(integer_ticks(4))
        axis.xaxis.set_major_locator(integer_ticks(4))
        axis.tick_params(labelbottom=i + columns >= len(shown), labelleft=i % columns == 0)
        if i % columns == 0:
            axis.set_ylabel("value head")
        if i + columns >= len(shown):
            axis.set_xlabel("channels, sorted")
    bar = figure.colorbar(image, ax=grid, aspect=30, pad=0.02, fraction=0.05, extend="both")
    digits = (1, 2, 5) if high < 1000 * low else (1,)
    ticks = [t for t in (m * 10.0**d for d in range(-3, 9) for m in digits) if norm.vmin <= t <= norm.vmax]
    bar.set_ticks(ticks, labels=[format_tokens(t) for t in ticks])
    bar.ax.minorticks_off()
    bar.set_label("half-life at rest, tokens")
    bar.outline.set_visible(False)
    return figure


def query_norms(queries):
    """The norm of each sublayer's query over depth.

    Args:
        queries: of `inspect_model.Consumer`.
    """
    figure, grid = panel_grid(1, 1, height=2.8)
    axis = grid[0, 0]
    for kind, colour, marker in (("mixer", TRAIN, "o"), ("feed-forward", "#d8650b", "s")):
        own = [q for q in queries if q.name.endswith(kind)]
        layers = [int(q.name.split()[1]) for q in own]
        axis.plot(
            layers, [np.linalg.norm(q.query_D) for q in own], color=colour, marker=marker, markersize=3.5, label=kind
        )
    for q in queries:
        if q.name == "output":
            axis.axhline(np.linalg.norm(q.query_D), color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="output")
    axis.set(xlabel="layer", ylabel="2-norm of query times gain", title="How sharp the choice over depth can be")
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(integer_ticks(16))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _layer_ticks(axis, layers: Sequence[int]) -> None:
    ticks = evenly_spread(len(layers), 24)
    axis.set_xticks(ticks, [str(layers[i]) for i in ticks])


def _on(brightness: float) -> str:
    """The colour of text on a heat map's cell."""
    return INK if brightness > 0.6 else "w"
