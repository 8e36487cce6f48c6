"""Packed batches from documents: rows by global number, served by grain, resumed at any row.

Rows are numbered through all epochs, 0 upwards; row n lies in epoch n // rows_per_epoch. Step s of a run is
rows s*B to (s+1)*B, whatever the number of processes, and process p of P gets the p-th of P equal parts. So
the state of the iterator is one number, and nothing is dropped where an epoch ends inside a batch.
"""

import hashlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from k3jax.config import DataConfig
from k3jax.data import packing
from k3jax.data.skipped import SkipReport
from k3jax.data.sources import Document, limit_bytes, read_documents, split_heldout
from k3jax.data.tokenize import Tokenizer, load_tokenizer
from k3jax.errors import UserError

logger = logging.getLogger(__name__)

_THREADS = 2
_BATCHES_AHEAD = 4
_TEXTS_AT_ONCE = 256


class Batch(NamedTuple):
    """Packed rows; int32 arrays of shape [batch, seq_len] (one row, [seq_len], before batching).

    Attributes:
      tokens_BT: inputs; 0 in padding.
      targets_BT: the document's next token; -1 where there is none to predict (padding, and the last token of
        a document where the tokenizer has no document token).
      segment_ids_BT: 1, 2, 3, ... for the pieces of a row from left to right, then 0 for padding.
    """

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    segment_ids_BT: np.ndarray


def load_dataset(config: DataConfig) -> "TextDataset":
    """Reads, splits, tokenises and packs the text that a DataConfig names.

    All of it is held in memory: the raw bytes while reading, then 2 bytes a token (4 where the vocabulary is
    larger than 65,536) and 24 bytes a piece.

    Args:
      config: what to read. Of the held-out documents, whole ones up to `heldout_max_bytes` together are kept, in
        the order of their digests.

    Raises:
      UserError: paths or a tokenizer that cannot be read, or no usable text; one line says which and what to do.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.document_token)
    documents, skipped = read_documents(config.source, config.paths, config.text_field)
    split = split_heldout(documents, config.heldout_fraction)
    heldout = limit_bytes(split.heldout, config.heldout_max_bytes)
    dataset = TextDataset(
        train=PackedDocuments(split.train, tokenizer, config.seq_len, config.seed),
        heldout=PackedDocuments(heldout, tokenizer, config.seq_len, config.seed),
        heldout_texts=[document.text for document in heldout],
        tokenizer=tokenizer,
        batch_size=config.batch_size,
        skipped=skipped,
    )
    if not dataset.train.num_rows:
        raise UserError("DataConfig: no document gives a token to train on; change the tokenizer or add text")
    logger.info("train on %s; held out %s", dataset.train, dataset.heldout)
    return dataset


class PackedDocuments:
    """Tokenised documents packed into rows; the row of any number through all epochs can be had at once.

    Args:
      documents: in an order that is the same everywhere.
      tokenizer: gives the ids.
      seq_len: tokens a row.
      seed: with the epoch, decides the order.

    Attributes:
      seq_len, seed: as given.
      pieces, packing: see k3jax.data.packing.
      num_rows: rows an epoch; the same in every epoch.
      num_tokens: inputs an epoch, document tokens included; each is served exactly once.
      num_targets: tokens predicted an epoch.
      num_bytes: raw bytes of the documents, for bits per byte.
      fingerprint: hex digest of contents, tokenizer and seq_len.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int, seed: int = 0):
        self.seq_len, self.seed = seq_len, seed
        opening = [] if tokenizer.document_token is None else [tokenizer.document_token]
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        parts, lengths, without = [], [], 0
        for at in range(0, len(documents), _TEXTS_AT_ONCE):
            for ids in tokenizer.encode([document.text for document in documents[at : at + _TEXTS_AT_ONCE]]):
                if len(opening) + len(ids):
                    parts += [np.asarray(opening, dtype), ids.astype(dtype)]
                    lengths.append(len(opening) + len(ids))
                else:
                    without += 1
        if without:
            logger.warning("%d documents give no tokens and are left out", without)
        self._tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
        self._offsets = np.cumsum([0, *lengths])
        self._end_target = -1 if tokenizer.document_token is None else tokenizer.document_token
        self.pieces = packing.cut(np.asarray(lengths, np.int64), seq_len)
        self.packing = packing.pack(self.pieces.length, seq_len, seed)
        self.num_rows = self.packing.num_rows
        self.num_tokens = len(self._tokens)
        self.num_targets = self.num_tokens - (len(lengths) if tokenizer.document_token is None else 0)
        self.num_bytes = sum(len(document.text) for document in documents)
        hashed = hashlib.sha256(repr((tokenizer.fingerprint, seq_len)).encode())
        for document in documents:
            hashed.update(document.digest)
        self.fingerprint = hashed.hexdigest()
        self._plans: dict[int, packing.EpochPlan] = {}
        self._lock = threading.Lock()

    @property
    def efficiency(self) -> float:
        """The part of all row positions that holds tokens; 1 is no padding."""
        return self.num_tokens / max(self.num_rows * self.seq_len, 1)

    def __str__(self) -> str:
        return (
            f"{len(self._offsets) - 1} documents, {self.num_bytes} bytes, {self.num_tokens} tokens "
            f"in {self.num_rows} rows of {self.seq_len} ({self.efficiency:.1%} full)"
        )

    def __repr__(self) -> str:
        return f"PackedDocuments(fingerprint={self.fingerprint[:16]}, seed={self.seed})"

    def row(self, row: int) -> Batch:
        """The row of a global row number, counted through the epochs, as three int32 arrays [seq_len]."""
        epoch, position = divmod(row, self.num_rows)
        plan = self._plan(epoch)
        first, last = self.packing.row_starts[plan.rows[position] : plan.rows[position] + 2]
        tokens = np.zeros(self.seq_len, np.int32)
        targets = np.full(self.seq_len, -1, np.int32)
        segments = np.zeros(self.seq_len, np.int32)
        at = 0
        for segment, piece in enumerate(plan.pieces[first:last], 1):
            document = self.pieces.document[piece]
            begin = self._offsets[document] + self.pieces.start[piece]
            end, document_end = begin + self.pieces.length[piece], self._offsets[document + 1]
            here = slice(at, at + (end - begin))
            tokens[here] = self._tokens[begin:end]
            following = self._tokens[begin + 1 : min(end + 1, document_end)]
            targets[at : at + len(following)] = following
            if end == document_end:
                targets[here.stop - 1] = self._end_target
            segments[here] = segment
            at = here.stop
        return Batch(tokens, targets, segments)

    def _plan(self, epoch: int) -> packing.EpochPlan:
        # Two epochs are in use where reading ahead crosses from one to the next.
        with self._lock:
            if epoch not in self._plans:
                if len(self._plans) == 2:
                    self._plans.pop(next(iter(self._plans)))
                self._plans[epoch] = packing.plan_epoch(self.pieces.length, self.packing, self.seed, epoch)
            return self._plans[epoch]


class TextDataset:
    """Packed text to train on and to evaluate on. Made by `load_dataset`.

    Attributes:
      train, heldout: PackedDocuments; heldout may have no rows.
      tokenizer: the Tokenizer, for vocab_size and for decoding.
      batch_size: sequences a step over all processes.
      skipped: the SkipReport of reading.
    """

    def __init__(
        self,
        train: PackedDocuments,
        heldout: PackedDocuments,
        heldout_texts: Sequence[bytes],
        tokenizer: Tokenizer,
        batch_size: int,
        skipped: SkipReport,
    ):
        self.train, self.heldout = train, heldout
        self._heldout_texts = heldout_texts
        self.tokenizer, self.batch_size, self.skipped = tokenizer, batch_size, skipped

    @property
    def fingerprint(self) -> str:
        """Hex digest of contents, split, tokenizer and seq_len: it tells a resumed run if its corpus changed."""
        return hashlib.sha256((self.train.fingerprint + self.heldout.fingerprint).encode()).hexdigest()

    def train_batches(self, process_index: int = 0, process_count: int = 1, next_row: int = 0) -> "BatchIterator":
        """Endless batches [batch_size / process_count, seq_len] for one process, from a global row number on.

        Raises:
          UserError: batch_size is not a multiple of process_count.
          ValueError: process_index is not one of them.
        """
        return BatchIterator(self.train, self.batch_size, process_index, process_count, next_row)

    def heldout_batches(self, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Every held-out row once, in batches as in training; the last one is filled with rows of padding.

        All processes get the same number of batches.
        """
        stop = self.heldout.num_rows
        rows = _ProcessRows(self.heldout, self.batch_size, process_index, process_count, stop=stop)
        return rows.batches() if stop else iter(())

    def heldout_bytes(self) -> bytes:
        """The raw held-out bytes in one string, `heldout.num_bytes` long: what compressors are given."""
        return b"".join(self._heldout_texts)


class BatchIterator:
    """Training batches of one process, with a position that can be saved and restored exactly.

    Reading runs ahead in threads; the state counts what was handed out, so it is right at any moment. It is
    the same on every process and fits any other number of processes.

    Args:
      rows: where rows come from.
      batch_size: rows a step over all processes.
      process_index: this process, from 0.
      process_count: all processes; divides batch_size.
      next_row: global row number to start from.
    """

    def __init__(
        self,
        rows: PackedDocuments,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        next_row: int = 0,
    ):
        self._rows, self._batch_size = rows, batch_size
        self._process_index, self._process_count = process_index, process_count
        self._iterator = None
        _ProcessRows(rows, batch_size, process_index, process_count)  # an impossible share is refused here
        self.set_state({"next_row": next_row})

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = _ProcessRows(
                self._rows, self._batch_size, self._process_index, self._process_count, self._next_row
            ).batches()
        batch = next(self._iterator)
        self._next_row += self._batch_size
        return batch

    def get_state(self) -> dict[str, int]:
        """The position: {"next_row": global number of the first row not yet handed out}."""
        return {"next_row": self._next_row}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to a position that `get_state` gave, on any number of processes; as fast for every row.

        Raises:
          ValueError: not such a state.
        """
        next_row = state.get("next_row") if isinstance(state, dict) else None
        if isinstance(next_row, bool) or not isinstance(next_row, int | np.integer) or next_row < 0:
            raise ValueError(f"data state is {state!r}: need {{'next_row': n}} with n >= 0, as get_state gives it")
        self.close()
        self._next_row = int(next_row)

    def close(self) -> None:
        """Stops reading ahead; the iterator can still be used, and starts again where it was."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class _ProcessRows:
    """The rows of one process in the order it needs them: a random-access source for grain.

    Rows from number `stop` on are padding; None never stops.
    """

    def __init__(
        self,
        rows: PackedDocuments,
        batch_size: int,
        process_index: int,
        process_count: int,
        first_row: int = 0,
        stop: int | None = None,
    ):
        if process_count < 1 or batch_size % process_count:
            raise UserError(f"DataConfig.batch_size is {batch_size}: use a multiple of the {process_count} processes")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index}: use 0 to {process_count - 1}")
        self._rows, self._batch_size, self._first_row, self._stop = rows, batch_size, first_row, stop
        self._per_step = batch_size // process_count
        self._offset = process_index * self._per_step

    def __len__(self) -> int:
        if self._stop is None:
            return sys.maxsize // self._per_step * self._per_step
        return -(-(self._stop - self._first_row) // self._batch_size) * self._per_step

    def __getitem__(self, index: int) -> Batch:
        step, within = divmod(index, self._per_step)
        row = self._first_row + step * self._batch_size + self._offset + within
        if self._stop is None or row < self._stop:
            return self._rows.row(row)
        nothing = np.zeros(self._rows.seq_len, np.int32)
        return Batch(nothing, nothing - 1, nothing)

    def __repr__(self) -> str:
        return f"{self._rows!r} from row {self._first_row}, {self._per_step} of {self._batch_size}"

    def batches(self):
        """Starts a grain iterator over batches; its threads read a few batches ahead."""
        import grain  # here, because grain imports jax

        ahead = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
        dataset = grain.MapDataset.source(self).batch(self._per_step, drop_remainder=True, batch_fn=_stack)
        return iter(dataset.to_iter_dataset(ahead))


def _stack(rows: Sequence[Batch]) -> Batch:
    return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))
