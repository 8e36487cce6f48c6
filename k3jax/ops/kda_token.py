"""One token of KDA for decoding, where time is the traffic of the state.

With the decay on the side of key and query the old state is read once for both of its products, then once more to be
rewritten; as forget, write, read it would pass through memory three times. Accelerators are given all heads at once. On
CPU a loop takes as many heads as a core's cache holds and rewrites them in place, so that memory is read once and
written once.
"""

import math

import jax
import jax.numpy as jnp

from k3jax.ops.varying import varying_like

HIGHEST = jax.lax.Precision.HIGHEST
CACHED_ELEMENTS = 2**16  # of the state, 256 KB in float32: what a core's L2 holds beside the rest


def update_heads(q_XK, k_XK, v_XV, g_XK, beta_X, state_XKV):
    """Any number X of heads, all arrays in the state's dtype, q scaled: (o_XV, state_XKV). Source: spec §2.3."""
    decay_XK = jnp.exp(g_XK)
    reads_X2K = jnp.stack([k_XK * decay_XK, q_XK * decay_XK], axis=1)
    read_X2V = jnp.einsum("xrk,xkv->xrv", reads_X2K, state_XKV, precision=HIGHEST)
    write_XV = beta_X[:, None] * (v_XV - read_X2V[:, 0])
    o_XV = read_X2V[:, 1] + jnp.sum(q_XK * k_XK, axis=-1, keepdims=True) * write_XV
    return o_XV, decay_XK[..., None] * state_XKV + k_XK[..., None] * write_XV[:, None, :]


def update_in_cache(q_XK, k_XK, v_XV, g_XK, beta_X, state_XKV):
    """`update_heads`, a few heads at a time."""
    X, K, V = state_XKV.shape
    most = max(1, CACHED_ELEMENTS // (K * V))
    heads = max(n for n in range(1, min(most, X) + 1) if X % n == 0)

    def block(i, carry):
        o_XV, state_XKV = carry
        inputs = q_XK, k_XK, v_XV, g_XK, beta_X, state_XKV
        o, state = update_heads(*(jax.lax.dynamic_slice_in_dim(x, i * heads, heads) for x in inputs))
        o_XV, state_XKV = (
            jax.lax.dynamic_update_slice_in_dim(whole, part, i * heads, axis=0)
            for whole, part in ((o_XV, o), (state_XKV, state))
        )
        return o_XV, state_XKV

    carry = tuple(varying_like(x, q_XK, k_XK, v_XV, g_XK, beta_X, state_XKV) for x in (jnp.zeros_like(v_XV), state_XKV))
    return jax.lax.fori_loop(0, X // heads, block, carry)


def update(q_BJK, k_BJK, v_BJV, g_BJK, beta_BJ, state_BJKV):
    """(o_BJV, state_BJKV) of one token; all arrays in the state's dtype, q scaled. Source: spec §2.3, §2.8."""
    B, J, V = v_BJV.shape
    arrays = [x.reshape(B * J, *x.shape[2:]) for x in (q_BJK, k_BJK, v_BJV, g_BJK, beta_BJ, state_BJKV)]
    if math.prod(state_BJKV.shape) <= CACHED_ELEMENTS:
        o_XV, state_XKV = update_heads(*arrays)
    else:
        o_XV, state_XKV = jax.lax.platform_dependent(*arrays, cpu=update_in_cache, default=update_heads)
    return o_XV.reshape(B, J, V), state_XKV.reshape(state_BJKV.shape)
