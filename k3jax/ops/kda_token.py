"""One token of KDA for decoding, where time is the traffic of the state.

With the decay on the side of key and query the old state is read once for both of its products, then once more to be
rewritten; as forget, write, read it would pass through memory three times.
"""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def update(q_BJK, k_BJK, v_BJV, g_BJK, beta_BJ, state_BJKV):
    """(o_BJV, state_BJKV) of one token; all arrays in the state's dtype, q scaled. Source: spec §2.3, §2.8."""
    decay_BJK = jnp.exp(g_BJK)
    reads_BJ2K = jnp.stack([k_BJK * decay_BJK, q_BJK * decay_BJK], axis=2)
    read_BJ2V = jnp.einsum("bjxk,bjkv->bjxv", reads_BJ2K, state_BJKV, precision=HIGHEST)
    write_BJV = beta_BJ[..., None] * (v_BJV - read_BJ2V[:, :, 0])
    o_BJV = read_BJ2V[:, :, 1] + jnp.sum(q_BJK * k_BJK, axis=-1, keepdims=True) * write_BJV
    return o_BJV, decay_BJK[..., None] * state_BJKV + k_BJK[..., None] * write_BJV[..., None, :]
