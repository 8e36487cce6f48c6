"""Decays and gradients inside a chunk for any log decay: recursive halving.

A pair row i > column j of a chunk needs exp(g_{j+1} + ... + g_i) per channel, inside a product. At size s = C/2,
... 2, 1 each first half of s rows is paired with the second half beside it; rows carry the decay from the first
half's last row, columns the decay to it, both at most 1, whatever the decay. Each pair meets at exactly one size.

The sums of g are products of a 0/1 matrix with g cut in bfloat16 parts: exact products, added in float32, always of
numbers of one sign, so nothing cancels. A gradient of a log is what its factor was multiplied into times that product's
gradient, and its sums are of one kind too.

Letters: C rows of a chunk, L kinds of sums. Source: spec §2.5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda_blocks import exact_dot
from pallas_kernels.kda_chunk import dot, iotas


class Level(NamedTuple):
    """Factors of rows and columns [C, K] of one size of halves, 0 where a row plays no part."""

    size: int
    row: jax.Array
    column: jax.Array


class Decays(NamedTuple):
    from_start: jax.Array  # [C, K] from before the chunk's first row to after each row
    to_end: jax.Array  # [C, K] from after each row to the chunk's end
    whole: jax.Array  # [1, K]
    levels: list[Level]


def sizes(C: int) -> tuple[int, ...]:
    """Halves' sizes, largest first."""
    return tuple(C >> i for i in range(1, C.bit_length()))


def sum_matrix(C: int):
    """[L C, C] bfloat16 0/1: which rows' g each exponent adds up.

    Kinds: up to the row, after the row, then a level each, inside the half: up to the row in a second half, after it
    in a first half.
    """
    row, column = iotas(C, C)
    kinds = [column <= row, column > row]
    for s in sizes(C):
        kinds.append((row // s == column // s) & jnp.where(row & s != 0, column <= row, column > row))
    return jnp.concatenate(kinds).astype(jnp.bfloat16)


def decays(g_CK, sums_XY, floor: None, parts: int) -> Decays:
    """Every factor from log decays in base 2, float32, <= 0; sums_XY is sum_matrix repeated once a part."""
    C = g_CK.shape[0]
    factors = jnp.exp2(exact_dot(sums_XY, g_CK, parts)).reshape(-1, C, g_CK.shape[1])
    levels = []
    for s, factor in zip(sizes(C), factors[2:], strict=True):
        second = iotas(*g_CK.shape)[0] & s != 0
        levels.append(Level(s, jnp.where(second, factor, 0.0), jnp.where(second, 0.0, factor)))
    return Decays(factors[0], factors[1], factors[0, C - 1 :], levels)


def pair_gradient(q_CK, k_CK, d_scores_XC, decays: Decays, dtype):
    """Gradients of q, k and of the levels' logs from those of the scores.

    Args:
        d_scores_XC: [2 C, C] of queries with keys above those of keys with keys, 0 where the scores are.
    """
    C = q_CK.shape[0]
    d_scores_CX = d_scores_XC.T
    row, column = iotas(C, C)
    diagonal_C1 = jnp.sum(jnp.where(row == column, d_scores_XC[:C], 0.0), axis=1, keepdims=True)
    dq, dk, logs = diagonal_C1 * k_CK, diagonal_C1 * q_CK, []
    for s, row_decay, column_decay in decays.levels:
        pair = row // (2 * s) == column // (2 * s)
        rows = jnp.concatenate([q_CK * row_decay, k_CK * row_decay]).astype(dtype)
        columns = (k_CK * column_decay).astype(dtype)
        d_rows = dot(jnp.where(jnp.concatenate([pair, pair]), d_scores_XC, 0.0), columns, "mk,kn", dtype)
        d_columns = dot(jnp.where(jnp.concatenate([pair, pair], axis=1), d_scores_CX, 0.0), rows, "mk,kn", dtype)
        yield
        dq += d_rows[:C] * row_decay
        dk += d_rows[C:] * row_decay + d_columns * column_decay
        d_row_logs = rows.astype(jnp.float32) * d_rows
        logs.append(d_row_logs[:C] + d_row_logs[C:] + columns.astype(jnp.float32) * d_columns)
    return dq, dk, logs


def log_gradient(d_start_logs, d_end_logs, d_whole_1K, logs, spread_CY, parts: int):
    """Gradient of g [C, K] from those of all logs; spread_CY is sum_matrix transposed, repeated once a part."""
    return exact_dot(spread_CY, jnp.concatenate([d_start_logs, d_end_logs, *logs]), parts) + d_whole_1K
