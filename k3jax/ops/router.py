"""Sigmoid routing with a selection bias: which experts a token visits, and with what weight."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """Where each token goes.

    ids_TS: int32, the selected experts by descending score + bias.
    weights_TS: float32 or wider, the weight of each selected expert's output.
    scores_TE: float32 or wider, the unbiased scores in (0, 1) of every expert.
    """

    ids_TS: jax.Array
    weights_TS: jax.Array
    scores_TE: jax.Array


def route(
    x_TD: jax.Array,
    router_DE: jax.Array,
    bias_E: jax.Array,
    k: int,
    *,
    routed_scaling_factor: float = 1.0,
    forced_ids_TS: jax.Array | None = None,
) -> Routing:
    """Selects the top k of sigmoid(x router) + bias, and weighs them by the unbiased scores.

    The bias decides who is selected and nothing else: it gets no gradient, and the weights are the selected
    scores over their sum. The set of selected experts is piecewise constant in the scores, so holding it
    fixed gives the exact derivative wherever there is one (everywhere but at ties): the gradient reaches x
    and the router through the weights alone. Everything is computed in float32 or wider, the products at
    highest precision.

    Args:
        x_TD: tokens at full model width (not the latent), any float dtype.
        router_DE: router matrix, any float dtype.
        bias_E: selection bias, float32 or wider; in 16 bits it would route differently.
        k: experts a token, 1 <= k <= E. Ties go to the lower index.
        routed_scaling_factor: multiplies the weights, which otherwise sum to one.
        forced_ids_TS: experts to visit in place of the top k; weights are still of this call's own scores. So two
            programs can be compared where nearly tied experts would part them.

    Returns:
        Routing(ids_TS, weights_TS, scores_TE) with S = k.

    Raises:
        ValueError: k is not in 1..E, or the bias is narrower than float32.

    Source: spec §5.1.
    """
    E = router_DE.shape[-1]
    check_top_k(k, E)
    if jnp.finfo(bias_E.dtype).bits < 32:
        raise ValueError(f"router bias is {bias_E.dtype}; keep it in float32 (low bits decide who is selected)")
    wide = jnp.promote_types(jnp.promote_types(x_TD.dtype, router_DE.dtype), jnp.float32)
    logits_TE = jnp.dot(x_TD.astype(wide), router_DE.astype(wide), precision=lax.Precision.HIGHEST)
    scores_TE = jax.nn.sigmoid(logits_TE)
    if forced_ids_TS is None:
        _, ids_TS = lax.top_k(lax.stop_gradient(scores_TE + bias_E), k)
    else:
        ids_TS = forced_ids_TS
    # A masked sum instead of a gather: its transpose is a masked sum too, where a gather's is a scatter.
    selected_TSE = ids_TS[:, :, None] == lax.broadcasted_iota(ids_TS.dtype, (1, 1, E), 2)
    scores_TS = jnp.sum(jnp.where(selected_TSE, scores_TE[:, None, :], 0), axis=-1)
    weights_TS = scores_TS / (jnp.sum(scores_TS, axis=-1, keepdims=True) + 1e-20) * routed_scaling_factor
    return Routing(ids_TS.astype(jnp.int32), weights_TS, scores_TE)


def check_top_k(k: int, num_experts: int) -> None:
    """Refuses an impossible number of selected experts.

    Raises:
        ValueError: k is not in 1..num_experts.
    """
    if not 1 <= k <= num_experts:
        raise ValueError(f"cannot select {k} of {num_experts} experts a token; choose a top-k from 1 to {num_experts}")
