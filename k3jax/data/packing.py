"""Which piece of which document lies where: a pure function of lengths, row length, seed and epoch.

Documents are cut into consecutive pieces of at most a row; pieces are packed first-fit into rows. The packing
of *lengths* depends on the seed alone, so that every epoch has the same number of rows and a global row
number finds its epoch by division. An epoch then deals the pieces anew to the slots of their length, and
shuffles the rows.
"""

from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Pieces of all documents, in document order; int64 arrays, one entry a piece.

    Attributes:
      document: the document's number.
      start: position of the first token in its document.
      length: tokens, from 1 to seq_len.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray


class Packing(NamedTuple):
    """Slots of given lengths in rows.

    Attributes:
      lengths: of the slots, in row order and within a row from left to right.
      row_starts: row r owns slots row_starts[r] to row_starts[r + 1]; one entry more than rows.
    """

    lengths: np.ndarray
    row_starts: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows, none of them empty."""
        return len(self.row_starts) - 1


class EpochPlan(NamedTuple):
    """One epoch: the piece in every slot, and the order in which rows are served.

    Attributes:
      pieces: number of the piece in each slot of the packing; a permutation.
      rows: packing row served at each position of the epoch; a permutation.
    """

    pieces: np.ndarray
    rows: np.ndarray


def cut(document_lengths: np.ndarray, seq_len: int) -> Pieces:
    """Cuts documents into consecutive pieces of seq_len tokens, the last one shorter.

    Args:
      document_lengths: tokens a document, each at least 1.
      seq_len: tokens a row.

    Raises:
      ValueError: seq_len below 1, or a document without tokens.
    """
    if seq_len < 1:
        raise ValueError(f"DataConfig.seq_len is {seq_len}: use at least 1")
    document_lengths = np.asarray(document_lengths, np.int64)
    if (document_lengths < 1).any():
        raise ValueError("a document has no tokens: leave it out before packing")
    counts = -(-document_lengths // seq_len)
    document = np.repeat(np.arange(len(document_lengths)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(document)) - firsts) * seq_len
    return Pieces(document, start, np.minimum(seq_len, document_lengths[document] - start))


def first_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Row of each length when each goes, in the order given, into the first row with room for it.

    Exact first-fit over all rows: a tournament tree over the room left in rows finds the first that fits, in
    O(n log n) for n lengths.

    Args:
      lengths: from 1 to seq_len.
      seq_len: room in a row.

    Returns:
      int64 row numbers, 0 upwards without gaps.

    Raises:
      ValueError: a length that fits in no row.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and (lengths.min() < 1 or lengths.max() > seq_len):
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit in rows of {seq_len}")
    # Leaves are rows; a row not yet opened has all its room, so opening one is no special case. Unlike the
    # lengths, the rows are few when most pieces fill one: the tree grows as they are opened.
    size = 1
    room = [0, seq_len]
    rows = np.empty(len(lengths), np.int64)
    for i, length in enumerate(lengths.tolist()):
        if room[1] < length:
            room = _doubled(room, size, seq_len)
            size *= 2
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        rows[i] = node - size
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            room[node] = left if left > right else right
    return rows


def _doubled(room: list[int], size: int, seq_len: int) -> list[int]:
    """The tree with twice the leaves; the new half is empty rows."""
    doubled = [0, seq_len]
    level = 1
    while level <= size:
        doubled += room[level : 2 * level] + [seq_len] * level
        level *= 2
    return doubled


def pack(lengths: np.ndarray, seq_len: int, seed: int) -> Packing:
    """Packs lengths first-fit, in an order drawn from the seed.

    Args:
      lengths: of the pieces, from 1 to seq_len.
      seq_len: tokens a row.
      seed: not negative.
    """
    lengths = np.asarray(lengths, np.int64)
    lengths = lengths[_permutation(len(lengths), seed, 0, 2)]
    rows = first_fit(lengths, seq_len)
    by_row = np.argsort(rows, kind="stable")
    num_rows = int(rows.max(initial=-1)) + 1
    return Packing(lengths[by_row], np.searchsorted(rows[by_row], np.arange(num_rows + 1)))


def plan_epoch(lengths: np.ndarray, packing: Packing, seed: int, epoch: int) -> EpochPlan:
    """Deals pieces to the packing's slots of their length, and orders the rows, for one epoch.

    Args:
      lengths: of the pieces, those the packing was made from.
      packing: from `pack`, with the same seed.
      seed: not negative.
      epoch: 0 upwards; each has its own order.
    """
    dealt = _permutation(len(lengths), seed, epoch, 0)
    pieces = np.empty(len(lengths), np.int64)
    slots_by_length = np.argsort(packing.lengths, kind="stable")
    pieces[slots_by_length] = dealt[np.argsort(np.asarray(lengths)[dealt], kind="stable")]
    return EpochPlan(pieces, _permutation(packing.num_rows, seed, epoch, 1))


def _permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of n drawn from a key of non-negative integers.

    Made from raw Philox output: numpy keeps that stream from version to version, which it does not promise
    for Generator.permutation.
    """
    if min(key) < 0:
        raise ValueError(f"DataConfig.seed is {key[0]}: use 0 or more")
    return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(n), kind="stable")
