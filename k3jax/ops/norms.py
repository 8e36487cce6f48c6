"""Root-mean-square and L2 normalisation."""

import jax
import jax.numpy as jnp

from k3jax.ops.precision import upcast


def rms_norm(x: jax.Array, gain_D: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean x^2 + eps) * gain over the last axis.

    Args:
        x: [..., D], any float dtype; statistics are float32 or wider.
        gain_D: [D], multiplies after the cast back to x's dtype.
        eps: added to the mean of squares.
    Returns:
        [..., D] in x's dtype.
    Source: spec §1.4.
    """
    wide = upcast(x)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * gain_D.astype(x.dtype)


def l2_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(sum x^2 + eps) over the last axis; finite, with a finite gradient, at x = 0.

    Args:
        x: [..., K], any float dtype; the sum is float32 or wider.
        eps: added to the SUM of squares, under the root (spec §12, trap 19).
    Returns:
        [..., K] in x's dtype.
    Source: spec §2.1.
    """
    wide = upcast(x)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)
