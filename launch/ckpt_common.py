"""What the subverbs of `k3 ckpt` share: which checkpoint, which tensors, and where pictures go."""

import argparse
import difflib
import fnmatch
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from k3jax.errors import UserError

if TYPE_CHECKING:
    from k3jax.checkpoint.source import Source
    from k3jax.train.report_page import Picture

T = TypeVar("T")
MODEL = ("params/", "router/")  # what a model is made of; the rest of a run's state is the optimiser's


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name one checkpoint."""
    parser.add_argument(
        "path", metavar="CKPT", help="a run's directory, a step's folder in it, or a folder of a released checkpoint"
    )
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint of a run; the newest by default")


def add_match(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds the option that picks tensors by name."""
    parser.add_argument(
        "--match",
        metavar="PATTERN",
        help=f"only tensors with this in their name; * and ? stand for anything ({default})",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for programs")


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where pictures go."""
    parser.add_argument(
        "--out", metavar="DIR", help="folder for pictures; RUN/inspect, or FOLDER-inspect beside a released one"
    )
    parser.add_argument("--html", action="store_true", help="write one self-contained page as well")


def open_checkpoint(args: argparse.Namespace) -> "Source":
    """The checkpoint that `add_checkpoint`'s arguments name."""
    from k3jax.checkpoint.open import open_any

    return open_any(args.path, args.step)


def describe(source: "Source") -> str:
    """Which checkpoint this is, in a few words."""
    step = getattr(source, "step", None)
    return str(source.path) if step is None else f"{source.path} (step {step})"


def select(names: Sequence[str], pattern: str | None, default: Sequence[str] = ()) -> list[int]:
    """Which names a pattern means.

    Args:
        names: all of them.
        pattern: with * or ?, of the whole name or its end after a slash or dot; else any part of it. None = default.
        default: beginnings of names that count without a pattern; () = all.
    Returns:
        Positions in `names`.
    Raises:
        UserError: nothing matches; the nearest names.
    """
    if pattern is None:
        return [i for i, name in enumerate(names) if not default or name.startswith(tuple(default))]
    if any(c in pattern for c in "*?["):
        forms = [pattern, f"*/{pattern}", f"*.{pattern}"]
        found = [i for i, name in enumerate(names) if any(fnmatch.fnmatchcase(name, form) for form in forms)]
    else:
        found = [i for i, name in enumerate(names) if pattern in name]
    if not found:
        near = difflib.get_close_matches(pattern, [*names[:5000], *{n.rpartition("/")[2] for n in names}], 2, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"names look like {names[0]}"
        raise UserError(f"--match={pattern}: no tensor has such a name; {hint}")
    return found


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, with a line on standard error that says how far it is, where that is a terminal."""
    shown = sys.stderr.isatty()
    for i, item in enumerate(items):
        if shown:
            print(f"\r\x1b[K{what} {i + 1}/{len(items)}", end="", file=sys.stderr, flush=True)
        yield item
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def print_json(values: dict[str, Any]) -> None:
    """One JSON object; what JSON has no number for becomes null."""
    print(json.dumps(_plain(values)))


def number(value: float | None) -> str:
    """A number in a few characters; nothing where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}"


def shape_text(shape: Iterable[int]) -> str:
    """[2, 3] without spaces."""
    return f"[{','.join(map(str, shape))}]"


def nbytes_text(count: float) -> str:
    """Bytes in three digits: 12.3 MB."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


class Pictures(NamedTuple):
    """Where a subverb's pictures go.

    Attributes:
        folder: made when the first is written.
        prefix: of the files' names: the step and the subverb.
    """

    folder: pathlib.Path
    prefix: str


def pictures_of(args: argparse.Namespace, source: "Source", subverb: str) -> Pictures:
    """By --out, or beside the checkpoint: never inside a released folder, which is to stay as it is."""
    path, step = pathlib.Path(source.path), getattr(source, "step", None)
    prefix = subverb if step is None else f"step-{step}-{subverb}"
    if args.out:
        return Pictures(pathlib.Path(args.out), prefix)
    if step is None:
        path = path.absolute()
        imported = path.name == "released" and (path.parent / "config.json").is_file()
        return Pictures(path.parent / ("inspect" if imported else f"{path.name}-inspect"), prefix)
    return Pictures(path.parent.parent / "inspect", prefix)


def write_pictures(
    args: argparse.Namespace, place: Pictures, title: str, pictures: "Sequence[Picture]", text: str
) -> None:
    """Writes the pictures, and a page of them with a text if --html asks for it; prints the paths.

    Raises:
        UserError: the folder cannot be written to.
    """
    from k3jax.train.report_page import Section, page

    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            file = place.folder / f"{place.prefix}-{picture.name}.png"
            file.write_bytes(picture.image)
            print(f"picture  {file}")
        if args.html:
            file = place.folder / f"{place.prefix}.html"
            file.write_text(page(title, [Section(title, pictures=pictures, texts=[("Table", text)])]), encoding="utf-8")
            print(f"page     {file}")
    except OSError as error:
        raise UserError(f"{place.folder}: cannot be written to ({error.strerror}); give another with --out") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below) for below in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
