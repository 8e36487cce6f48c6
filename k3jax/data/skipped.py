"""What was not read of a corpus, why, and what to do about it."""

from collections.abc import Iterable
from typing import Literal

SkipKind = Literal["unreadable", "empty", "not_utf8", "malformed"]
_EXAMPLES = 3
_FIELDS = 12


class SkipReport:
    """What was not read, by count and with the first few examples of each kind.

    Kinds: `unreadable` (cannot be opened, or is not what its extension says), `empty` (nothing, or only white
    space), `not_utf8`, and `malformed` (a JSONL line that is not an object with the text field, a Parquet
    file without the column, a row that is null). Files are counted, and lines or rows of JSONL and Parquet
    files. `fields` are the other fields and columns where the text field was missing or held no text.
    """

    def __init__(self):
        self.counts: dict[SkipKind, int] = {"unreadable": 0, "empty": 0, "not_utf8": 0, "malformed": 0}
        self.examples: dict[SkipKind, list[str]] = {kind: [] for kind in self.counts}
        self.fields: dict[str, None] = {}

    def add(self, kind: SkipKind, example: str, fields: Iterable[str] = ()) -> None:
        """Counts one skipped input; `example` says which, and why where that is not plain."""
        self.counts[kind] += 1
        if len(self.fields) < _FIELDS:
            self.fields |= dict.fromkeys(fields)
        if len(self.examples[kind]) < _EXAMPLES:
            self.examples[kind].append(example)

    def advice(self, text_field: str) -> str:
        """What to do where nothing at all could be used."""
        others = [field for field in self.fields if field != text_field]
        if others:
            return f"set DataConfig.text_field to the one that holds the text: {few(others)}"
        if self.fields:
            return f"give text in {text_field!r}, or set DataConfig.text_field to a field that holds text"
        if self.counts["malformed"]:
            return f"give a JSON object on each line, with the text in {text_field!r} (DataConfig.text_field)"
        return "give readable, non-empty UTF-8 files"

    @property
    def total(self) -> int:
        """Inputs skipped, of all kinds."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        found = [
            f"{count} {kind.replace('_utf8', ' UTF-8')} (first: {self.examples[kind][0]})"
            for kind, count in self.counts.items()
            if count
        ]
        return f"skipped {self.total}: {', '.join(found)}" if found else "skipped none"


def few(names: Iterable[str]) -> str:
    """The first few names of fields or columns, in one line."""
    names = [" ".join(name.split())[:40] for name in names]
    return ", ".join([*names[:_FIELDS], *(["..."] if len(names) > _FIELDS else [])]) or "none"
