"""How parameters meet activations, and what a module lets others see."""

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


def record(module: nn.Module, name: str, value: jax.Array) -> None:
    """Keeps an intermediate for whoever asks with mutable=["intermediates"]; free otherwise."""
    module.sow("intermediates", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
