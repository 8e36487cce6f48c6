"""The report's pictures of what goes on inside the model: depth weights and decays."""

import math

import numpy as np

from k3jax.train.diagnostics import Diagnostics, half_life_quantile
from k3jax.train.report_style import (
    ALERT,
    EMPTY,
    INK,
    MAX_NUMBERS,
    MUTED,
    SEQUENTIAL,
    TRAIN,
    WIDTH,
    evenly_spread,
    heat_map_axes,
    panel_grid,
)

MAX_RIDGES = 16  # layers shown as a histogram each
DECAYS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)  # marked above the half-lives


def depth_weights(diagnostics: Diagnostics):
    """How much each sublayer reads of each source: mixers, feed-forwards, and the output below."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    weights_QR = diagnostics.weights_QR
    N, R = len(weights_QR) // 2, weights_QR.shape[1]
    height = min(12.0, 1.9 + 0.27 * max(N, 4))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    parts = figure.subplot_mosaic([["mixer", "ffn"], ["output", "output"]], height_ratios=[max(N, 4), 1])
    panels = [
        ("mixer", weights_QR[0:-1:2], "Token mixers read"),
        ("ffn", weights_QR[1:-1:2], "Feed-forwards read"),
        ("output", weights_QR[-1:], "The output reads"),
    ]
    norm = PowerNorm(0.6, 0.0, 1.0)  # small weights are many and still tell something
    for name, part_QR, title in panels:
        axis = parts[name]
        axis.set_facecolor(EMPTY)
        image = axis.imshow(np.ma.masked_invalid(part_QR), aspect="auto", cmap=SEQUENTIAL, norm=norm)
        heat_map_axes(axis)
        axis.set_title(title)
        ticks = evenly_spread(R, 24)
        labels = [_short(diagnostics.sources[i]) for i in ticks]
        axis.set_xticks(ticks, labels, rotation=90 if R > 11 else 0, fontsize=7.5)
        rows = evenly_spread(len(part_QR), 24)
        axis.set_yticks(rows, [str(i + 1) for i in rows] if name != "output" else ["out"])
        if part_QR.size <= MAX_NUMBERS and R <= 20:
            size = 7 if R <= 10 else 5.5
            for (q, r), weight in np.ndenumerate(part_QR):
                if not math.isnan(weight):
                    colour = INK if norm(weight) > 0.6 else "w"
                    axis.text(r, q, _weight(weight), ha="center", va="center", fontsize=size, color=colour)
    parts["mixer"].set_ylabel("layer")
    bar = figure.colorbar(image, ax=list(parts.values()), aspect=30, pad=0.02, fraction=0.05)
    bar.set_ticks([0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0])
    bar.set_label("mean weight over tokens\n(grey: no such source yet)")
    bar.outline.set_visible(False)
    return figure


def half_lives(diagnostics: Diagnostics, floor: float | None, row_length: int | None):
    """How fast each KDA layer forgets: a histogram a layer, or of many layers a row each of a heat map.

    Args:
        diagnostics: with KDA layers.
        floor: the shortest half-life that the decay allows, in tokens; None = no limit.
        row_length: tokens in a row; None = not known.
    """
    counts_NX = diagnostics.decay_counts_NJX.sum(1)
    N = len(counts_NX)
    share_NX = counts_NX / np.maximum(counts_NX.sum(1, keepdims=True), 1)
    edges_Y = _finite_edges(diagnostics.half_life_edges_Y)
    used = np.flatnonzero(counts_NX.sum(0))
    low, high = edges_Y[max(used[0] - 2, 0)], edges_Y[min(used[-1] + 3, len(edges_Y) - 1)]
    ridges = N <= MAX_RIDGES
    figure, grid = panel_grid(1, 1, height=min(10.0, 1.6 + (0.5 if ridges else 0.14) * max(N, 3)))
    axis = grid[0, 0]
    if ridges:
        _draw_ridges(axis, share_NX, edges_Y, diagnostics)
    else:
        image = axis.pcolormesh(edges_Y, np.arange(N + 1) - 0.5, share_NX, cmap=SEQUENTIAL)
        heat_map_axes(axis)
        axis.set_ylim(N - 0.5, -0.5)
        ticks = evenly_spread(N, 24)
        axis.set_yticks(ticks, [str(diagnostics.kda_layers[i]) for i in ticks])
        bar = figure.colorbar(image, ax=axis, aspect=30, pad=0.02, fraction=0.05)
        bar.set_label("share of tokens and channels")
        bar.outline.set_visible(False)
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set(xlabel="half-life of a channel of the state, tokens", ylabel="KDA layer", title="Decay by KDA layer")
    axis.xaxis.set_major_formatter(lambda value, _: format_tokens(value))
    for value, label, colour in ((floor, "fastest decay allowed", ALERT), (row_length, "row length", MUTED)):
        if value and low < value < high:
            axis.axvline(value, color=colour, linewidth=1.1, linestyle=(0, (4, 3)), label=label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper right", frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
    above = axis.secondary_xaxis("top", functions=(lambda x: x, lambda x: x))
    shown = [(decay, math.log(0.5) / math.log(decay)) for decay in DECAYS]
    shown = [(decay, half_life) for decay, half_life in shown if low < half_life < high]
    above.set_xticks([half_life for _, half_life in shown], [f"{decay:g}" for decay, _ in shown], minor=False)
    above.minorticks_off()
    above.set_xlabel("kept of a channel at each token, exp(g)")
    return figure


def half_life_by_head(diagnostics: Diagnostics):
    """The median half-life of every head of every KDA layer."""
    from matplotlib.colors import LogNorm

    median_JN = half_life_quantile(diagnostics, 0.5).T
    J, N = median_JN.shape
    figure, grid = panel_grid(1, 1, height=min(8.0, 1.5 + 0.22 * max(J, 5)))
    axis = grid[0, 0]
    low, high = float(np.nanmin(median_JN)), float(np.nanmax(median_JN))
    norm = LogNorm(low / 1.05, high * 1.05)
    image = axis.imshow(median_JN, aspect="auto", cmap=SEQUENTIAL, norm=norm)
    heat_map_axes(axis)
    ticks = evenly_spread(N, 24)
    axis.set_xticks(ticks, [str(diagnostics.kda_layers[i]) for i in ticks])
    ticks = evenly_spread(J, 16)
    axis.set_yticks(ticks, [str(i + 1) for i in ticks])
    axis.set(xlabel="KDA layer", ylabel="value head", title="Median half-life by head")
    if median_JN.size <= MAX_NUMBERS and N <= 16:
        for (j, n), value in np.ndenumerate(median_JN):
            colour = INK if norm(value) > 0.6 else "w"
            axis.text(n, j, format_tokens(value), ha="center", va="center", fontsize=7.5, color=colour)
    bar = figure.colorbar(image, ax=grid, aspect=30, pad=0.02, fraction=0.05)
    ticks = [t for t in (m * 10.0**d for d in range(-2, 7) for m in (1, 2, 5)) if norm.vmin <= t <= norm.vmax]
    bar.set_ticks(ticks, labels=[format_tokens(t) for t in ticks])
    bar.ax.minorticks_off()
    bar.set_label("tokens")
    bar.outline.set_visible(False)
    return figure


def format_tokens(value: float) -> str:
    """A number of tokens in few characters: 0.14, 3.2, 150, 12k."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _draw_ridges(axis, share_NX: np.ndarray, edges_Y: np.ndarray, diagnostics: Diagnostics) -> None:
    """A filled histogram a layer, first layer on top, all on one scale, with the median marked."""
    N = len(share_NX)
    scale = 0.85 / max(share_NX.max(), 1e-9)
    whole = diagnostics._replace(decay_counts_NJX=diagnostics.decay_counts_NJX.sum(1, keepdims=True))
    median_N = half_life_quantile(whole, 0.5)[:, 0]
    axis.set_yticks(range(N), [str(layer) for layer in diagnostics.kda_layers])
    axis.set_ylim(N - 0.8, -1.0)
    axis.grid(False, axis="y")
    for n, median in enumerate(median_N):
        axis.stairs(n - scale * share_NX[n], edges_Y, baseline=n, fill=True, color=TRAIN, alpha=0.7, zorder=2)
        axis.axhline(n, color=MUTED, linewidth=0.6, zorder=1)
        axis.plot([median, median], [n, n - 0.3], color=INK, linewidth=1.4, zorder=3)
        axis.annotate(
            format_tokens(median), (median, n - 0.3), (3, 2), textcoords="offset points",
            fontsize=7.5, va="center", color=INK, zorder=4,
        )  # fmt: skip


def _finite_edges(edges_Y: np.ndarray) -> np.ndarray:
    """The edges, with the two open bins drawn as wide as their neighbours."""
    return np.concatenate([[edges_Y[1] ** 2 / edges_Y[2]], edges_Y[1:-1], [edges_Y[-2] ** 2 / edges_Y[-3]]])


def _short(source: str) -> str:
    """A source's name in a few characters."""
    words = source.split()
    if words[0] == "block":
        return f"b{words[1]}"
    if words[0] == "layer":
        return f"{words[1]}{'m' if words[2] == 'mixer' else 'f'}"
    return {"embedding": "emb", "running sum": "sum"}.get(source, source)


def _weight(weight: float) -> str:
    return "1" if weight > 0.995 else f"{weight:.2f}".lstrip("0")
