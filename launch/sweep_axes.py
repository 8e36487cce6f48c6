"""What `--sweep` says: axes of choices, and the points that they span.

FIELD=V1,V2,...                          values; commas inside brackets and quotes belong to a value
NAME: A{X.y=1; Z.w=2}, B{X.y=3; Z.w=4}   several bindings together, under a name
FIELD=@FILE or NAME: @FILE               a value, or NAME{...}, a line; # begins a comment
"""

import ast
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from k3jax.config import ConfigError

MAX_NAME = 120  # characters of a run's name
OPENING, CLOSING = "([{", ")]}"


class Choice(NamedTuple):
    """One choice on an axis: what it is called, and the bindings it makes."""

    label: str
    bindings: tuple[str, ...]


class Axis(NamedTuple):
    """What is varied: a field's name or one of the user's, and the choices."""

    name: str
    choices: tuple[Choice, ...]


class Point(NamedTuple):
    """A choice on each axis, together the name of a run."""

    name: str
    labels: dict[str, str]
    bindings: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """Reads one `--sweep` (see the top of this file).

    Raises:
        ConfigError: one line that says what is wrong with it.
    """
    match = re.match(r"\s*([\w.]+)\s*([=:])(.*)$", text, re.DOTALL)
    if not match:
        raise ConfigError(f"--sweep={text}: write FIELD=V1,V2,... or NAME: A{{X.y=1; Z.w=2}}, B{{...}}")
    name, kind, rest = match[1], match[2], match[3].strip()
    entries = _lines_of(rest[1:].strip(), text) if rest.startswith("@") else _split(rest, ",", text)
    if not all(entries) or not entries:
        raise ConfigError(f"--sweep={text}: an empty value; write one between any two commas")
    if kind == "=":
        choices = tuple(Choice(_plain(entry), (f"{name} = {entry}",)) for entry in entries)
    else:
        choices = tuple(_named(entry, text) for entry in entries)
    labels = [choice.label for choice in choices]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"--sweep={text}: {twice} is there twice; give each choice once")
    return Axis(name, choices)


def points(axes: Sequence[Axis], order: Literal["product", "zip"]) -> list[Point]:
    """The points of a sweep: every combination, the last axis fastest, or the axes side by side.

    Raises:
        ConfigError: an axis that is given twice, a field that two axes bind, or axes of unequal length for "zip".
    """
    bound: dict[str, str] = {}
    for number, axis in enumerate(axes):
        if axis.name in [other.name for other in axes[:number]]:
            raise ConfigError(f"--sweep={axis.name}: this axis is given twice; write all its choices in one --sweep")
        for field in dict.fromkeys(_field(binding) for choice in axis.choices for binding in choice.bindings):
            if field in bound:
                raise ConfigError(f"--sweep={axis.name}: {field} is swept by {bound[field]} too; sweep it once")
            bound[field] = axis.name
    lengths = {axis.name: len(axis.choices) for axis in axes}
    if order == "zip" and len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError(f"--zip needs axes of one length: {counts}")
    combine = itertools.product if order == "product" else lambda *choices: zip(*choices, strict=True)
    short = short_names([axis.name for axis in axes])
    found: list[Point] = []
    for number, chosen in enumerate(combine(*(axis.choices for axis in axes))):
        labels = {axis.name: choice.label for axis, choice in zip(axes, chosen, strict=True)}
        name = ",".join(f"{short[axis]}={_for_a_file(label)}" for axis, label in labels.items())
        if len(name) > MAX_NAME or name in [point.name for point in found]:
            name = f"{name[: MAX_NAME - 5]}-{number:04d}"
        found.append(Point(name, labels, tuple(b for choice in chosen for b in choice.bindings)))
    return found


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name without its class, where that leaves it the only one of its kind."""
    ends = [name.rpartition(".")[2] for name in names]
    return {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}


def _named(entry: str, text: str) -> Choice:
    match = re.match(r"([\w.+-]+)\s*\{(.*)\}$", entry, re.DOTALL)
    bindings = [binding for binding in _split(match[2], ";", text) if binding] if match else []
    if not bindings or not all("=" in binding for binding in bindings):
        raise ConfigError(f"--sweep={text}: {entry}: write a name and its bindings, as in small{{X.y=1; Z.w=2}}")
    return Choice(match[1], tuple(bindings))


def _lines_of(name: str, text: str) -> list[str]:
    try:
        lines = pathlib.Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--sweep={text}: {name} cannot be read ({getattr(error, 'strerror', error)})") from None
    lines = [line.partition("#")[0].strip() for line in lines]
    return [line for line in lines if line]


def _split(text: str, separator: str, option: str) -> list[str]:
    """Parts between separators that stand outside of brackets and quotes, stripped."""
    parts, start, open_brackets, quote = [], 0, [], ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in OPENING:
            open_brackets.append(CLOSING[OPENING.index(letter)])
        elif letter in CLOSING:
            if not open_brackets or open_brackets.pop() != letter:
                raise ConfigError(f"--sweep={option}: {letter} without its opening bracket")
        elif letter == separator and not open_brackets:
            parts.append(text[start:i].strip())
            start = i + 1
    if quote or open_brackets:
        raise ConfigError(f"--sweep={option}: {quote or open_brackets[-1]} is missing at the end")
    return [*parts, text[start:].strip()]


def _field(binding: str) -> str:
    return binding.partition("=")[0].strip()


def _plain(value: str) -> str:
    """A value as it is shown: text without its quotes."""
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return literal if isinstance(literal, str) and literal else value


def _for_a_file(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", label).strip("_") or "none"
