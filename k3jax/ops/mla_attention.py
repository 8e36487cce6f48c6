"""Softmax attention of multi-head latent attention: causal, within documents, in blocks, no position code."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.precision import exact, wide_dtype


def mla_attention(
    q_nope_BTHK: jax.Array,
    q_rope_BTHP: jax.Array,
    k_nope_BTHK: jax.Array,
    k_rope_BTP: jax.Array,
    v_BTHV: jax.Array,
    *,
    scale: float,
    segment_ids_BT: jax.Array | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """Attends to the tokens of the same document up to the current one; k_rope serves every head.

    o_t = sum_s softmax_s(scale * (q_nope_t . k_nope_s + q_rope_t . k_rope_s)) v_s. Nothing is rotated here.
    Blocks of queries meet blocks of keys under a running softmax and blocks in the future are skipped, so
    memory grows with T * block_size and work is about half of T^2. The gradient computes the weights again from
    the arguments, the output and one log-sum-exp a row. Softmax statistics and sums are float32 or wider;
    narrower arguments are multiplied as they are. Later tokens do not change earlier outputs by a bit.

    Args:
        q_nope_BTHK: [B, T, H, K] queries, T >= 1.
        q_rope_BTHP: [B, T, H, P] the queries' part that meets the shared key.
        k_nope_BTHK: [B, T, H, K] keys.
        k_rope_BTP: [B, T, P] the key part that all heads share.
        v_BTHV: [B, T, H, V] values.
        scale: multiplies the products, once: (K + P)**-0.5 in K3. A Python number.
        segment_ids_BT: int [B, T] documents. Equal neighbours are one document; an id that returns later is
            another one. 0 is padding: output 0, attended by nobody. None: a row is one document.
        block_size: tokens a block; need not divide T. None picks 128, or 256 for T above 1024.

    Returns:
        o_BTHV: [B, T, H, V], float32 or wider whatever the arguments' dtype.

    Raises:
        ValueError: shapes that do not fit, or a block size below 1.

    Source: spec §3, §1.4.
    """
    _check(q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, segment_ids_BT, block_size)
    B, T = v_BTHV.shape[:2]
    block = min(T, block_size or (128 if T <= 1024 else 256))
    arrays = (q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV)
    dtype = jnp.result_type(*arrays)
    start_BT = _document_start(B, T, segment_ids_BT)
    return _attention(*(x.astype(dtype) for x in arrays), start_BT, float(scale), block)


def _check(q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, segment_ids_BT, block_size) -> None:
    if q_nope_BTHK.ndim != 4 or q_rope_BTHP.ndim != 4:
        raise ValueError(
            f"mla_attention: queries must be [B, T, H, K] and [B, T, H, P], got {q_nope_BTHK.shape} "
            f"and {q_rope_BTHP.shape}"
        )
    B, T, H, K = q_nope_BTHK.shape
    P = q_rope_BTHP.shape[-1]
    for name, array, shape in (
        ("q_rope", q_rope_BTHP, (B, T, H, P)),
        ("k_nope", k_nope_BTHK, (B, T, H, K)),
        ("k_rope", k_rope_BTP, (B, T, P)),
        ("v", v_BTHV, (B, T, H, v_BTHV.shape[-1])),
        ("segment_ids", segment_ids_BT, (B, T)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"mla_attention: {name} must be {shape} to fit q_nope, got {array.shape}")
    if T < 1:
        raise ValueError("mla_attention: no tokens; T must be at least 1")
    if block_size is not None and block_size < 1:
        raise ValueError(f"mla_attention: block_size must be at least 1, got {block_size}")


def _document_start(B, T, segment_ids_BT):
    """Position where each token's document starts: the keys of query t are start_t..t. T, so no key, for padding."""
    if segment_ids_BT is None:
        return jnp.zeros((B, T), jnp.int32)
    changed_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    changed_BT = jnp.pad(changed_BT, ((0, 0), (1, 0)), constant_values=True)
    start_BT = lax.cummax(jnp.where(changed_BT, jnp.arange(T, dtype=jnp.int32), 0), axis=1)
    return jnp.where(segment_ids_BT == 0, T, start_BT)


def _dot(spec, a, b):
    return jnp.einsum(spec, a, b, precision=exact(a.dtype), preferred_element_type=wide_dtype(a.dtype))


# C is a block of tokens and N the number of blocks.


class _Blocks(NamedTuple):
    q_NBHCK: jax.Array
    k_NBHCK: jax.Array
    v_NBHCV: jax.Array
    start_NBC: jax.Array


def _block(x_BTHX, C):
    """[B, T, H, X] -> [N, B, H, C, X], with zeros past the end."""
    B, T, H, X = x_BTHX.shape
    N = -(-T // C)
    x_BTHX = jnp.pad(x_BTHX, ((0, 0), (0, N * C - T), (0, 0), (0, 0)))
    return x_BTHX.reshape(B, N, C, H, X).transpose(1, 0, 3, 2, 4)


def _unblock(x_NBHCX, T):
    N, B, H, C, X = x_NBHCX.shape
    return x_NBHCX.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, X)[:, :T]


def _prepare(q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, start_BT, C) -> _Blocks:
    # Repeating k_rope for each head costs P / K of a copy that is made anyway; a product of its own for it would
    # cost one more pass over every block of scores.
    k_rope_BTHP = jnp.broadcast_to(k_rope_BTP[:, :, None], q_rope_BTHP.shape)
    q_NBHCK = _block(jnp.concatenate([q_nope_BTHK, q_rope_BTHP], -1), C)
    k_NBHCK = _block(jnp.concatenate([k_nope_BTHK, k_rope_BTHP], -1), C)
    (B, T), N = start_BT.shape, q_NBHCK.shape[0]
    start_BT = jnp.pad(start_BT, ((0, 0), (0, N * C - T)), constant_values=N * C)
    return _Blocks(q_NBHCK, k_NBHCK, _block(v_BTHV, C), start_BT.reshape(B, N, C).transpose(1, 0, 2))


def _scores(q_BHCK, k_BHCK, start_BC, i, j, scale):
    """Scaled products of query block i with key block j, -inf where the query may not look."""
    C = q_BHCK.shape[2]
    s_BHCC = _dot("bhqk,bhsk->bhqs", q_BHCK, k_BHCK)
    query_C, key_C = (n * C + jnp.arange(C, dtype=jnp.int32) for n in (i, j))
    seen_BCC = (key_C <= query_C[:, None]) & (key_C >= start_BC[:, :, None])
    return jnp.where(seen_BCC[:, None], s_BHCC * jnp.asarray(scale, s_BHCC.dtype), -jnp.inf)


def _forward(q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, start_BT, scale, C):
    arguments = (q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, start_BT)
    blocks = _prepare(*arguments, C)
    N, B, H, C, V = blocks.v_NBHCV.shape
    wide = wide_dtype(v_BTHV.dtype)

    def query_block(_, xs):
        i, q_BHCK, start_BC = xs

        def key_block(j, carry):
            top_BHC, total_BHC, o_BHCV = carry
            v_BHCV = blocks.v_NBHCV[j]
            s_BHCC = _scores(q_BHCK, blocks.k_NBHCK[j], start_BC, i, j, scale)
            new_BHC = jnp.maximum(top_BHC, jnp.max(s_BHCC, axis=-1))
            # A row that has seen no key yet has no maximum; anything finite makes its exponentials 0, not NaN.
            base_BHC = jnp.where(new_BHC == -jnp.inf, 0, new_BHC)
            p_BHCC = jnp.exp(s_BHCC - base_BHC[..., None])
            shrink_BHC = jnp.exp(top_BHC - base_BHC)
            total_BHC = total_BHC * shrink_BHC + jnp.sum(p_BHCC, axis=-1)
            o_BHCV = o_BHCV * shrink_BHC[..., None]
            o_BHCV += _dot("bhqs,bhsv->bhqv", p_BHCC.astype(v_BHCV.dtype), v_BHCV)
            return new_BHC, total_BHC, o_BHCV

        start = (jnp.full((B, H, C), -jnp.inf, wide), jnp.zeros((B, H, C), wide))
        top_BHC, total_BHC, o_BHCV = lax.fori_loop(0, i + 1, key_block, (*start, jnp.zeros((B, H, C, V), wide)))
        o_BHCV /= jnp.where(total_BHC == 0, 1, total_BHC)[..., None]
        # +inf makes the weights of a row without keys exactly 0 in the backward pass.
        return None, (o_BHCV, jnp.where(total_BHC == 0, jnp.inf, top_BHC + jnp.log(total_BHC)))

    xs = (jnp.arange(N), blocks.q_NBHCK, blocks.start_NBC)
    _, (o_NBHCV, logsumexp_NBHC) = lax.scan(query_block, None, xs)
    o_BTHV = _unblock(o_NBHCV, v_BTHV.shape[1])
    return o_BTHV, (*arguments, o_BTHV, logsumexp_NBHC)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, start_BT, scale, C):
    return _forward(q_nope_BTHK, q_rope_BTHP, k_nope_BTHK, k_rope_BTP, v_BTHV, start_BT, scale, C)[0]


def _backward(scale, C, saved, do_BTHV):
    *arguments, o_BTHV, logsumexp_NBHC = saved
    blocks = _prepare(*arguments, C)
    dtype, wide = blocks.q_NBHCK.dtype, o_BTHV.dtype
    T, K = o_BTHV.shape[1], arguments[0].shape[-1]
    # What is subtracted from p . do has to be the mean of exactly that: do is rounded before, o is not rounded.
    do_BTHV = do_BTHV.astype(dtype)
    mean_BTH1 = jnp.sum(do_BTHV.astype(wide) * o_BTHV, axis=-1, keepdims=True)

    def query_block(carry, xs):
        i, q_BHCK, start_BC, do_BHCV, logsumexp_BHC, mean_BHC1 = xs

        def key_block(j, carry):
            dq_BHCK, dk_NBHCK, dv_NBHCV = carry
            k_BHCK = blocks.k_NBHCK[j]
            s_BHCC = _scores(q_BHCK, k_BHCK, start_BC, i, j, scale)
            p_BHCC = jnp.exp(s_BHCC - logsumexp_BHC[..., None])
            dp_BHCC = _dot("bhqv,bhsv->bhqs", do_BHCV, blocks.v_NBHCV[j])
            ds_BHCC = (p_BHCC * (dp_BHCC - mean_BHC1) * jnp.asarray(scale, wide)).astype(dtype)
            dq_BHCK += _dot("bhqs,bhsk->bhqk", ds_BHCC, k_BHCK)
            dk_NBHCK = dk_NBHCK.at[j].add(_dot("bhqs,bhqk->bhsk", ds_BHCC, q_BHCK))
            dv_NBHCV = dv_NBHCV.at[j].add(_dot("bhqs,bhqv->bhsv", p_BHCC.astype(dtype), do_BHCV))
            return dq_BHCK, dk_NBHCK, dv_NBHCV

        dq_BHCK = jnp.zeros(q_BHCK.shape, wide)
        dq_BHCK, *carry = lax.fori_loop(0, i + 1, key_block, (dq_BHCK, *carry))
        return tuple(carry), dq_BHCK

    N = blocks.q_NBHCK.shape[0]
    xs = (jnp.arange(N), blocks.q_NBHCK, blocks.start_NBC, _block(do_BTHV, C), logsumexp_NBHC)
    zeros = tuple(jnp.zeros(x.shape, wide) for x in (blocks.k_NBHCK, blocks.v_NBHCV))
    (dk_NBHCK, dv_NBHCV), dq_NBHCK = lax.scan(query_block, zeros, (*xs, _block(mean_BTH1, C)))
    dq, dk, dv = (_unblock(x, T) for x in (dq_NBHCK, dk_NBHCK, dv_NBHCV))
    grads = (dq[..., :K], dq[..., K:], dk[..., :K], jnp.sum(dk[..., K:], axis=2), dv)
    return (*(x.astype(dtype) for x in grads), None)


_attention.defvjp(_forward, _backward)
