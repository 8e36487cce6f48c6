"""The routed experts of a layer: each token through its own few gated MLPs, none dropped."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from k3jax.ops.grouped_matmul import from_experts, grouped_matmul, sort_by_expert, to_experts


def expert_mlp(
    x_TL,
    ids_TS,
    weights_TS,
    w_gate_ELF,
    w_up_ELF,
    w_down_EFL,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
):
    """Sums a token's experts, each weighted at its output: sum_s weights[t, s] * expert_ids[t, s](x[t]).

    Memory grows with the T * S rows the tokens occupy, not with the number of experts. Expert outputs are
    rounded to x_TL's dtype, then weighted and summed over slots in float32 or wider.

    Args:
        x_TL: tokens in the experts' width (the latent, or the model width without one).
        ids_TS: int32, selected experts.
        weights_TS: weight of each selected expert, float32 or wider.
        w_gate_ELF: gate matrices, of x_TL's dtype.
        w_up_ELF: up matrices, of x_TL's dtype.
        w_down_EFL: down matrices, of x_TL's dtype.
        activation: (gate_MF, up_MF) -> hidden_MF, elementwise.

    Returns:
        y_TL in x_TL's dtype.

    Source: spec §5.1.
    """
    dispatch = sort_by_expert(ids_TS, w_gate_ELF.shape[0])
    x_ML = to_experts(x_TL, dispatch)
    gate_MF = grouped_matmul(x_ML, w_gate_ELF, dispatch.group_sizes_E)
    up_MF = grouped_matmul(x_ML, w_up_ELF, dispatch.group_sizes_E)
    y_ML = grouped_matmul(activation(gate_MF, up_MF), w_down_EFL, dispatch.group_sizes_E)
    y_TSL = from_experts(y_ML, dispatch).astype(jnp.promote_types(x_TL.dtype, jnp.float32))
    return jnp.sum(y_TSL * weights_TS[:, :, None], axis=1).astype(x_TL.dtype)
