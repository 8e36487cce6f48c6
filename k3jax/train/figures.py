"""Numbers as people read them, the same on a terminal and in a report."""


def short(value: float, decimals: int | None = None) -> str:
    """A count with a unit: 950, 12.3k, 15.3M, 2.78T.

    Args:
        value: not negative.
        decimals: digits after the point of a number with a unit; None = three digits in all.
    """
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}" if decimals is None else f"{value / factor:.{decimals}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as M:SS, H:MM:SS or NdHHh."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
