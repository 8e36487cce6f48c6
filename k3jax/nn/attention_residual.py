"""A consumer's pseudo-query over depth."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.nn.initial import parameter
from k3jax.nn.linear import record
from k3jax.ops.depth_attention import attention_residual


def depth_mix(
    module: nn.Module,
    name: str,
    memory_BTRD: jax.Array,
    partial_BTD: jax.Array | None,
    mask_R: jax.Array | None,
    eps: float,
) -> jax.Array:
    """The mix of depth sources that a sublayer reads, with parameters `{name}_query` and `{name}_gain` of `module`.

    Queries start at zero, so that every source weighs the same at first (spec §4.5).

    Args:
        module: the compact Linen module that owns the parameters.
        name: prefix of the parameters' names.
        memory_BTRD: finished sources, oldest first.
        partial_BTD: the running sum, the last source; None where there is none yet.
        mask_R: which sources count, the partial sum included; None = all.
        eps: of the key norm.
    Returns:
        [B, T, D] in the sources' dtype.
    Source: spec §4.2.
    """
    D = memory_BTRD.shape[-1]
    query_D = parameter(module, f"{name}_query", (D,))
    gain_D = parameter(module, f"{name}_gain", (D,))
    mix_BTD, weights_BTR = attention_residual(
        memory_BTRD, query_D, gain_D, partial_BTD=partial_BTD, mask_R=mask_R, eps=eps
    )
    if partial_BTD is None:  # recorded with the running sum's place, so that a scan's first layer is like its others
        weights_BTR = jnp.pad(weights_BTR, ((0, 0), (0, 0), (0, 1)))
    record(module, f"{name}_weights", weights_BTR)
    return mix_BTD
