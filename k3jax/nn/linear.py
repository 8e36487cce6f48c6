"""How parameters meet activations: one product for every projection, and the initialisers of spec §1.5."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp


def project(formula: str, x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """einsum(formula, x, w) with both operands in the compute dtype.

    A float32 product is a float32 product on every device (on a TPU the default would be one bfloat16 pass).

    Args:
        formula: of two operands, in dimension letters, such as "BTD,DHK->BTHK".
        x: activations.
        w: parameter, cast to `dtype` here so that the stored copy stays as it is.
        dtype: of the operands and the result.
    Returns:
        The product in `dtype`.
    """
    precision = None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.einsum(formula, x.astype(dtype), w.astype(dtype), precision=precision)


def conv_taps(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Uniform within 1/sqrt(taps): a depthwise convolution sees `taps` inputs a channel."""
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Inverse softplus of a time step that is log-uniform in [1e-3, 0.1] (spec §1.5)."""
    log_dt = jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1))
    dt = jnp.maximum(jnp.exp(log_dt), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))


def log_uniform_a(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """log of a rate that is uniform in [1, 16], for the softplus decay (spec §1.5)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def record(module: nn.Module, name: str, value: jax.Array) -> None:
    """Keeps an intermediate for whoever asks with mutable=["intermediates"]; free otherwise."""
    module.sow("intermediates", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
