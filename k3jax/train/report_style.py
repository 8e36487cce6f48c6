"""How the report's pictures look, and what several of them are made with.

matplotlib is imported inside, because it takes a second to load, and used without pyplot, which would keep figures
and settings for the whole process.
"""

import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

WIDTH = 8.0  # inches
DPI = 130
MAX_NUMBERS = 240  # cells of a heat map that get their number written in
MIN_SMOOTHED = 80  # values from which on a curve is drawn as its running mean

INK, MUTED, GRID, EMPTY = "#24292f", "#667080", "#e3e7ec", "#eef0f3"
TRAIN, HELDOUT, ALERT = "#2a6fb0", "#d8650b", "#c0392b"
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"

STYLE = {
    "figure.facecolor": "white", "savefig.facecolor": "white", "figure.dpi": DPI,
    "font.family": "DejaVu Sans", "font.size": 9.0, "text.color": INK,
    "axes.titlesize": 10.0, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelcolor": INK,
    "axes.edgecolor": MUTED, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.frameon": False, "legend.fontsize": 8.5,
    "lines.linewidth": 1.6, "image.interpolation": "nearest",
}  # fmt: skip


class Series(NamedTuple):
    """Values at steps, ascending; two arrays of one length, perhaps 0."""

    steps: np.ndarray
    values: np.ndarray

    def __bool__(self) -> bool:
        return len(self.steps) > 0


def png(draw: Callable[..., Any], *args) -> bytes:
    """What `draw(*args)` draws, as a PNG file in the report's style."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        buffer = io.BytesIO()
        draw(*args).savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def panel_rows(count: int, height: float):
    """A figure of panels below each other that share their steps."""
    figure, grid = panel_grid(count, 1, height=0.4 + height * count, sharex=True)
    return figure, list(grid[:, 0])


def panel_grid(rows: int, columns: int, height: float, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def draw_curve(axis, series: Series, colour: str, label: str) -> None:
    """The values, faint where there are many, and their running mean."""
    smooth = running_mean(series.values)
    if is_smoothed(series):
        axis.plot(*series, color=colour, linewidth=0.7, alpha=0.3)
    axis.plot(series.steps, smooth, color=colour, label=label)


def running_mean(values: np.ndarray) -> np.ndarray:
    """A centred running mean over a fortieth of the values; the values themselves where that is next to nothing."""
    half = len(values) // MIN_SMOOTHED
    if half < 1:
        return values
    kernel = np.ones(2 * half + 1)
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), kernel, "same")
    return total / np.maximum(np.convolve(finite.astype(float), kernel, "same"), 1)


def is_smoothed(series: Series) -> bool:
    """Whether there are so many values that their running mean is drawn, and not they themselves."""
    return len(series.values) >= MIN_SMOOTHED


def zoom_late(axis, *all_series: Series) -> None:
    """Limits the values to those after the first tenth of the steps."""
    end = max(series.steps[-1] for series in all_series if series)
    late = np.concatenate([running_mean(s.values)[s.steps >= 0.1 * end] for s in all_series if s])
    late = late[np.isfinite(late)]
    if len(late):
        low, high = float(late.min()), float(late.max())
        margin = 0.12 * (high - low) or 0.05
        axis.set_ylim(low - margin, high + margin)


def label_steps(axis) -> None:
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(integer_ticks(8))
    axis.xaxis.set_major_formatter(thousands)


def log_scale(axis) -> None:
    """A logarithmic vertical axis with plain numbers, also where it spans less than a decade."""
    axis.set_yscale("log")
    log_ticks(axis.yaxis)


def log_scale_from_zero(axis, linear_below: float) -> None:
    """A vertical axis with a tick at 0, linear up to a power of ten and logarithmic above it."""
    axis.set_yscale("symlog", linthresh=linear_below, linscale=0.5)
    axis.set_ylim(-0.2 * linear_below, max(axis.get_ylim()[1], 20 * linear_below))
    ticks_from_zero(axis.yaxis, linear_below)


def ticks_from_zero(direction, linear_below: float) -> None:
    """0, and the powers of ten from `linear_below` on, as plain numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    decades = max(1, math.ceil(math.log10(direction.get_view_interval()[1] / linear_below)))
    direction.set_major_locator(FixedLocator([0, *(linear_below * 10.0**i for i in range(decades + 1))]))
    direction.set_minor_locator(NullLocator())
    direction.set_major_formatter(lambda value, _: f"{value:g}")


def log_ticks(direction) -> None:
    """1, 2, 5, 10, ... as plain numbers on a logarithmic axis, or powers of ten where it spans many."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = direction.get_view_interval()
    direction.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
    direction.set_minor_locator(NullLocator())
    direction.set_major_formatter(lambda value, _: f"{value:g}")


def thousands(value: float, _=None) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == round(value) else f"{value:g}"


def integer_ticks(count: int):
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True)


def heat_map_axes(axis) -> None:
    axis.grid(False)
    axis.tick_params(length=2.5)
    axis.spines[:].set_visible(False)


def evenly_spread(count: int, most: int) -> list[int]:
    """Up to `most` of range(count), evenly spaced, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def depth_colours(count: int) -> list:
    """Early layers dark, late ones light, none too light to see."""
    from matplotlib import colormaps

    return [colormaps[SEQUENTIAL](x) for x in np.linspace(0.0, 0.88, count)]
