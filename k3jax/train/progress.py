"""What the user sees while a run is going on: one live line on a terminal, plain lines elsewhere."""

import math
import sys
from typing import Any

from k3jax.train.figures import duration, short


class Progress:
    """One live line on a terminal, a plain line for each record elsewhere.

    Args:
        total: steps of the run.
    """

    def __init__(self, total: int):
        from rich.console import Console

        self._total = total
        self._console = Console()
        self._live = None
        self._tail = ""

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)
            self._live = None

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._live is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def step(self, step: int) -> None:
        """Shows that a step was taken; costs next to nothing."""
        if self._live is not None:
            self._show(self._line(step))

    def record(self, record: dict[str, Any]) -> None:
        """Shows a logged step."""
        self._tail = describe(record, self._total)
        if self._live is None:
            self.say(self._line(record["step"]))
        else:
            self._show(self._line(record["step"]))

    def _line(self, step: int) -> str:
        return f"step {step:>{len(str(self._total))}}/{self._total}{self._tail}"

    def _show(self, line: str) -> None:
        from rich.text import Text

        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))


def describe(record: dict[str, Any], total: int) -> str:
    """The numbers of a training record as the end of a progress line."""

    def number(name: str) -> float | None:
        value = record.get(name)
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None

    parts = [f"loss {record['loss']:.4f}" if number("loss") is not None else "loss not finite"]
    if number("bits_per_byte") is not None:
        parts.append(f"{record['bits_per_byte']:.3f} bits/byte")
    if number("tokens_per_second") is not None:
        parts.append(f"{short(record['tokens_per_second'])} tokens/s")
    if number("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    if number("max_violation") is not None:
        parts.append(f"MaxVio {record['max_violation']:.2f}")
    if record.get("skipped"):
        parts.append(f"skipped {record['skipped']}")
    if number("step_seconds") is not None:
        parts.append(f"ETA {duration((total - record['step']) * record['step_seconds'])}")
    return "".join(f"  {part}" for part in parts)


def warn(text: str) -> None:
    """One line to standard error."""
    print(f"k3: {text}", file=sys.stderr, flush=True)
