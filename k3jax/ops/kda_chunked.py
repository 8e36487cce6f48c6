"""KDA chunk by chunk: matrix products inside chunks, a short scan between them, and a hand-written gradient.

With S the state entering a chunk, E the decay from the chunk's start to each row, F from each row to the
chunk's end (spec §2.4):

    X  = V - (K E) S                  each token's value less what S predicts for its key
    V' = (I + beta Akk)^-1 beta X     what each token writes, its neighbours' writes taken into account
    O  = s (Q E) S + Aqk V'
    S+ = E_C S + (K F)^T V'

Everything without S is computed for all chunks at once; the scan carries S. Documents that begin inside a
chunk are cut with 0/1 masks on E, F and the scores, never with an infinite decay, so gradients stop at
boundaries and stay finite.

Letters beyond design: arrays are [N, B, J, C, ...] inside this file; two-letter suffixes CK, CV, CC name
their last dimensions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.kda_halving import (
    Decays,
    Scores,
    log_decay_gradient,
    matmul,
    pair_scores,
    pair_scores_gradient,
    pairwise_decays,
    transposed,
    unit_lower_inverse,
)


class Chunks(NamedTuple):
    """The inputs cut in chunks and cast to the dtype of the arithmetic; q scaled, q and k repeated over
    grouped value heads."""

    q_CK: jax.Array
    k_CK: jax.Array
    v_CV: jax.Array
    g_CK: jax.Array
    beta_C: jax.Array


class Masks(NamedTuple):
    """1 where a document continues, 0 where a new one has begun in between."""

    from_start_C: jax.Array  # from the previous chunk's last token to the row
    to_end_C: jax.Array  # from the row to the chunk's last token
    whole: jax.Array  # from the previous chunk's last token to the chunk's last token
    pair_CC: jax.Array  # from the column to the row


class Intra(NamedTuple):
    """What a chunk contributes without knowing the state that enters it."""

    decays: Decays
    qk_CC: jax.Array
    kk_CC: jax.Array
    inverse_CC: jax.Array
    q_start_CK: jax.Array  # Q E, reads the entering state
    k_start_CK: jax.Array  # K E
    k_end_CK: jax.Array  # K F, writes to the leaving state


def chunked(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size):
    """KDA in chunks of a power of two of tokens; arguments and results as for `kda_recurrent.recurrent`.

    Reverse mode saves the inputs and the state entering each chunk, nothing else.

    Source: spec §2.4, §2.6.
    """
    return _chunked(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chunked(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size):
    return _forward(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size)[0]


def _forward(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size):
    chunks = cut(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV.dtype, scale, chunk_size)
    intra = intra_chunk(chunks, document_masks(run_BT, chunk_size))
    K = intra.k_end_CK.shape[-1]
    reads_XK = jnp.concatenate([intra.k_start_CK, intra.q_start_CK], axis=-2)
    writes_XC = jnp.concatenate([transposed(intra.k_end_CK), intra.qk_CC], axis=-2)
    solve_CC = intra.inverse_CC * chunks.beta_C[..., None, :]

    def chunk(state_KV, inputs):
        reads_XK, writes_XC, solve_CC, v_CV, decay_K = inputs
        read_XV = matmul(reads_XK, state_KV)
        added_CV = matmul(solve_CC, v_CV - read_XV[..., :chunk_size, :])
        written_XV = matmul(writes_XC, added_CV)
        o_CV = read_XV[..., chunk_size:, :] + written_XV[..., K:, :]
        return decay_K[..., None] * state_KV + written_XV[..., :K, :], (o_CV, state_KV)

    inputs = reads_XK, writes_XC, solve_CC, chunks.v_CV, intra.decays.whole
    final_state_BJKV, (o_CV, states_KV) = jax.lax.scan(chunk, state_BJKV, inputs)
    o_BTJV = uncut(o_CV, v_BTJV.shape[1])
    residuals = q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, run_BT, states_KV
    return (o_BTJV, final_state_BJKV), residuals


def _backward(scale, chunk_size, residuals, cotangents):
    q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, run_BT, states_KV = residuals
    do_BTJV, dfinal_state_BJKV = cotangents
    T, dtype = v_BTJV.shape[1], states_KV.dtype
    masks = document_masks(run_BT, chunk_size)
    chunks = cut(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, dtype, scale, chunk_size)
    do_CV = cut_time(do_BTJV.astype(dtype), chunk_size)
    intra = intra_chunk(chunks, masks)
    decays, beta_C1 = intra.decays, chunks.beta_C[..., None]
    expected_CV = chunks.v_CV - matmul(intra.k_start_CK, states_KV)
    added_CV = matmul(intra.inverse_CC, beta_C1 * expected_CV)

    # Last chunk to first: d_solved is the gradient of beta X, d_state that of the state leaving the chunk.
    reads_XK = jnp.concatenate([intra.q_start_CK, -beta_C1 * intra.k_start_CK], axis=-2)
    d_added_CV = matmul(transposed(intra.qk_CC), do_CV)

    def chunk(d_state_KV, inputs):
        reads_XK, k_end_CK, inverse_CC, do_CV, d_added_CV, decay_K = inputs
        d_added_CV = d_added_CV + matmul(k_end_CK, d_state_KV)
        d_solved_CV = matmul(transposed(inverse_CC), d_added_CV)
        d_reads_XV = jnp.concatenate([do_CV, d_solved_CV], axis=-2)
        d_entering_KV = decay_K[..., None] * d_state_KV + matmul(transposed(reads_XK), d_reads_XV)
        return d_entering_KV, (d_solved_CV, d_state_KV)

    inputs = reads_XK, intra.k_end_CK, intra.inverse_CC, do_CV, d_added_CV, decays.whole
    d_state_BJKV, (d_solved_CV, d_states_KV) = jax.lax.scan(chunk, dfinal_state_BJKV, inputs, reverse=True)

    d_v_CV = beta_C1 * d_solved_CV
    d_reads_XK = matmul(jnp.concatenate([do_CV, -d_v_CV], axis=-2), transposed(states_KV))
    d_q_start_CK, d_k_start_CK = d_reads_XK[..., :chunk_size, :], d_reads_XK[..., chunk_size:, :]
    d_k_end_CK = matmul(added_CV, transposed(d_states_KV))
    d_whole_K = decays.whole * jnp.sum(states_KV * d_states_KV, axis=-1)

    d_scores_XC = matmul(jnp.concatenate([do_CV, d_solved_CV], axis=-2), transposed(added_CV))
    d_qk_CC = jnp.tril(d_scores_XC[..., :chunk_size, :])
    d_kk_CC = -jnp.tril(d_scores_XC[..., chunk_size:, :], -1)
    if masks is not None:
        d_qk_CC, d_kk_CC = masks.pair_CC * d_qk_CC, masks.pair_CC * d_kk_CC
    d_beta_C = jnp.sum(d_solved_CV * expected_CV, axis=-1) + jnp.sum(d_kk_CC * intra.kk_CC, axis=-1)
    d_scores = Scores(d_qk_CC, beta_C1 * d_kk_CC)
    dq_CK, dk_CK, d_levels = pair_scores_gradient(d_scores, chunks.q_CK, chunks.k_CK, decays)

    from_start, to_end = masked_decays(decays, masks)
    dq_CK += d_q_start_CK * from_start
    dk_CK += d_k_start_CK * from_start + d_k_end_CK * to_end
    d_from_start_CK = d_q_start_CK * intra.q_start_CK + d_k_start_CK * intra.k_start_CK
    dg_CK = log_decay_gradient(d_levels, d_from_start_CK, d_k_end_CK * intra.k_end_CK, d_whole_K)

    H = q_BTHK.shape[2]
    dq_BTHK, dk_BTHK = (sum_groups(uncut(x, T), H) for x in (scale * dq_CK, dk_CK))
    grads = dq_BTHK, dk_BTHK, uncut(d_v_CV, T), uncut(dg_CK, T), uncut(d_beta_C[..., None], T)[..., 0]
    primals = q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ
    return (*(grad.astype(x.dtype) for grad, x in zip(grads, primals, strict=True)), d_state_BJKV, None)


_chunked.defvjp(_forward, _backward)


def intra_chunk(chunks: Chunks, masks: Masks | None) -> Intra:
    decays = pairwise_decays(chunks.g_CK)
    scores = pair_scores(chunks.q_CK, chunks.k_CK, decays)
    from_start, to_end = masked_decays(decays, masks)
    if masks is not None:
        scores = Scores(masks.pair_CC * scores.qk, masks.pair_CC * scores.kk)
        decays = decays._replace(whole=masks.whole * decays.whole)
    inverse_CC = unit_lower_inverse(chunks.beta_C[..., None] * scores.kk)
    return Intra(
        decays,
        scores.qk,
        scores.kk,
        inverse_CC,
        chunks.q_CK * from_start,
        chunks.k_CK * from_start,
        chunks.k_CK * to_end,
    )


def masked_decays(decays: Decays, masks: Masks | None):
    if masks is None:
        return decays.from_start, decays.to_end
    return masks.from_start_C[..., None] * decays.from_start, masks.to_end_C[..., None] * decays.to_end


def document_masks(run_BT, chunk_size) -> Masks | None:
    """Masks from the number of each token's document (never falling along time), or None for one document a
    row."""
    if run_BT is None:
        return None
    run_BT = jnp.pad(run_BT, [(0, 0), (0, -run_BT.shape[1] % chunk_size)], mode="edge")
    run_C = jnp.moveaxis(run_BT.reshape(run_BT.shape[0], -1, chunk_size), 1, 0)[:, :, None]  # [N, B, 1, C]
    last = run_C[..., -1:]
    before = jnp.pad(last[:-1], [(1, 0), (0, 0), (0, 0), (0, 0)])  # the first document's number is 0
    masks = Masks(run_C == before, run_C == last, last == before, run_C[..., :, None] == run_C[..., None, :])
    return jax.tree.map(lambda x: x.astype(jnp.float32), masks)


def cut(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, dtype, scale, chunk_size) -> Chunks:
    groups = v_BTJV.shape[2] // q_BTHK.shape[2]
    q_CK, k_CK, v_CV, g_CK, beta_C1 = (
        cut_time(x.astype(dtype), chunk_size) for x in (q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ[..., None])
    )
    q_CK, k_CK = jnp.repeat(scale * q_CK, groups, axis=2), jnp.repeat(k_CK, groups, axis=2)
    # Sums of g must stay finite; exp is 0 long before this floor, in float64 too.
    return Chunks(q_CK, k_CK, v_CV, jnp.maximum(g_CK, -1e6), beta_C1[..., 0])


def cut_time(x_BTJX, chunk_size):
    """[B, T, J, X] -> [N, B, J, C, X]; the last chunk is filled with zeros, which KDA's tokens of k = beta =
    g = 0 ignore."""
    B, T, J, X = x_BTJX.shape
    x_BTJX = jnp.pad(x_BTJX, [(0, 0), (0, -T % chunk_size), (0, 0), (0, 0)])
    return x_BTJX.reshape(B, -1, chunk_size, J, X).transpose(1, 0, 3, 2, 4)


def uncut(x_NBJCX, T):
    """Inverse of `cut_time`."""
    N, B, J, C, X = x_NBJCX.shape
    return x_NBJCX.transpose(1, 0, 3, 2, 4).reshape(B, N * C, J, X)[:, :T]


def sum_groups(x_BTJK, H):
    """Sum over the value heads that share a query/key head."""
    B, T, J, K = x_BTJK.shape
    return x_BTJK if J == H else x_BTJK.reshape(B, T, H, J // H, K).sum(axis=3)
