"""The dense feed-forward layer, which is also the shared expert."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.nn.initial import parameter
from k3jax.nn.linear import project
from k3jax.ops.situ import situ_glu, swiglu


def activation(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The architecture's gated activation (spec §5.2)."""
    if config.activation == "situ":
        return situ_glu(gate, up, config.situ_beta, config.situ_linear_beta)
    return swiglu(gate, up)


class MLP(nn.Module):
    """x_BTD -> y_BTD of hidden width `width` (spec §5.1).

    Attributes:
        config: architecture.
        width: F.
        dtype: of products.
    """

    config: ModelConfig
    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        D, F = self.config.hidden_size, self.width
        gate_BTF = project("BTD,DF->BTF", x_BTD, parameter(self, "gate", (D, F)), self.dtype)
        up_BTF = project("BTD,DF->BTF", x_BTD, parameter(self, "up", (D, F)), self.dtype)
        hidden_BTF = activation(self.config, gate_BTF, up_BTF)
        return project("BTF,FD->BTD", hidden_BTF, parameter(self, "down", (F, D)), self.dtype)
