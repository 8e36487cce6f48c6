"""Pairwise decays inside a chunk by recursive halving: the part of chunked KDA that decides its accuracy.

Inside a chunk every pair row i > column j needs exp(g_{j+1} + ... + g_i) per channel, inside a matmul.
Written as exp(G_i) * exp(-G_j) the second factor overflows; written with a pivot between j and i, as exp(sum
from the pivot to i) * exp(sum from j to the pivot), both factors are at most 1, for any decay. No single
pivot lies between all pairs, so the chunk is split recursively: at size s (1, 2, 4, ... C/2) each first half
of s rows is paired with the second half beside it and the pivot is the last row of the first half. Each pair
of rows meets at exactly one size.

The sums are built from the leaves up, always by adding numbers of one sign: nothing cancels, however extreme
the decay. A row's factors use only g at and before the row, so a later token cannot change an earlier output,
not even its last bit.

Letters beyond design: C rows of a chunk, s rows of a half, P = C / 2s pairs of halves in a chunk; "..." leads
(chunks, batch, heads).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HIGHEST = jax.lax.Precision.HIGHEST
LEAF = 8  # blocks of this many rows are inverted with masks; smaller products would not be worth their launch


class Level(NamedTuple):
    """At one size: decay of rows (second halves) since the pivot, of columns (first halves) until it [..., P, s, K]."""

    row: jax.Array
    column: jax.Array


class Decays(NamedTuple):
    """Every decay a chunk needs, all in [0, 1]; or gradients of their logs."""

    levels: tuple[Level, ...]  # s = 1, 2, 4, ... C/2
    from_start: jax.Array  # [..., C, K] from before the chunk's first row to after each row
    to_end: jax.Array  # [..., C, K] from after each row to the chunk's end
    whole: jax.Array  # [..., K] over the whole chunk


def matmul(x, y):
    """[..., m, n] @ [..., n, p] in full float32 (at default precision a TPU multiplies in one bf16 pass)."""
    return jnp.einsum("...mn,...np->...mp", x, y, precision=HIGHEST)


def matmul_nt(x, y):
    """x @ y^T."""
    return jnp.einsum("...mn,...pn->...mp", x, y, precision=HIGHEST)


def matmul_tn(x, y):
    """x^T @ y."""
    return jnp.einsum("...nm,...np->...mp", x, y, precision=HIGHEST)


def row_sums(x):
    """Sum over the last axis, as a product: XLA's own reduction along rows is several times slower on CPU."""
    return matmul(x, jnp.ones((x.shape[-1], 1), x.dtype))[..., 0]


def halves(x: jax.Array, s: int) -> tuple[jax.Array, jax.Array]:
    """[..., C, K] -> its first and its second halves of s rows, each [..., P, s, K]."""
    x = x.reshape(*x.shape[:-2], -1, 2, s, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def join_halves(first, second):
    """Inverse of `halves`."""
    x = jnp.concatenate([first, second], axis=-2)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def pairwise_decays(g: jax.Array) -> Decays:
    """exp of every sum of log decays that a chunk needs.

    Args:
        g: [..., C, K] log decays, <= 0; C a power of two.
    Returns:
        Decays, in g's dtype.
    Source: spec §2.4.
    """
    C = g.shape[-2]
    prefix, suffix = g, jnp.zeros_like(g)  # sums inside blocks of s rows: up to and with the row; after the row
    levels, s = [], 1
    while s < C:
        (prefix_1, prefix_2), (suffix_1, suffix_2) = halves(prefix, s), halves(suffix, s)
        levels.append(Level(jnp.exp(prefix_2), jnp.exp(suffix_1)))
        total_1, total_2 = prefix_1[..., -1:, :], prefix_2[..., -1:, :]
        prefix = join_halves(prefix_1, prefix_2 + total_1)
        suffix = join_halves(suffix_1 + total_2, suffix_2)
        s *= 2
    from_start = jnp.exp(prefix)
    return Decays(tuple(levels), from_start, jnp.exp(suffix), from_start[..., -1, :])


def log_decay_gradient(d_logs: Decays) -> jax.Array:
    """The transpose of `pairwise_decays`, before its exp.

    Args:
        d_logs: gradients of the logs of every decay.
    Returns:
        [..., C, K], the gradient of g.
    """
    d_prefix, d_suffix = d_logs.from_start, d_logs.to_end
    d_total = d_logs.whole[..., None, None, :]  # [..., P, 1, K]
    for level in reversed(d_logs.levels):
        s = level.row.shape[-2]
        (prefix_1, prefix_2), (suffix_1, suffix_2) = halves(d_prefix, s), halves(d_suffix, s)
        d_total_1 = d_total + jnp.sum(prefix_2, axis=-2, keepdims=True)
        d_total_2 = d_total + jnp.sum(suffix_1, axis=-2, keepdims=True)
        d_prefix = join_halves(prefix_1, prefix_2 + level.row)
        d_suffix = join_halves(suffix_1 + level.column, suffix_2)
        d_total = join_halves(d_total_1, d_total_2)[..., None, :]
    return d_prefix + d_total[..., 0, :]


# Scores [..., 2, C, C] are the decayed inner products inside a chunk, of queries with keys (j <= i, else 0) and of keys
# with keys (j < i, else 0).


def pair_scores(q: jax.Array, k: jax.Array, decays: Decays) -> jax.Array:
    """Scores: sum_c q_ic k_jc exp(sum of g_c over j+1..i), and the same with k for q.

    Args:
        q: [..., C, K] queries, scaled.
        k: [..., C, K] keys.
        decays: of the chunk; only the levels are used.
    Returns:
        [..., 2, C, C], queries with keys, then keys with keys.
    Source: spec §2.4.
    """
    lead, C = q.shape[:-2], q.shape[-2]
    diagonal = row_sums(q * k)
    diagonal = jnp.stack([diagonal, jnp.zeros_like(diagonal)], axis=-1)
    scores = diagonal.reshape(*lead, C, 2, 1, 1)  # diagonal blocks, grown size by size
    for level in decays.levels:
        rows, columns = _factors(q, k, level)
        scores = _grow(scores, matmul_nt(rows, columns))
    return scores[..., 0, :, :, :]


def pair_scores_gradient(
    d_scores: jax.Array, q: jax.Array, k: jax.Array, decays: Decays
) -> tuple[jax.Array, jax.Array, tuple[Level, ...]]:
    """The transpose of `pair_scores`.

    Args:
        d_scores: [..., 2, C, C] gradient of the scores; 0 where the scores are.
        q: as `pair_scores` took it.
        k: as `pair_scores` took it.
        decays: as `pair_scores` took them.
    Returns:
        Gradients of q and of k, [..., C, K], and, a Level a size, of the logs of the level decays.
    """
    diagonal = row_sums(d_scores[..., 0, :, :] * jnp.eye(q.shape[-2], dtype=q.dtype))[..., None]
    dq, dk, d_levels = diagonal * k, diagonal * q, []
    d_scores = d_scores[..., None, :, :, :]  # diagonal blocks, split size by size
    for level in reversed(decays.levels):
        s = level.row.shape[-2]
        rows, columns = _factors(q, k, level)
        d_block = d_scores[..., s:, :s].reshape(*columns.shape[:-2], 2 * s, s)
        d_rows, d_columns = matmul(d_block, columns), matmul_tn(d_block, rows)
        d_row_logs = rows * d_rows
        d_levels.append(Level(d_row_logs[..., :s, :] + d_row_logs[..., s:, :], columns * d_columns))
        dq_2, dk_2 = d_rows[..., :s, :] * level.row, d_rows[..., s:, :] * level.row
        dq += join_halves(jnp.zeros_like(dq_2), dq_2)
        dk += join_halves(d_columns * level.column, dk_2)
        d_scores = _split(d_scores)
    return dq, dk, tuple(reversed(d_levels))


def _factors(q, k, level: Level):
    """Decayed rows [..., P, 2s, K], queries above keys, and columns [..., P, s, K]."""
    s = level.row.shape[-2]
    (_, q_2), (k_1, k_2) = halves(q, s), halves(k, s)
    return jnp.concatenate([q_2 * level.row, k_2 * level.row], axis=-2), k_1 * level.column


def _grow(diagonal, below):
    """Diagonal blocks [..., 2P, X, s, s] and the blocks below, [..., P, X * s, s] -> diagonal [..., P, X, 2s, 2s]."""
    s = below.shape[-1]
    below = below.reshape(*below.shape[:-2], -1, s, s)
    diagonal = diagonal.reshape(*below.shape[:-3], 2, *below.shape[-3:])
    first, second = diagonal[..., 0, :, :, :], diagonal[..., 1, :, :, :]
    above = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _split(diagonal):
    """Diagonal blocks [..., P, X, 2s, 2s] -> the diagonal blocks inside them [..., 2P, X, s, s]."""
    s = diagonal.shape[-1] // 2
    pairs = jnp.stack([diagonal[..., :s, :s], diagonal[..., s:, s:]], axis=-4)
    return pairs.reshape(*diagonal.shape[:-4], -1, *pairs.shape[-3:])


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 for strictly lower triangular [..., C, C], by exact block elimination.

    [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], from 1 x 1 blocks up. No power of `lower` is formed: a
    Neumann series has terms that overflow when keys repeat, although the inverse itself is small.

    Args:
        lower: [..., C, C], zero on and above the diagonal; C a power of two.
    Returns:
        [..., C, C], unit lower triangular.
    Source: spec §2.4.
    """
    C = lower.shape[-1]
    diagonal, belows = lower[..., None, None, :, :], []
    while (s := diagonal.shape[-1] // 2) >= min(LEAF, C):
        belows.append(diagonal[..., 0, s:, :s])
        diagonal = _split(diagonal)
    # Inside blocks of LEAF rows X - X L X, with L the entries of one size, eliminates all pairs of that size at once.
    inverse = jnp.eye(diagonal.shape[-1], dtype=lower.dtype) - diagonal * _pairs(1, diagonal)
    s = 2
    while s < diagonal.shape[-1]:
        inverse -= matmul(inverse, matmul(diagonal * _pairs(s, diagonal), inverse))
        s *= 2
    for below in reversed(belows):
        s = below.shape[-1]
        blocks = inverse.reshape(*below.shape[:-2], 2, s, s)
        first, second = blocks[..., 0, :, :], blocks[..., 1, :, :]
        inverse = _grow(inverse, -matmul(second, matmul(below, first)))
    return inverse[..., 0, 0, :, :]


def _pairs(s, blocks):
    """1 where a row in a second half of s rows meets a column in the first half beside it; a mask of the blocks."""
    row, column = np.arange(blocks.shape[-1])[:, None], np.arange(blocks.shape[-1])
    pairs = (row // (2 * s) == column // (2 * s)) & (row // s > column // s)
    return jnp.asarray(pairs, blocks.dtype)
