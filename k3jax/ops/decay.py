"""The two families of decay gates of KDA: how raw projections become log decays."""

import jax
import jax.numpy as jnp

from k3jax.ops.precision import upcast


def softplus_decay(z_BTJK: jax.Array, a_log_J: jax.Array) -> jax.Array:
    """Log decay -exp(A) * softplus(z), in (-inf, 0): the gate of Kimi Linear.

    The larger z, the stronger the forgetting. There is no floor: one token may erase its channel completely.

    Args:
        z_BTJK: raw gate with dt_bias already added, any float dtype, any leading shape before [J, K].
        a_log_J: log of the rate of each value head.

    Returns:
        g_BTJK, log decay a token (natural log), float32 or wider, <= 0.

    Source: spec §2.2.
    """
    z_BTJK, a_log_J = upcast(z_BTJK), upcast(a_log_J)
    return -jnp.exp(a_log_J)[:, None] * jax.nn.softplus(z_BTJK)


def bounded_decay(z_BTJK: jax.Array, a_log_J: jax.Array | None, lower_bound: float = -5.0) -> jax.Array:
    """Log decay lower_bound * sigmoid(exp(A) * z), in (lower_bound, 0): the gate of K3.

    The larger z, the stronger the forgetting, as with `softplus_decay`.

    Args:
        z_BTJK: raw gate with dt_bias already added, any float dtype, any leading shape before [J, K].
        a_log_J: log of the slope of each value head; None means slope 1.
        lower_bound: strongest log decay a token, < 0.

    Returns:
        g_BTJK, log decay a token (natural log), float32 or wider, <= 0.

    Raises:
        ValueError: lower_bound is not negative.

    Source: spec §2.2.
    """
    if not lower_bound < 0:
        raise ValueError(f"bounded_decay: lower_bound is {lower_bound}; a log decay must be negative, -5.0 say")
    z_BTJK = upcast(z_BTJK)
    slope = 1.0 if a_log_J is None else jnp.exp(upcast(a_log_J))[:, None]
    return lower_bound * jax.nn.sigmoid(slope * z_BTJK)
