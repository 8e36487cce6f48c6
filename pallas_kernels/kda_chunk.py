"""The mathematics of one chunk of one head, as functions on values in VMEM.

Letters beyond K and V: C rows of a chunk. Everything is causal to the bit: what a row of the scores or of the inverse
holds depends on that row and on rows before it only. Rows after it enter products as exact zeros.
"""

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
