"""Tables of text: drawn on a terminal, plain aligned columns elsewhere."""

import sys
from collections.abc import Sequence


def print_rows(rows: Sequence[Sequence[str]], left: int = 1, last_is_sum: bool = False) -> None:
    """Prints a table.

    Args:
        rows: the first one is the heading; all of one length.
        left: how many columns, from the first, are aligned to the left; the others to the right.
        last_is_sum: sets the last row apart.
    """
    if not sys.stdout.isatty():
        print(text_rows(rows, left))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for i, heading in enumerate(rows[0]):
        table.add_column(Text(heading), justify="left" if i < left else "right", overflow="fold")
    for i, row in enumerate(rows[1:], start=2):
        table.add_row(*map(Text, row), end_section=last_is_sum and i >= len(rows) - 1)
    Console().print(table)


def text_rows(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table as lines of aligned text; arguments as for `print_rows`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
