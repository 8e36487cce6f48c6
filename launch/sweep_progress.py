"""What the user sees while a sweep is going on: a live line a run on a terminal, plain lines elsewhere."""

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from k3jax.train.progress import describe

LIVE_SECONDS = 1.0  # between two looks at the runs
PLAIN_SECONDS = 30.0  # between two lines of a run, where lines stay
TAIL = 2**18  # bytes at the end of metrics.jsonl that are read


class SweepProgress:
    """Shows which runs are at what step.

    Args:
        total: runs of the sweep.
    """

    def __init__(self, total: int):
        from rich.console import Console

        self._total = total
        self._console = Console()
        self._live = None
        self._said: set[str] = set()
        self._next = 0.0

    def __enter__(self) -> "SweepProgress":
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        else:
            self._next = time.monotonic() + PLAIN_SECONDS
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

    def say_once(self, text: str) -> None:
        """Prints a line that stays, the first time it is given."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def show(self, runs: Sequence[pathlib.Path], steps: Sequence[int], finished: int, failed: int) -> None:
        """Shows where the running runs are, if it is time to.

        Args:
            runs: their directories.
            steps: of each run in all.
            finished: how many have.
            failed: how many have.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (PLAIN_SECONDS if self._live is None else LIVE_SECONDS)
        lines = [state(path, total) for path, total in zip(runs, steps, strict=True)]
        if self._live is None:
            for line in lines:
                self.say(line)
            return
        from rich.text import Text

        rest = self._total - finished - failed - len(runs)
        counts = f"{finished} of {self._total} finished, {len(runs)} running, {rest} to go"
        lines.append(counts + (f", {failed} failed" if failed else ""))
        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))


def state(run: pathlib.Path, total: int) -> str:
    """Where one run is, in a line."""
    record = last_record(run / "metrics.jsonl", "loss")
    if record is None:
        return f"{run.name}  starting"
    return f"{run.name}  step {record['step']:>{len(str(total))}}/{total}{describe(record, total)}"


def last_record(metrics: pathlib.Path, name: str) -> dict[str, Any] | None:
    """The last whole record that has a number of this name, looked for at the end of the file alone."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # its beginning lies before what was read
            continue
        if isinstance(record, dict) and isinstance(record.get(name), (int, float)):
            return record
    return None
