"""Documents: where text comes from, what is skipped and said, and which of it is held out.

A document is a text file, a line of a JSONL file or a row of a Parquet file. Every choice here hangs on the
content's hash alone: not on names, on the order of paths or on the machine.
"""

import glob
import hashlib
import json
import logging
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from k3jax.data.skipped import SkipReport, few
from k3jax.errors import UserError

logger = logging.getLogger(__name__)

# What people wrote by hand: code, docstrings, notes. Tests repeat one another and hold odd encodings,
# `encodings` and `entities.py` are generated tables, `_sysconfigdata*` is a build log, and installed packages
# are not the installation.
_STDLIB_EXTENSIONS = (".py", ".txt", ".rst", ".md")
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}
)
_STDLIB_SKIPPED_FILES = ("_sysconfigdata", "entities.py")


class Document(NamedTuple):
    """One text: its UTF-8 bytes as stored, and the SHA-256 of them."""

    text: bytes
    digest: bytes


class Documents(NamedTuple):
    """All documents that could be read, in the order of their digests, and what was skipped."""

    documents: list[Document]
    skipped: SkipReport


class Split(NamedTuple):
    """Documents to train on and documents to evaluate on; no content is in both."""

    train: list[Document]
    heldout: list[Document]


def read_documents(source: str, paths: Sequence[str] = (), text_field: str = "text") -> Documents:
    """Reads every document of a source into memory.

    Args:
      source: "python" (the source and documentation text of the running Python installation's standard
        library, without tests and generated tables) or "files".
      paths: files, directories or globs, for "files". `.jsonl`/`.ndjson` and `.parquet` hold many documents,
        any other file is one. A directory is read whole, hidden entries left out. A file named twice is read
        once.
      text_field: the JSONL field or Parquet column that holds the text.

    Returns:
      Documents sorted by digest, and a SkipReport; both are also logged in one line.

    Raises:
      UserError: unknown source, a path that matches nothing, or no usable document at all.
    """
    found, skipped = _find(source, paths), SkipReport()
    documents = [_document(text) for text in _texts(found.files(), text_field, skipped)]
    if not documents:
        raise _nothing(found, skipped, text_field)
    origin = found.origin
    documents.sort(key=lambda document: document.digest)
    size = sum(len(document.text) for document in documents)
    level = logging.WARNING if skipped.total else logging.INFO
    logger.log(level, "read %d documents, %d bytes, from %s; %s", len(documents), size, origin, skipped)
    return Documents(documents, skipped)


def check_source(source: str, paths: Sequence[str] = (), text_field: str = "text") -> None:
    """Raises what `read_documents` would, but reads no further than to the first usable text."""
    found, skipped = _find(source, paths), SkipReport()
    if next(_texts(found.unsorted(), text_field, skipped), None) is None:
        raise _nothing(found, skipped, text_field)


def split_heldout(documents: Sequence[Document], fraction: float) -> Split:
    """Splits documents into train and held-out by content, so that equal contents land on one side.

    A document is held out if its digest, read as a number in [0, 1), is below `fraction`, which also keeps it
    held out when the corpus grows. One longer than the whole held-out share stays in training: no single file
    is the measure. If that holds out nothing, the first document that may be is; if it leaves nothing to
    train on, the last one is trained on. When all documents are equal, or there is only one, its tail is held
    out instead, cut at a line's start where there is one.

    Args:
      documents: sorted by digest.
      fraction: of the bytes, in [0, 1), about met; 0 holds out nothing.

    Raises:
      UserError: fraction outside [0, 1), or a lone document too short to cut.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"DataConfig.heldout_fraction is {fraction}: use a number from 0 up to, not including, 1")
    if fraction == 0:
        return Split(list(documents), [])
    distinct = sorted({document.digest: document for document in documents}.values(), key=lambda d: d.digest)
    if len(distinct) == 1:
        head, tail = _cut_tail(distinct[0].text, fraction)
        copies = len(documents)
        return Split([_document(head)] * copies, [_document(tail)])
    share = fraction * sum(len(document.text) for document in documents)
    allowed = [document for document in distinct if len(document.text) <= share] or distinct
    chosen = {d.digest for d in allowed if int.from_bytes(d.digest[:8], "big") < fraction * 2**64}
    chosen = chosen or {allowed[0].digest}
    if len(chosen) == len(distinct):
        chosen.remove(distinct[-1].digest)
    return Split(
        [document for document in documents if document.digest not in chosen],
        [document for document in documents if document.digest in chosen],
    )


def limit_bytes(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """Keeps whole documents, in the order given, that fit in `max_bytes` together.

    If not even one fits, the start of the first is kept.

    Args:
      documents: sorted by digest, so that the choice depends on contents alone.
      max_bytes: bytes kept at most, from 1.
    """
    kept, size = [], 0
    for document in documents:
        if size + len(document.text) <= max_bytes:
            kept.append(document)
            size += len(document.text)
    if not kept and documents:
        text = documents[0].text
        # At least one character, however small the limit.
        kept.append(_document(text[: _character_start(text, max_bytes) or _character_end(text, 1)]))
    return kept


class _Found(NamedTuple):
    """Where to look: the standard library's folder, or what matches the paths."""

    origin: str
    roots: list[str]
    walk: Callable[[str], Iterator[str]]

    def unsorted(self) -> Iterator[str]:
        return (file for root in self.roots for file in (self.walk(root) if os.path.isdir(root) else [root]))

    def files(self) -> list[str]:
        """All, sorted, each once."""
        found: dict[str, str] = {}
        for file in self.unsorted():
            found.setdefault(os.path.realpath(file), file)
        return sorted(found.values())


def _find(source: str, paths: Sequence[str]) -> _Found:
    if source == "python":
        if paths:
            raise UserError("DataConfig.paths is for source 'files'; source is 'python': set one or the other")
        root = sysconfig.get_paths()["stdlib"]
        return _Found(f"the Python standard library at {root}", [root], _stdlib_files)
    if source != "files":
        raise UserError(f"DataConfig.source is {source!r}: use 'python' or 'files'")
    if isinstance(paths, str):
        paths = (paths,)
    if not paths:
        raise UserError("DataConfig.paths is empty: name files, directories or globs, or use source 'python'")
    return _Found(", ".join(paths), [match for path in paths for match in _matches(path)], _walk)


def _texts(files: Iterable[str], text_field: str, skipped: SkipReport) -> Iterator[bytes]:
    for path in files:
        for text in _read_file(path, text_field, skipped):
            if text.strip():
                yield text
            else:
                skipped.add("empty", path)


def _nothing(found: _Found, skipped: SkipReport, text_field: str) -> UserError:
    if not skipped.total:
        return UserError(f"no usable text in {found.origin}: it holds no files, hidden ones apart; name some that do")
    return UserError(f"no usable text in {found.origin}: {skipped}; {skipped.advice(text_field)}")


def _document(text: bytes) -> Document:
    return Document(text, hashlib.sha256(text).digest())


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _character_start(text: bytes, position: int) -> int:
    """The last start of a UTF-8 character at or before `position`."""
    while 0 < position < len(text) and _is_continuation(text[position]):
        position -= 1
    return position


def _character_end(text: bytes, position: int) -> int:
    while position < len(text) and _is_continuation(text[position]):
        position += 1
    return position


class _Cut(NamedTuple):
    head: bytes
    tail: bytes


def _cut_tail(text: bytes, fraction: float) -> _Cut:
    """Cuts text so that the tail is about `fraction` of it; both parts hold something."""
    target = min(round(len(text) * (1 - fraction)), len(text) - 1)
    at = text.rfind(b"\n", 0, target) + 1
    # A line longer than the tail would leave far more than asked for: then the nearest character will do.
    if at == 0 or target - at > len(text) - target:
        at = _character_start(text, target)
    if not text[:at].strip() or not text[at:].strip():
        raise UserError(
            f"the only document ({len(text)} bytes) is too short to hold out {fraction} of it: "
            "add text or set DataConfig.heldout_fraction = 0"
        )
    return _Cut(text[:at], text[at:])


def _stdlib_files(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _STDLIB_SKIPPED_FOLDERS)
        for name in names:
            if name.endswith(_STDLIB_EXTENSIONS) and not name.startswith(_STDLIB_SKIPPED_FILES):
                yield os.path.join(folder, name)


def _matches(path: str) -> list[str]:
    path = os.path.expanduser(path)
    matches = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    if not matches:
        raise UserError(f"DataConfig.paths: nothing matches {path!r}; give an existing file, directory or glob")
    return matches


def _walk(root: str) -> Iterator[str]:
    """Files below a folder, links to folders followed; a folder that cannot be listed stands for itself."""
    closed: list[str] = []
    seen = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, onerror=lambda e: closed.append(e.filename), followlinks=True):
        # Links may run in circles.
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in sorted(folders)}
        folders[:] = [name for name in real if not name.startswith(".") and real[name] not in seen]
        seen.update(real[name] for name in folders)
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))
    yield from closed


def _read_file(path: str, text_field: str, skipped: SkipReport) -> Iterator[bytes]:
    """Yields the texts of a file, possibly empty ones; everything that cannot be read goes to `skipped`."""
    extension = os.path.splitext(path)[1].lower()
    try:
        # A pipe would wait for a writer that never comes.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("not a file that can be read")
        if extension == ".parquet":
            yield from _read_parquet(path, text_field, skipped)
        elif extension in (".jsonl", ".ndjson"):
            yield from _read_jsonl(path, text_field, skipped)
        else:
            with open(path, "rb") as file:
                text = file.read()
            text.decode("utf-8")
            yield text
    except UnicodeDecodeError:
        skipped.add("not_utf8", path)
    except OSError as error:
        skipped.add("unreadable", f"{path}: {error.strerror or error}")


def _read_jsonl(path: str, text_field: str, skipped: SkipReport) -> Iterator[bytes]:
    lines = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            lines += 1
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if not isinstance(record, dict):
                    skipped.add("malformed", f"{where}: not a JSON object")
                elif text_field not in record:
                    skipped.add("malformed", f"{where}: no field {text_field!r} among {few(record)}", record)
                elif not isinstance(value := record[text_field], str):
                    skipped.add("malformed", f"{where}: {text_field!r} is {type(value).__name__}, not text", record)
                else:
                    # A lone surrogate ("\ud800") is valid JSON but no text: it cannot be encoded.
                    yield value.encode("utf-8")
            except UnicodeDecodeError:
                skipped.add("not_utf8", where)
            except (ValueError, RecursionError):
                skipped.add("malformed", f"{where}: not JSON text")
    if not lines:
        skipped.add("empty", path)


def _read_parquet(path: str, text_field: str, skipped: SkipReport) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        skipped.add("unreadable", f"{path}: {str(error).splitlines()[0]}")
        return
    with file:
        names = file.schema_arrow.names
        if text_field not in names:
            skipped.add("malformed", f"{path}: no column {text_field!r} among {few(names)}", names)
            return
        if not file.metadata.num_rows:
            skipped.add("empty", path)
        row = 0
        try:
            for batch in file.iter_batches(columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    where = f"{path} row {row}"
                    try:
                        text = value.as_py()
                        if isinstance(text, str):
                            yield text.encode("utf-8")
                        else:
                            why = f"{text_field!r} is {type(text).__name__}, not text"
                            skipped.add("malformed", f"{where}: {why}", names)
                    except UnicodeDecodeError:
                        skipped.add("not_utf8", where)
        except pa.ArrowException as error:
            skipped.add("unreadable", f"{path} after row {row}: {str(error).splitlines()[0]}")
