"""How parameters meet activations, and what a module lets others see."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.ops.precision import exact


def project(formula: str, x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """einsum(formula, x, w) with both operands in the compute dtype.

    A float32 product is a float32 product on every device (on a TPU the default would be one bfloat16 pass). The
    product and both of its gradients are of matrices, tokens by channels: XLA's CPU compiler takes the gradient of w
    from [B, T, ...] operands only by way of transposed copies, at three times the cost.

    Args:
        formula: of two operands, in dimension letters, such as "BTD,DHK->BTHK": x's leading letters come first in
            the result, then its last ones are summed with w's first.
        x: activations.
        w: parameter, cast to `dtype` here so that the stored copy stays as it is.
        dtype: of the operands and the result.
    Returns:
        The product in `dtype`.
    """
    x_letters, w_letters = formula.split("->")[0].split(",")
    summed = sum(letter in x_letters for letter in w_letters)
    lead, features = x.shape[: x.ndim - summed], w.shape[summed:]
    inner = math.prod(w.shape[:summed])
    x_MI = x.astype(dtype).reshape(-1, inner)
    w_IO = w.astype(dtype).reshape(inner, -1)
    return jnp.matmul(x_MI, w_IO, precision=exact(dtype)).reshape(*lead, *features)


def record(module: nn.Module, name: str, value: jax.Array) -> None:
    """Keeps an intermediate for whoever asks with mutable=["intermediates"]; free otherwise."""
    module.sow("intermediates", name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
