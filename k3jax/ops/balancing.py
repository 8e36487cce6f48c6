"""Expert load: how it is measured, and the two older rules that even it out.

Quantile Balancing, the rule the model was trained with, has a module of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class AuxiliaryLoss(NamedTuple):
    """Sums behind the auxiliary balancing loss of some tokens; field by field they add over devices.

    load_E: int32, tokens sent to each expert.
    share_E: float32 or wider, sum over tokens of the expert's share of the token's scores.
    tokens: float32 or wider scalar, tokens that count.
    """

    load_E: jax.Array
    share_E: jax.Array
    tokens: jax.Array

    def value(self) -> jax.Array:
        """E sum_j f_j P_j, a scalar: 1 when the load is even, 0 when no token counts."""
        E = self.load_E.shape[0]
        load_E = self.load_E.astype(self.share_E.dtype)
        fraction_E = load_E / jnp.maximum(jnp.sum(load_E), 1)
        return E * jnp.sum(fraction_E * self.share_E) / jnp.maximum(self.tokens, 1)


def auxiliary_loss(scores_TE, ids_TS, mask_T=None) -> AuxiliaryLoss:
    """Sums behind the auxiliary loss E sum_j f_j P_j.

    f_j is the fraction of slots sent to expert j, P_j its mean share of the scores; the gradient flows
    through P alone. The loss is a product of two means, so it belongs to one set of tokens: add the sums over
    the devices that share a micro-batch and take `value()` of the total. Over micro-batches weigh the values
    by `tokens`, which balances each micro-batch; the product of sums over several is another, weaker loss,
    and needs all of them before any gradient.

    Args:
        scores_TE: unbiased router scores, non-negative.
        ids_TS: selected experts.
        mask_T: True where a token counts, False for padding; None counts all.

    Returns:
        AuxiliaryLoss(load_E, share_E, tokens).

    Source: spec §6.4.
    """
    T, E = scores_TE.shape
    scores_TE = scores_TE.astype(jnp.promote_types(scores_TE.dtype, jnp.float32))
    if mask_T is None:
        mask_T = jnp.ones((T,), bool)
    share_TE = scores_TE / (jnp.sum(scores_TE, axis=-1, keepdims=True) + 1e-20)
    share_E = jnp.sum(jnp.where(mask_T[:, None], share_TE, 0), axis=0)
    return AuxiliaryLoss(expert_load(ids_TS, E, mask_T), share_E, jnp.sum(mask_T.astype(share_E.dtype)))


def expert_load(ids_TS, num_experts: int, mask_T=None):
    """Tokens sent to each expert.

    Args:
        ids_TS: selected experts.
        num_experts: E.
        mask_T: True where a token counts, False for padding; None counts all.

    Returns:
        load_E, int32; additive over micro-batches and devices. Up to 2^31 - 1 tokens.

    Source: spec §6.4.
    """
    sent_TSE = ids_TS[:, :, None] == lax.broadcasted_iota(ids_TS.dtype, (1, 1, num_experts), 2)
    if mask_T is not None:
        sent_TSE &= mask_T.astype(bool)[:, None, None]
    return jnp.sum(sent_TSE, axis=(0, 1), dtype=jnp.int32)


def sign_bias(load_E, bias_E, rate: float):
    """The loss-free balancing update: b + rate * sign(mean load - load).

    Args:
        load_E: int32 tokens sent to each expert over the whole training step; their sum below 2^31.
        bias_E: the bias they were routed with.
        rate: step size in units of score, about 1e-3.

    Returns:
        The new bias_E, float32 or wider; not centred. bias_E itself when the load is even (or empty).

    Source: spec §6.4.
    """
    bias_E = bias_E.astype(jnp.promote_types(bias_E.dtype, jnp.float32))
    total = jnp.sum(load_E)
    E = load_E.shape[0]
    # sign(total / E - load) in integers: a mean in float32 would call an exact tie a difference.
    sign_E = jnp.sign(2 * (total // E - load_E) + jnp.sign(total % E))
    return bias_E + rate * sign_E.astype(bias_E.dtype)
