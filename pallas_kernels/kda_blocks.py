"""Decays and gradients inside a chunk when the log decay has a floor: blocks of 16 rows, one anchor a block.

A row carries its decay from just before its block's first row, E = exp(sum up to the row). A column of the same
block carries exp(-sum), a column of an earlier block F = exp(sum after it in its block) times the whole decays t of
the blocks between. So the rows' side is one array for all their columns, and every block of rows is one product,
[queries; keys] of the block against all columns up to it.

With a floor of -5 a block decays by at most exp(-80): exp(-sum) is finite. A constant, half of that, is moved from
the columns to the rows, so that neither side comes near the end of the exponent's range and the gradients of
saturated gates are not flushed to zero. Anchors lie in the past and the constant is one: causal to the bit.

Letters: C rows of a chunk, blocks b, rows' blocks i, columns' blocks j. Source: spec §2.5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda_chunk import BLOCK, LOG2_E, dot, iotas


class Decays(NamedTuple):
    from_start: jax.Array  # [C, K] from before the chunk's first row to after each row
    to_end: jax.Array  # [C, K] from after each row to the chunk's end
    whole: jax.Array  # [1, K]
    row: jax.Array  # [C, K] from before the block to after the row, times a constant
    column: jax.Array  # [C, K] from after the row to the block's end, over the constant
    inverse: jax.Array  # [C, K] 1 / row
    totals: list[jax.Array]  # [1, K] of each block


class PairLogs(NamedTuple):
    """Gradients of logs, from pairs inside the chunk."""

    row: jax.Array  # [C, K] of the sum up to the row in its block
    column: jax.Array  # [C, K] of the sum after the row in its block
    totals: list[jax.Array]  # [1, K] of each block's whole sum, where pairs lie on both sides of it


def sum_matrix(C: int):
    """[2 C, C] bfloat16 0/1: sums inside blocks, up to the row, then after the row."""
    row, column = iotas(C, C)
    same = row // BLOCK == column // BLOCK
    return jnp.concatenate([same & (column <= row), same & (column > row)]).astype(jnp.bfloat16)


def decays(g_CK, sums_XY, floor: float, parts: int) -> Decays:
    """Every factor from log decays in base 2, float32.

    sums_XY is sum_matrix repeated along its columns once a part.
    """
    C = g_CK.shape[0]
    blocks = range(C // BLOCK)
    sums = exact_dot(sums_XY, g_CK, parts)
    shift = round(-0.5 * BLOCK * floor * LOG2_E)  # whole, so that multiplying by it is exact
    before, column = jnp.exp2(sums[:C]), jnp.exp2(sums[C:])
    totals = [before[b * BLOCK + BLOCK - 1 : (b + 1) * BLOCK] for b in blocks]
    starts, ends = [jnp.ones_like(totals[0])], [jnp.ones_like(totals[0])]
    for b in blocks:
        starts.append(starts[-1] * totals[b])
        ends.append(ends[-1] * totals[-1 - b])
    from_start = jnp.concatenate([_block(before, b) * starts[b] for b in blocks])
    to_end = jnp.concatenate([_block(column, b) * ends[-2 - b] for b in blocks])
    row, inverse = before * 2.0**shift, jnp.exp2(-sums[:C]) * 2.0**-shift
    return Decays(from_start, to_end, starts[-1], row, column * 2.0**-shift, inverse, totals)


def pair_gradient(q_CK, k_CK, d_scores_XC, decays: Decays, dtype):
    """Gradients of q, k and of the decays' logs from those of the scores.

    Args:
        d_scores_XC: [2 C, C] of queries with keys above those of keys with keys, 0 where the scores are.
    """
    C, K = q_CK.shape
    blocks = range(C // BLOCK)
    q_rows, k_rows = (q_CK * decays.row).astype(dtype), (k_CK * decays.row).astype(dtype)
    k_inverse, k_column = (k_CK * decays.inverse).astype(dtype), k_CK * decays.column
    d_scores_XC = d_scores_XC.astype(dtype)

    earlier = []  # columns of the blocks before i, decayed to the start of i; then the same as products took them
    earliers, d_rows, d_columns = [], [], []
    for i in blocks:
        d_block = jnp.concatenate([_block(d_scores_XC, i), _block(d_scores_XC, i + len(blocks))])
        columns = jnp.concatenate([*(x.astype(dtype) for x in earlier), _block(k_inverse, i)])
        rows = jnp.concatenate([_block(q_rows, i), _block(k_rows, i)])
        d_rows.append(dot(d_block[:, : len(columns)], columns, "mk,kn", dtype))
        d_columns.append(dot(d_block.T[: len(columns)], rows, "mk,kn", dtype))
        yield
        earliers.append(earlier)
        earlier = [x * decays.totals[i] for x in earlier] + [_block(k_column, i)]
    d_q_rows = jnp.concatenate([d[:BLOCK] for d in d_rows])
    d_k_rows = jnp.concatenate([d[BLOCK:] for d in d_rows])
    d_inverse = jnp.concatenate([d[-BLOCK:] for d in d_columns])

    # The same way back: `reached` is the gradient of the columns up to block i, decayed to its end.
    reached = [jnp.zeros((BLOCK, K), jnp.float32) for _ in blocks]
    d_column, d_totals = list(reached), [jnp.zeros((1, K), jnp.float32) for _ in blocks]
    for i in reversed(blocks):
        d_column[i] = reached[i]
        passing = [x * decays.totals[i] for x in reached[:i]]
        if 0 < i < len(blocks) - 1:
            d_totals[i] = jnp.sum(sum(x * y for x, y in zip(passing, earliers[i], strict=True)), axis=0, keepdims=True)
        reached = [x + _block(d_columns[i], j) for j, x in enumerate(passing)]
    d_column = jnp.concatenate(d_column)

    yield
    dq = d_q_rows * decays.row
    dk = d_k_rows * decays.row + d_column * decays.column + d_inverse * decays.inverse
    d_row_logs = (
        q_rows.astype(jnp.float32) * d_q_rows
        + k_rows.astype(jnp.float32) * d_k_rows
        - k_inverse.astype(jnp.float32) * d_inverse
    )
    return dq, dk, PairLogs(d_row_logs, d_column * k_column, d_totals)


def log_gradient(d_start_logs, d_end_logs, d_whole_1K, pairs: PairLogs, spread_CY, parts: int):
    """Gradient of g [C, K] from those of all logs; spread_CY is sum_matrix transposed, repeated once a part."""
    C = d_start_logs.shape[0]
    blocks = range(C // BLOCK)
    logs = jnp.concatenate([d_start_logs + pairs.row, d_end_logs + pairs.column])
    inside = exact_dot(spread_CY, logs, parts)
    later, earlier = [d_whole_1K], [jnp.zeros_like(d_whole_1K)]  # what lies behind and before each block
    for b in blocks:
        later.append(later[-1] + jnp.sum(_block(d_start_logs, blocks[-1 - b]), axis=0, keepdims=True))
        earlier.append(earlier[-1] + jnp.sum(_block(d_end_logs, b), axis=0, keepdims=True))
    return jnp.concatenate([_block(inside, b) + (later[-2 - b] + earlier[b] + pairs.totals[b]) for b in blocks])


def exact_dot(zero_one_XY, x, parts: int):
    """A 0/1 matrix, repeated along Y once a part, times float32 x, exact to 8 bits a part (3 hold all of float32)."""
    pieces, rest = [], x
    for _ in range(parts):
        pieces.append(rest.astype(jnp.bfloat16))
        rest = rest - pieces[-1].astype(jnp.float32)
    return dot(zero_one_XY, jnp.concatenate(pieces), "mk,kn", jnp.bfloat16)


def _block(x, b):
    return x[b * BLOCK : (b + 1) * BLOCK]
