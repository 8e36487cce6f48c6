"""The mathematics of one chunk of one head, as functions on values in VMEM.

Letters beyond K and V: C rows of a chunk. Everything is causal to the bit: what a row of the scores or of the inverse
holds depends on that row and on rows before it only. Rows after it enter products as exact zeros.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

CHUNK = 128  # tokens; the scores of a chunk fill the 128 lanes of a register
BLOCK = 16  # rows of a diagonal block
LOG2_E = 1.4426950408889634


def dot(x, y, contract: str, dtype):
    """Product of two matrices; `contract` names the shared letter as einsum does, "mk,kn" or "mk,nk".

    Operands of dtype bfloat16 are rounded and multiplied in one pass, of float32 in as many as give full precision.
    """
    left, right = contract.split(",")
    shared = next(letter for letter in left if letter in right)
    dims = (((left.index(shared),), (right.index(shared),)), ((), ()))
    if dtype == jnp.bfloat16:
        x, y = x.astype(dtype), y.astype(dtype)
        return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
    return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def iotas(rows, columns):
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 0), lax.broadcasted_iota(jnp.int32, (rows, columns), 1)


def sum_matrix(select_RC, parts):
    """A 0/1 matrix as `sum_rows` takes it."""
    return jnp.concatenate([jnp.where(select_RC, 1.0, 0.0).astype(jnp.bfloat16)] * parts, axis=1)


def sum_rows(select, x_CK, parts):
    """select @ x for a 0/1 matrix, exact to `parts` x 8 bits of each number: x is split into bfloat16 numbers."""
    pieces = []
    for _ in range(parts):
        pieces.append(x_CK.astype(jnp.bfloat16))
        x_CK = x_CK - pieces[-1].astype(jnp.float32)
    return (yield Product(select, jnp.concatenate(pieces), "mk,kn", jnp.bfloat16))


class Product(NamedTuple):
    """A product that a head asks for: the arguments of `dot`."""

    x: jnp.ndarray
    y: jnp.ndarray
    contract: str
    dtype: jnp.dtype


class Intra(NamedTuple):
    """What the decays of a chunk make of its queries and keys."""

    qk_CC: jnp.ndarray  # decayed inner products of queries with keys, j <= i, else 0
    kk_CC: jnp.ndarray  # of keys with keys, j < i, else 0
    q_start_CK: jnp.ndarray  # Q E, reads the entering state
    k_start_CK: jnp.ndarray  # K E
    k_end_CK: jnp.ndarray  # K F, writes to the leaving state
    whole_1K: jnp.ndarray  # decay over the whole chunk


def intra_chunk(q_CK, k_CK, g_CK, floor, dtype, constant):
    """Scores and decayed rows of a chunk; g in base 2, none below `floor` where that is not None."""
    parts = 2 if dtype == jnp.bfloat16 else 3
    if floor is not None and floor * BLOCK > -160:
        return (yield from _intra_floor(q_CK, k_CK, g_CK, floor, parts, dtype, constant))
    qk_CC, kk_CC = yield from scores(q_CK, k_CK, g_CK, parts, dtype, constant)
    row, column = iotas(*g_CK.shape[:1] * 2)
    prefix_CK = yield from sum_rows(constant(("prefix", parts), lambda: sum_matrix(column <= row, parts)), g_CK, parts)
    suffix_CK = yield from sum_rows(constant(("suffix", parts), lambda: sum_matrix(column > row, parts)), g_CK, parts)
    from_start_CK, to_end_CK = jnp.exp2(prefix_CK), jnp.exp2(suffix_CK)
    return Intra(qk_CC, kk_CC, q_CK * from_start_CK, k_CK * from_start_CK, k_CK * to_end_CK, from_start_CK[-1:])


def _intra_floor(q_CK, k_CK, g_CK, floor, parts, dtype, constant):
    C = g_CK.shape[0]
    row, column = iotas(C, C)
    same = row // BLOCK == column // BLOCK
    local_CK = yield from sum_rows(
        constant(("local", parts), lambda: sum_matrix(same & (column <= row), parts)), g_CK, parts
    )
    middle = floor * BLOCK / 2
    row_CK = jnp.exp2(local_CK - middle)
    q_rows, k_rows, k_columns = q_CK * row_CK, k_CK * row_CK, k_CK * jnp.exp2(middle - local_CK)
    zeros = jnp.zeros((C, k_CK.shape[1]), jnp.float32)
    qk, kk, starts = [], [], []
    before_1K = jnp.full((1, k_CK.shape[1]), middle, jnp.float32)
    for b in range(C // BLOCK):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        columns = jnp.concatenate([columns, k_columns[block]]) if b else k_columns[block]
        both = yield Product(
            jnp.concatenate([q_rows[block], k_rows[block]]),
            jnp.concatenate([columns, zeros[(b + 1) * BLOCK :]]) if (b + 1) * BLOCK < C else columns,
            "mk,nk",
            dtype,
        )
        row, column = iotas(BLOCK, C)
        row += b * BLOCK
        qk.append(jnp.where(column <= row, both[:BLOCK], 0.0))
        kk.append(jnp.where(column < row, both[BLOCK:], 0.0))
        start_1K = jnp.exp2(before_1K)
        starts.append((q_rows[block] * start_1K, k_rows[block] * start_1K))
        total_1K = local_CK[(b + 1) * BLOCK - 1 : (b + 1) * BLOCK]
        before_1K = before_1K + total_1K
        columns = columns * jnp.exp2(total_1K - middle if (b + 1) * BLOCK == C else total_1K)
    q_start, k_start = zip(*starts, strict=True)
    cat = jnp.concatenate
    return Intra(cat(qk), cat(kk), cat(q_start), cat(k_start), columns, jnp.exp2(before_1K - middle))


def scores(q_CK, k_CK, g_CK, parts, dtype, constant):
    """Decayed inner products of queries with keys (j <= i) and of keys with keys (j < i), 0 elsewhere: any decay."""
    C = g_CK.shape[0]
    row, column = iotas(C, C)
    diagonal = jnp.sum(q_CK * k_CK, axis=1, keepdims=True)
    qk_CC = jnp.where(row == column, diagonal, 0.0)
    kk_CC = jnp.zeros((C, C), jnp.float32)
    s = 1
    while s < C:
        select = constant((s, parts), lambda: sum_matrix(_halving_sums(row, column, s), parts))
        f_CK = yield from sum_rows(select, g_CK, parts)
        f_CK = jnp.exp2(f_CK)
        columns_CK = k_CK * f_CK
        rows = jnp.concatenate([q_CK * f_CK, columns_CK])
        both = yield Product(rows, columns_CK, "mk,nk", dtype)
        pair = _pairs(row, column, s)
        qk_CC, kk_CC = jnp.where(pair, both[:C], qk_CC), jnp.where(pair, both[C:], kk_CC)
        s *= 2
    return qk_CC, kk_CC


def _pairs(row, column, s):
    """Where a row in a second half of s rows meets a column of the first half beside it."""
    return ((row ^ column) >= s) & ((row ^ column) < 2 * s) & (row > column)


def _halving_sums(row, column, s):
    """Row i sums g from the pivot (the last row of the first half) to i, or from after i to the pivot."""
    second = (row & s) != 0
    return (row // s == column // s) & ((second & (column <= row)) | (~second & (column > row)))


def unit_lower_inverse(strict_CC, beta_1C, dtype):
    """(I + strict * beta)^-1 of a strictly lower triangular matrix and a scale of its columns.

    Diagonal blocks of 16 rows by forward substitution, all of a chunk side by side in the lanes; then pairs of blocks
    by exact elimination, [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], again all pairs side by side: a block
    of s rows holds lanes b s to (b + 1) s - 1, and only its rows are multiplied.
    """
    C = strict_CC.shape[0]
    s = BLOCK
    _, lane = iotas(s, C)
    diagonal = strict_CC[:s]
    for b in range(1, C // s):
        diagonal = jnp.where(lane // s == b, strict_CC[b * s : (b + 1) * s], diagonal)
    inverse = yield from _substitute(diagonal * beta_1C)
    while s < C:
        pairs = range(C // s // 2)
        _, lane = iotas(s, C)
        below = strict_CC[s : 2 * s]
        for p in pairs[1:]:
            below = jnp.where(lane // (2 * s) == p, strict_CC[(2 * p + 1) * s : (2 * p + 2) * s], below)
        first = (lane // s) % 2 == 0
        below = jnp.where(first, below, 0.0) * beta_1C
        blocks = [jnp.where(lane // s == b, 1.0, 0.0).astype(dtype) for b in range(C // s)]
        operand = inverse.astype(dtype)
        half = yield Product(below, jnp.concatenate([operand * block for block in blocks]), "mk,kn", dtype)
        half = half.astype(dtype)
        zeros = jnp.zeros((s, C), dtype)
        right = jnp.concatenate([x for p in pairs for x in (zeros, half * blocks[2 * p])])
        corner = yield Product(jnp.where(first, 0.0, inverse), right, "mk,kn", dtype)
        inverse = jnp.concatenate([jnp.where(first, inverse, 0.0), jnp.where(first, -corner, inverse)])
        s *= 2
    return inverse


def _substitute(diagonal):
    """Inverses of unit lower triangular [16, 16] blocks side by side, from their strictly lower parts."""
    half = BLOCK // 2
    row, lane = iotas(half, diagonal.shape[1])
    column = lane % BLOCK
    lower, inverse = (diagonal[:half], diagonal[half:]), [jnp.where(column == row + i * half, 1.0, 0.0) for i in (0, 1)]
    for j in range(BLOCK - 1):
        row_j = inverse[j // half][j % half : j % half + 1]
        for i in range(2):
            if j < (i + 1) * half - 1:
                column_j = jnp.take_along_axis(lower[i], lane - column + j, axis=1)
                inverse[i] = inverse[i] - column_j * row_j
        yield
    return jnp.concatenate(inverse)


def side_by_side(heads):
    """Runs heads in lockstep, one product of each at a time, those of two neighbours fused.

    A head is a generator that yields a Product and is sent its value. So independent instructions stand beside each
    other, which hides their latency, and the products of two heads fill the 256 rows of a matrix unit.
    """
    values = dict.fromkeys(heads)
    while values:
        asked = {}
        for head, value in values.items():
            try:
                asked[head] = head.send(value)
            except StopIteration:
                pass
        values = dict.fromkeys(asked)
        products = [head for head in asked if asked[head] is not None]
        for i in range(0, len(products), 2):
            pair = products[i : i + 2]
            for head, value in zip(pair, _fused(*(asked[head] for head in pair)), strict=True):
                values[head] = value


import os

PAIR = os.environ.get("PAIR", "0") == "1"
PAIRN = os.environ.get("PAIRN", "0") == "1"


def _fused(first: Product, second: Product | None = None):
    if second is None:
        return (dot(*first),)
    contract, dtype = first.contract, first.dtype
    if first.x is second.x:
        if not PAIRN:
            return dot(*first), dot(*second)
        N = first.y.shape[1]
        both = dot(first.x, jnp.concatenate([first.y, second.y], axis=1), contract, dtype)
        return both[:, :N], both[:, N:]
    if not PAIR:
        return dot(*first), dot(*second)
    if first.x.shape[1] > 128:
        return dot(*first), dot(*second)
    M = first.x.shape[0]
    x1, x2, y1, y2 = (x.astype(dtype) for x in (first.x, second.x, first.y, second.y))
    x = jnp.concatenate([_beside(x1, jnp.zeros_like(x1)), _beside(jnp.zeros_like(x2), x2)])
    y = jnp.concatenate([y1, y2], axis=contract.split(",")[1].index("k"))
    both = dot(x, y, contract, dtype)
    return both[:M], both[M:]


def _beside(x, y):
    return jnp.concatenate([x, y], axis=1)
