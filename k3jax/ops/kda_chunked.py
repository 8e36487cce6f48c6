"""KDA chunk by chunk: matrix products inside chunks, a short scan between them, and a hand-written gradient.

With S the state entering a chunk, E the decay from the chunk's start to each row, F from each row to the chunk's end
(spec §2.4):

    X  = V - (K E) S                  each token's value less what S predicts for its key
    V' = (I + beta Akk)^-1 beta X     what each token writes, its neighbours' writes taken into account
    O  = s (Q E) S + Aqk V'
    S+ = E_C S + (K F)^T V'

Everything without S is computed for a group of chunks at once; a scan inside the group carries S. Documents that begin
inside a chunk are cut with 0/1 masks on E, F and the scores, never with an infinite decay, so gradients stop at
boundaries and stay finite.

Letters beyond design: X any channel, or rows of two kinds one above the other. Inside a group arrays are [N, B, J, ...]
and suffixes name the dimensions after those: CK, CV, CC, KV, C.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.kda_halving import (
    Decays,
    log_decay_gradient,
    matmul,
    matmul_nt,
    matmul_tn,
    pair_scores,
    pair_scores_gradient,
    pairwise_decays,
    row_sums,
    unit_lower_inverse,
)

# Chunks are worked on in groups of about this many elements of q: large enough that products are worth their launch,
# small enough that temporaries stay in the cache and add little to the memory of the inputs. 2**18 makes the gradient
# 1.4 times slower on CPU, 2**20 1.8 times.
GROUP_ELEMENTS = 2**16


class Inputs(NamedTuple):
    q_BTHK: jax.Array
    k_BTHK: jax.Array
    v_BTJV: jax.Array
    g_BTJK: jax.Array
    beta_BTJ: jax.Array


class Sizes(NamedTuple):
    """What is static: T = groups * group * chunk."""

    scale: float
    chunk: int  # tokens a chunk
    group: int  # chunks a group
    groups: int

    def piece(self, arrays_BT, i):
        """Group i of the tokens of one or more arrays."""
        tokens = self.group * self.chunk
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * tokens, tokens, axis=1), arrays_BT)

    def whole(self, pieces):
        """[groups, B, tokens of a group, ...] -> [B, T, ...]."""
        B_first = jnp.moveaxis(pieces, 0, 1)
        return B_first.reshape(B_first.shape[0], -1, *B_first.shape[3:])


class Chunks(NamedTuple):
    """The inputs in chunks and in the dtype of the arithmetic; q scaled, q and k repeated over grouped value heads."""

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
    """KDA in chunks of a power of two of tokens; takes and gives what `kda_recurrent.recurrent` does, o in v's dtype.

    Reverse mode saves the inputs and the state entering each chunk, nothing else.

    Args:
        q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ: as `kda` takes them, padding tokens already inert (zeros).
        state_BJKV: initial state; its dtype is the dtype of all arithmetic.
        run_BT: int32 number of the document a token belongs to, or None for one document a row.
        scale: multiplies q.
        chunk_size: tokens a chunk, a power of two.

    Returns:
        o_BTJV in v's dtype and the final state_BJKV in the state's.

    Source: spec §2.4, §2.6.
    """
    B, T, J, V = v_BTJV.shape
    chunk_size = min(chunk_size, 1 << (T - 1).bit_length())
    chunks = -(-T // chunk_size)
    group = max(1, GROUP_ELEMENTS // (B * J * chunk_size * max(q_BTHK.shape[-1], V)))
    groups = -(-chunks // group)
    group = -(-chunks // groups)

    def padded(x_BT, **mode):
        padding = groups * group * chunk_size - T
        return jnp.pad(x_BT, [(0, 0), (0, padding)] + [(0, 0)] * (x_BT.ndim - 2), **mode)

    inputs = Inputs(*(padded(x) for x in (q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ)))
    if run_BT is not None:
        run_BT = padded(run_BT, mode="edge")
    o_BTJV, final_state_BJKV = _chunked(inputs, state_BJKV, run_BT, Sizes(scale, chunk_size, group, groups))
    return o_BTJV[:, :T], final_state_BJKV


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(inputs: Inputs, state_BJKV, run_BT, sizes: Sizes):
    return _forward(inputs, state_BJKV, run_BT, sizes)[0]


def _forward(inputs: Inputs, state_BJKV, run_BT, sizes: Sizes):
    C = sizes.chunk

    def group(state_KV, i):
        chunks = cut(sizes.piece(inputs, i), state_KV.dtype, sizes)
        intra = intra_chunk(chunks, document_masks(run_BT, i, sizes))
        reads_XK = jnp.concatenate([intra.k_start_CK, intra.q_start_CK], axis=-2)
        solve_CC = intra.inverse_CC * chunks.beta_C[..., None, :]

        def chunk(state_KV, x):
            reads_XK, k_end_CK, solve_CC, v_CV, decay_K = x
            read_XV = matmul(reads_XK, state_KV)
            added_CV = matmul(solve_CC, v_CV - read_XV[..., :C, :])
            leaving_KV = decay_K[..., None] * state_KV + matmul_tn(k_end_CK, added_CV)
            return leaving_KV, (read_XV[..., C:, :], added_CV, state_KV)

        xs = reads_XK, intra.k_end_CK, solve_CC, chunks.v_CV, intra.decays.whole
        state_KV, (read_CV, added_CV, states_KV) = jax.lax.scan(chunk, state_KV, xs)
        o_BTJV = uncut(read_CV + matmul(intra.qk_CC, added_CV))
        return state_KV, (o_BTJV.astype(inputs.v_BTJV.dtype), states_KV)

    final_state_BJKV, (o, states_KV) = jax.lax.scan(group, state_BJKV, jnp.arange(sizes.groups))
    return (sizes.whole(o), final_state_BJKV), (inputs, run_BT, states_KV)


def _backward(sizes: Sizes, residuals, cotangents):
    inputs, run_BT, states_KV = residuals
    do_BTJV, dfinal_state_BJKV = cotangents

    def group(d_state_KV, x):
        i, states_KV = x
        piece = sizes.piece(inputs, i)
        chunks = cut(piece, states_KV.dtype, sizes)
        do_CV = cut_time(sizes.piece(do_BTJV, i).astype(states_KV.dtype), sizes.chunk)
        masks = document_masks(run_BT, i, sizes)
        d_chunks, d_state_KV = chunks_gradient(chunks, masks, states_KV, do_CV, d_state_KV)
        H = piece.q_BTHK.shape[2]
        grads = Inputs(
            sum_heads(uncut(sizes.scale * d_chunks.q_CK), H),
            sum_heads(uncut(d_chunks.k_CK), H),
            uncut(d_chunks.v_CV),
            uncut(d_chunks.g_CK),
            uncut(d_chunks.beta_C[..., None])[..., 0],
        )
        return d_state_KV, jax.tree.map(lambda grad, x: grad.astype(x.dtype), grads, piece)

    xs = jnp.arange(sizes.groups), states_KV
    d_state_BJKV, grads = jax.lax.scan(group, dfinal_state_BJKV, xs, reverse=True)
    return jax.tree.map(sizes.whole, grads), d_state_BJKV, None


_chunked.defvjp(_forward, _backward)


def intra_chunk(chunks: Chunks, masks: Masks | None) -> Intra:
    decays = pairwise_decays(chunks.g_CK)
    scores_2CC = pair_scores(chunks.q_CK, chunks.k_CK, decays)
    from_start, to_end = masked_decays(decays, masks)
    if masks is not None:
        scores_2CC = masks.pair_CC[..., None, :, :] * scores_2CC
        decays = decays._replace(whole=masks.whole * decays.whole)
    qk_CC, kk_CC = scores_2CC[..., 0, :, :], scores_2CC[..., 1, :, :]
    inverse_CC = unit_lower_inverse(chunks.beta_C[..., None] * kk_CC)
    return Intra(
        decays,
        qk_CC,
        kk_CC,
        inverse_CC,
        chunks.q_CK * from_start,
        chunks.k_CK * from_start,
        chunks.k_CK * to_end,
    )


def masked_decays(decays: Decays, masks: Masks | None):
    if masks is None:
        return decays.from_start, decays.to_end
    return masks.from_start_C[..., None] * decays.from_start, masks.to_end_C[..., None] * decays.to_end


def document_masks(run_BT, i, sizes: Sizes) -> Masks | None:
    """Masks of group i from the number of each token's document (0 first), or None for one document a row."""
    if run_BT is None:
        return None
    before = jnp.pad(run_BT, [(0, 0), (1, 0)])  # the run of the token before: the first document's number is 0
    run_C, before_C = (
        cut_time(sizes.piece(x, i)[..., None, None], sizes.chunk)[..., 0] for x in (run_BT, before[:, :-1])
    )
    last, before = run_C[..., -1:], before_C[..., :1]
    masks = Masks(run_C == before, run_C == last, last == before, run_C[..., :, None] == run_C[..., None, :])
    return jax.tree.map(lambda x: x.astype(jnp.float32), masks)


def cut(inputs: Inputs, dtype, sizes: Sizes) -> Chunks:
    heads = inputs.v_BTJV.shape[2] // inputs.q_BTHK.shape[2]
    inputs = inputs._replace(beta_BTJ=inputs.beta_BTJ[..., None])
    q_CK, k_CK, v_CV, g_CK, beta_C1 = (cut_time(x.astype(dtype), sizes.chunk) for x in inputs)
    q_CK, k_CK = jnp.repeat(sizes.scale * q_CK, heads, axis=2), jnp.repeat(k_CK, heads, axis=2)
    # Sums of g must stay finite; exp is 0 long before this floor, in float64 too.
    return Chunks(q_CK, k_CK, v_CV, jnp.maximum(g_CK, -1e6), beta_C1[..., 0])


def cut_time(x_BTJX, chunk_size):
    """[B, T, J, X] -> [N, B, J, C, X]."""
    B, _, J, X = x_BTJX.shape
    return x_BTJX.reshape(B, -1, chunk_size, J, X).transpose(1, 0, 3, 2, 4)


def uncut(x_NBJCX):
    """Inverse of `cut_time`."""
    N, B, J, C, X = x_NBJCX.shape
    return x_NBJCX.transpose(1, 0, 3, 2, 4).reshape(B, N * C, J, X)


def sum_heads(x_BTJK, H):
    """Sum over the value heads that share a query/key head."""
    B, T, J, K = x_BTJK.shape
    return x_BTJK if J == H else x_BTJK.reshape(B, T, H, J // H, K).sum(axis=3)


def chunks_gradient(chunks: Chunks, masks: Masks | None, states_KV, do_CV, d_state_KV):
    """Gradients of a group of chunks and of the state before it, from those of its outputs and the state after it."""
    C = do_CV.shape[-2]
    intra = intra_chunk(chunks, masks)
    decays, beta_C1 = intra.decays, chunks.beta_C[..., None]
    expected_CV = chunks.v_CV - matmul(intra.k_start_CK, states_KV)
    added_CV = matmul(intra.inverse_CC, beta_C1 * expected_CV)

    # Last chunk to first: d_solved is the gradient of beta X, d_state that of the state leaving the chunk.
    reads_XK = jnp.concatenate([intra.q_start_CK, -beta_C1 * intra.k_start_CK], axis=-2)
    d_added_CV = matmul_tn(intra.qk_CC, do_CV)

    def chunk(d_state_KV, x):
        reads_XK, k_end_CK, inverse_CC, do_CV, d_added_CV, decay_K = x
        d_added_CV = d_added_CV + matmul(k_end_CK, d_state_KV)
        d_solved_CV = matmul_tn(inverse_CC, d_added_CV)
        d_reads_XV = jnp.concatenate([do_CV, d_solved_CV], axis=-2)
        d_entering_KV = decay_K[..., None] * d_state_KV + matmul_tn(reads_XK, d_reads_XV)
        return d_entering_KV, (d_solved_CV, d_state_KV)

    xs = reads_XK, intra.k_end_CK, intra.inverse_CC, do_CV, d_added_CV, decays.whole
    d_state_KV, (d_solved_CV, d_states_KV) = jax.lax.scan(chunk, d_state_KV, xs, reverse=True)

    d_v_CV = beta_C1 * d_solved_CV
    d_reads_XK = matmul_nt(jnp.concatenate([do_CV, -d_v_CV], axis=-2), states_KV)
    d_q_start_CK, d_k_start_CK = d_reads_XK[..., :C, :], d_reads_XK[..., C:, :]
    d_k_end_CK = matmul_nt(added_CV, d_states_KV)
    d_whole_K = decays.whole * row_sums(states_KV * d_states_KV)

    d_scores_XC = matmul_nt(jnp.concatenate([do_CV, d_solved_CV], axis=-2), added_CV)
    d_qk_CC = jnp.tril(d_scores_XC[..., :C, :])
    d_kk_CC = -jnp.tril(d_scores_XC[..., C:, :], -1)
    if masks is not None:
        d_qk_CC, d_kk_CC = masks.pair_CC * d_qk_CC, masks.pair_CC * d_kk_CC
    d_beta_C = row_sums(d_solved_CV * expected_CV) + row_sums(d_kk_CC * intra.kk_CC)
    d_scores_2CC = jnp.stack([d_qk_CC, beta_C1 * d_kk_CC], axis=-3)
    dq_CK, dk_CK, d_levels = pair_scores_gradient(d_scores_2CC, chunks.q_CK, chunks.k_CK, decays)

    from_start, to_end = masked_decays(decays, masks)
    dq_CK += d_q_start_CK * from_start
    dk_CK += d_k_start_CK * from_start + d_k_end_CK * to_end
    d_from_start_CK = d_q_start_CK * intra.q_start_CK + d_k_start_CK * intra.k_start_CK
    d_logs = Decays(d_levels, d_from_start_CK, d_k_end_CK * intra.k_end_CK, d_whole_K)
    return Chunks(dq_CK, dk_CK, d_v_CV, log_decay_gradient(d_logs), d_beta_C), d_state_KV
