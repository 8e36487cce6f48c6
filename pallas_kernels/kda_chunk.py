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


def sum_rows(select_RC, x_CK, parts):
    """select @ x for a 0/1 matrix, exact to `parts` x 8 bits of each number: x is split into bfloat16 numbers."""
    select = jnp.where(select_RC, 1.0, 0.0).astype(jnp.bfloat16)
    total = 0.0
    for _ in range(parts):
        part = x_CK.astype(jnp.bfloat16)
        total += lax.dot_general(select, part, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        x_CK = x_CK - part.astype(jnp.float32)
    return total


class Intra(NamedTuple):
    """What the decays of a chunk make of its queries and keys."""

    qk_CC: jnp.ndarray  # decayed inner products of queries with keys, j <= i, else 0
    kk_CC: jnp.ndarray  # of keys with keys, j < i, else 0
    q_start_CK: jnp.ndarray  # Q E, reads the entering state
    k_start_CK: jnp.ndarray  # K E
    k_end_CK: jnp.ndarray  # K F, writes to the leaving state
    whole_1K: jnp.ndarray  # decay over the whole chunk


def intra_chunk(q_CK, k_CK, g_CK, floor, dtype):
    """Scores and decayed rows of a chunk; g in base 2, none below `floor` where that is not None."""
    parts = 2 if dtype == jnp.bfloat16 else 3
    if floor is not None and floor * BLOCK > -160:
        return _intra_floor(q_CK, k_CK, g_CK, floor, parts, dtype)
    qk_CC, kk_CC = scores(q_CK, k_CK, g_CK, parts, dtype)
    from_start_CK, to_end_CK = prefix_decay(g_CK, parts), suffix_decay(g_CK, parts)
    return Intra(qk_CC, kk_CC, q_CK * from_start_CK, k_CK * from_start_CK, k_CK * to_end_CK, from_start_CK[-1:])


def _intra_floor(q_CK, k_CK, g_CK, floor, parts, dtype):
    C = g_CK.shape[0]
    row, column = iotas(C, C)
    same = row // BLOCK == column // BLOCK
    local_CK = sum_rows(same & (column <= row), g_CK, parts)
    middle = floor * BLOCK / 2
    row_CK = jnp.exp2(local_CK - middle)
    q_rows, k_rows, k_columns = q_CK * row_CK, k_CK * row_CK, k_CK * jnp.exp2(middle - local_CK)
    zeros = jnp.zeros((C, k_CK.shape[1]), jnp.float32)
    qk, kk, starts = [], [], []
    before_1K = jnp.full((1, k_CK.shape[1]), middle, jnp.float32)
    for b in range(C // BLOCK):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        columns = jnp.concatenate([columns, k_columns[block]]) if b else k_columns[block]
        both = dot(
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


def prefix_decay(g_CK, parts):
    """[C, K]: decay from before the chunk to after each row; g in base 2."""
    row, column = iotas(*g_CK.shape[:1] * 2)
    return jnp.exp2(sum_rows(column <= row, g_CK, parts))


def suffix_decay(g_CK, parts):
    """[C, K]: decay from after each row to the chunk's end."""
    row, column = iotas(*g_CK.shape[:1] * 2)
    return jnp.exp2(sum_rows(column > row, g_CK, parts))


def scores(q_CK, k_CK, g_CK, parts, dtype):
    """Decayed inner products of queries with keys (j <= i) and of keys with keys (j < i), 0 elsewhere: any decay."""
    C = g_CK.shape[0]
    row, column = iotas(C, C)
    diagonal = jnp.sum(q_CK * k_CK, axis=1, keepdims=True)
    qk_CC = jnp.where(row == column, diagonal, 0.0)
    kk_CC = jnp.zeros((C, C), jnp.float32)
    s = 1
    while s < C:
        f_CK = jnp.exp2(sum_rows(_halving_sums(row, column, s), g_CK, parts))
        columns_CK = k_CK * f_CK
        rows = jnp.concatenate([q_CK * f_CK, columns_CK])
        both = dot(rows, columns_CK, "mk,nk", dtype)
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


def unit_lower_inverse(lower_CC, dtype):
    """(I + lower)^-1 of a strictly lower triangular matrix: 16-row blocks by substitution, then block elimination."""
    C = lower_CC.shape[0]
    blocks = range(C // BLOCK)
    row, lane = iotas(BLOCK, C)
    packed = sum(jnp.where(lane // BLOCK == b, lower_CC[b * BLOCK : (b + 1) * BLOCK], 0.0) for b in blocks)
    inverse = jnp.where(lane % BLOCK == row, 1.0, 0.0)
    for j in range(BLOCK - 1):
        column_j = jnp.take_along_axis(packed, lane // BLOCK * BLOCK + j, axis=1)
        inverse = inverse - column_j * inverse[j : j + 1]
    inverse_CC = jnp.concatenate([jnp.where(lane // BLOCK == b, inverse, 0.0) for b in blocks])
    row, column = iotas(C, C)
    s = BLOCK
    while s < C:
        below = jnp.where(_pairs(row, column, s), lower_CC, 0.0)
        inverse_CC = inverse_CC - dot(inverse_CC, dot(below, inverse_CC, "mk,kn", dtype), "mk,kn", dtype)
        s *= 2
    return inverse_CC
