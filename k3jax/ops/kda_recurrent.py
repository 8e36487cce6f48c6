"""KDA token by token: the recurrence of spec §2.3 as it is written, and the reference for every other
form."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def token_update(q_BJK, k_BJK, v_BJV, g_BJK, beta_BJ, state_BJKV, scale):
    """One token of one step: (o_BJV, state_BJKV). Forgets first, then writes the prediction error, then
    reads."""
    state_BJKV = jnp.exp(g_BJK)[..., None] * state_BJKV
    predicted_BJV = jnp.einsum("bjk,bjkv->bjv", k_BJK, state_BJKV, precision=HIGHEST)
    write_BJV = beta_BJ[..., None] * (v_BJV - predicted_BJV)
    state_BJKV = state_BJKV + k_BJK[..., None] * write_BJV[..., None, :]
    return jnp.einsum("bjk,bjkv->bjv", scale * q_BJK, state_BJKV, precision=HIGHEST), state_BJKV


def recurrent(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size):
    """KDA by lax.scan over tokens; gradients by autodiff.

    The scan is nested, chunks outside and tokens inside a jax.checkpoint, so that reverse mode keeps one
    state a chunk and one state a token of the chunk it is working on: memory grows with T / chunk_size +
    chunk_size states, not with T of them.

    Args:
        q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ: as `kda` takes them, padding tokens already inert (zeros).
        state_BJKV: initial state; its dtype is the dtype of all arithmetic.
        run_BT: int32 number of the document a token belongs to, or None for one document a row; the state is
          zeroed where it grows.
        scale: multiplies q.
        chunk_size: tokens of the inner scan.

    Returns:
        o_BTJV and the final state_BJKV, both in the state's dtype.

    Source: spec §2.3.
    """
    dtype, T = state_BJKV.dtype, v_BTJV.shape[1]
    groups = v_BTJV.shape[2] // q_BTHK.shape[2]
    chunk_size = min(chunk_size, T)
    padding = -T % chunk_size
    if run_BT is None:
        reset_BT = None
    else:
        reset_BT = jnp.diff(run_BT, axis=1, prepend=0) != 0

    def in_chunks(x_BT):
        x_BT = jnp.pad(x_BT, [(0, 0), (0, padding)] + [(0, 0)] * (x_BT.ndim - 2))
        x_TB = jnp.moveaxis(x_BT, 1, 0)
        return x_TB.reshape(-1, chunk_size, *x_TB.shape[1:])

    def token(state_BJKV, inputs):
        q_BHK, k_BHK, v_BJV, g_BJK, beta_BJ, reset_B = inputs
        if reset_B is not None:
            state_BJKV = jnp.where(reset_B[:, None, None, None], 0, state_BJKV)
        q_BJK, k_BJK = (jnp.repeat(x.astype(dtype), groups, axis=1) for x in (q_BHK, k_BHK))
        v_BJV, g_BJK, beta_BJ = v_BJV.astype(dtype), g_BJK.astype(dtype), beta_BJ.astype(dtype)
        o_BJV, state_BJKV = token_update(q_BJK, k_BJK, v_BJV, g_BJK, beta_BJ, state_BJKV, scale)
        return state_BJKV, o_BJV

    @jax.checkpoint
    def chunk(state_BJKV, inputs):
        return jax.lax.scan(token, state_BJKV, inputs)

    inputs = jax.tree.map(in_chunks, (q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, reset_BT))
    state_BJKV, o = jax.lax.scan(chunk, state_BJKV, inputs)
    o_BTJV = jnp.moveaxis(o.reshape(-1, *o.shape[2:]), 0, 1)[:, :T]
    return o_BTJV, state_BJKV
