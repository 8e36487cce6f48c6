"""Quantile Balancing: the router bias that gives every expert its share of the tokens.

Expert j enters token i's top k when its bias exceeds the required bias r_ij = alpha_i - s_ij, where alpha_i
is the (k+1)-th largest of s_i + b. Were the cutoffs fixed, a bias at the (k/E)-quantile of column j would
send expert j exactly its share. One such step per training step replaces the bias; only its mean is free, so
it is centred.

`exact_bias` sorts the required biases of all tokens at once. `histogram` and `bias_from_histogram` split the
work: the counts are integers, add over micro-batches and devices in any order with the same bits, and need
one sum per step. Counts are int32: one training step may hold up to 2^31 - 1 tokens.
"""

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.router import check_top_k

_LANES = 128  # bins a row of the two-level count: the lane width of a TPU's vector and matrix units
_CHUNK_ELEMENTS = 1 << 26  # one-hot elements alive at once in the two-level count (128 MiB in bfloat16)


def cutoff(scores_TE, bias_E, k: int):
    """The score + bias a token's next expert has: the (k+1)-th largest of s + b.

    Args:
        scores_TE: unbiased router scores.
        bias_E: the bias the tokens were routed with.
        k: experts a token, 1 <= k < E.

    Returns:
        alpha_T, float32 or wider.

    Raises:
        ValueError: k is not in 1..E-1; with k = E every expert takes every token, and there is nothing to
            balance.

    Source: spec §6.2.
    """
    E = scores_TE.shape[-1]
    _check(k, E)
    wide = jnp.promote_types(scores_TE.dtype, jnp.float32)
    largest_TS = lax.top_k(scores_TE.astype(wide) + bias_E.astype(wide), k + 1)[0]
    # The least of them instead of the last: XLA turns a top-k of which one column is read into a full sort.
    return jnp.min(largest_TS, axis=-1)


def exact_bias(scores_TE, bias_E, k: int, mask_T=None):
    """One balancing step from every required bias: the reference `histogram` approximates.

    Args:
        scores_TE: unbiased router scores of the whole training step.
        bias_E: the bias these tokens were routed with.
        k: experts a token, 1 <= k < E.
        mask_T: True where a token counts, False for padding; None counts all.

    Returns:
        The new bias_E, mean-centred, in float32 or wider: minus its mean, the order statistic of 0-based rank
        floor(n k / E) of each column of required biases over the n tokens that count. bias_E itself
        when n is 0.

    Raises:
        ValueError: k is not in 1..E-1.

    Source: spec §6.1, §6.2.
    """
    required_TE, bias_E = _required(scores_TE, bias_E, k)
    T, E = required_TE.shape
    if T == 0:
        return bias_E
    if mask_T is None:
        mask_T = jnp.ones((T,), bool)
    n = jnp.sum(mask_T.astype(jnp.int32))
    whole, part = _target(n, k, E)
    rank = jnp.minimum(whole + part // E, T - 1)  # k < E keeps it below n
    ordered_TE = jnp.sort(jnp.where(mask_T[:, None], required_TE, jnp.inf), axis=0)
    raw_E = lax.dynamic_index_in_dim(ordered_TE, rank, 0, keepdims=False)
    return jnp.where(n > 0, raw_E - jnp.mean(raw_E), bias_E)


def histogram(scores_TE, bias_E, k: int, bins: int, mask_T=None):
    """Counts required biases over `bins` equal bins of [min(b) - 1, max(b) + 1].

    Counts of calls that share bias_E add up to the counts of one call over all their tokens, bit for bit.

    Args:
        scores_TE: unbiased router scores of some tokens of the step.
        bias_E: the bias these tokens were routed with.
        k: experts a token, 1 <= k < E.
        bins: number of bins; the new bias is within one bin width, (max(b) - min(b) + 2) / bins, of the exact
            one.
        mask_T: True where a token counts, False for padding; None counts all.

    Returns:
        counts_EX, int32, X = bins; a row sums to the number of tokens that count. No gradient flows through
        it.

    Raises:
        ValueError: k is not in 1..E-1, or bins < 1.

    Source: spec §6.3.
    """
    if bins < 1:
        raise ValueError(f"a histogram needs at least one bin, got {bins}; 1000 is what the model was trained with")
    required_TE, bias_E = _required(scores_TE, bias_E, k)
    low, high = _range(bias_E)
    # Subtractions, then one product: nothing a compiler could contract or rewrite, so the bins are the same
    # in every program. Clipped as floats, because a conversion to integers need not saturate.
    bin_TE = jnp.clip(jnp.floor((required_TE - low) * (bins / (high - low))), 0, bins - 1).astype(jnp.int32)
    if mask_T is None:
        mask_T = jnp.ones(bin_TE.shape[:1], bool)
    mask_T = mask_T.astype(bool)
    # Both give the same integers. A scatter is serial on a TPU; on a CPU it is 15 times faster than the
    # products.
    return lax.platform_dependent(
        bin_TE,
        mask_T,
        tpu=lambda bin_TE, mask_T: _count_by_products(bin_TE, mask_T, bins),
        default=lambda bin_TE, mask_T: _count_by_scatter(bin_TE, mask_T, bins),
    )


def bias_from_histogram(counts_EX, bias_E, k: int):
    """The balancing step from pooled counts: in each row, the point below which n k / E tokens lie.

    Args:
        counts_EX: integers, `histogram` summed over the whole training step (micro-batches and devices).
        bias_E: the bias all of it was collected with.
        k: experts a token, 1 <= k < E.

    Returns:
        The new bias_E, mean-centred, in float32 or wider; bias_E itself when nothing was counted.

    Raises:
        ValueError: k is not in 1..E-1.

    Source: spec §6.3.
    """
    E, bins = counts_EX.shape
    _check(k, E)
    bias_E = bias_E.astype(jnp.promote_types(bias_E.dtype, jnp.float32))
    low, high = _range(bias_E)
    upto_EX = jnp.cumsum(counts_EX, axis=1)
    n_E = upto_EX[:, -1]
    whole_E, part_E = _target(n_E, k, E)
    rank_E = whole_E + (part_E + E - 1) // E  # ceil(n k / E)
    bin_E = jnp.argmax(upto_EX >= rank_E[:, None], axis=1)
    in_bin_E = jnp.take_along_axis(counts_EX, bin_E[:, None], axis=1)[:, 0]
    before_E = jnp.take_along_axis(upto_EX, bin_E[:, None], axis=1)[:, 0] - in_bin_E
    # Integers first: n k / E itself has no room in float32 for the position inside a bin.
    inside_E = (whole_E - before_E).astype(bias_E.dtype) + part_E.astype(bias_E.dtype) / E
    share_E = jnp.clip(inside_E / jnp.maximum(in_bin_E, 1).astype(bias_E.dtype), 0, 1)
    raw_E = low + (bin_E.astype(bias_E.dtype) + share_E) * ((high - low) / bins)
    return jnp.where(n_E > 0, raw_E - jnp.mean(raw_E), bias_E)


def _check(k, E):
    check_top_k(k, E)
    if k == E:
        raise ValueError(f"quantile balancing needs an expert left out, but top-k is {k} of {E}; lower k or use none")


def _required(scores_TE, bias_E, k):
    """Required biases alpha_i - s_ij, and the bias, in float32 or wider and outside autodiff."""
    wide = jnp.promote_types(scores_TE.dtype, jnp.float32)
    scores_TE = lax.stop_gradient(scores_TE.astype(wide))
    bias_E = lax.stop_gradient(bias_E.astype(wide))
    return cutoff(scores_TE, bias_E, k)[:, None] - scores_TE, bias_E


def _range(bias_E):
    return jnp.min(bias_E) - 1, jnp.max(bias_E) + 1


def _target(n, k, E):
    """n k / E as (whole, part) with n k / E = whole + part / E, exact where n * k would overflow."""
    return n // E * k, n % E * k


def _count_by_scatter(bin_TE, mask_T, bins):
    E = bin_TE.shape[1]
    expert_1E = lax.broadcasted_iota(jnp.int32, (1, E), 1)
    return jnp.zeros((E, bins), jnp.int32).at[expert_1E, bin_TE].add(mask_T[:, None].astype(jnp.int32))


def _count_by_products(bin_TE, mask_T, bins):
    """bin = row * lanes + lane; counts of (row, lane) are a product of one-hot matrices, exact in float32."""
    T, E = bin_TE.shape
    rows = -(-bins // _LANES)
    chunk = max(1, min(T, _CHUNK_ELEMENTS // (E * (rows + _LANES)), 1 << 23))
    pad = -T % chunk
    bin_TE = jnp.pad(bin_TE, ((0, pad), (0, 0)))
    mask_T = jnp.pad(mask_T, (0, pad))

    def count(counts_ERL, part):
        bin_TE, mask_T = part
        row_TER = jax.nn.one_hot(bin_TE // _LANES, rows, dtype=jnp.bfloat16) * mask_T[:, None, None]
        lane_TEL = jax.nn.one_hot(bin_TE % _LANES, _LANES, dtype=jnp.bfloat16)
        part_ERL = jnp.einsum("ter,tel->erl", row_TER, lane_TEL, preferred_element_type=jnp.float32)
        return counts_ERL + part_ERL.astype(jnp.int32), None

    parts = bin_TE.reshape(-1, chunk, E), mask_T.reshape(-1, chunk)
    counts_ERL, _ = lax.scan(count, jnp.zeros((E, rows, _LANES), jnp.int32), parts)
    return counts_ERL.reshape(E, rows * _LANES)[:, :bins]
