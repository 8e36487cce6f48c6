"""Gated activations of feed-forward layers."""

import jax
import jax.numpy as jnp

from k3jax.ops.precision import upcast


def situ_glu(gate: jax.Array, up: jax.Array, beta: float = 4.0, linear_beta: float | None = 25.0) -> jax.Array:
    """SiTU-GLU: [beta tanh(gate/beta) sigmoid(gate)] [linear_beta tanh(up/linear_beta)].

    Both factors are bounded smoothly, so |output| <= beta * linear_beta; to first order at 0 it is SwiGLU.

    Args:
        gate: any shape and float dtype; the sigmoid takes it as it is.
        up: as gate.
        beta: bound of the gate's factor.
        linear_beta: bound of the linear factor; None leaves it unbounded.
    Returns:
        As gate, in gate's dtype; evaluated in float32 or wider.
    Source: spec §5.2.
    """
    g, u = upcast(gate), upcast(up)
    linear = u if linear_beta is None else linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear).astype(gate.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate sigmoid(gate) up, evaluated in float32 or wider, in gate's dtype.

    Args:
        gate: any shape and float dtype.
        up: as gate.
    Returns:
        As gate.
    Source: spec §1.1 (hidden_act = silu of Kimi Linear).
    """
    return (jax.nn.silu(upcast(gate)) * upcast(up)).astype(gate.dtype)
