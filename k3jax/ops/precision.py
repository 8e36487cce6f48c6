"""What float32 means in every operation: float32 or wider, and products that are not secretly narrower."""

import jax
import jax.numpy as jnp
from jax import lax


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or `dtype` itself where that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def upcast(x: jax.Array) -> jax.Array:
    """x in float32, or in its own dtype where that is wider."""
    return x.astype(wide_dtype(x.dtype))


def exact(dtype: jnp.dtype) -> lax.Precision | None:
    """The precision at which a product of operands of `dtype` loses nothing of them.

    Args:
        dtype: of both operands.
    Returns:
        HIGHEST from float32 on, whose products would be a single bfloat16 pass on a TPU; None for narrower operands,
        whose products are exact as they are and only need a wide accumulator.
    """
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == wide_dtype(dtype) else None
