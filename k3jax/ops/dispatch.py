"""Tokens in expert order, and back.

Nothing is dropped and nothing is padded: T tokens with S slots each are M = T * S rows, however they fall.
Order and inverse are both known, so a copy either way, and its gradient, is a gather.

The order is that of the tokens a device holds. With tokens sharded over devices call these inside `jax.shard_map`;
left to automatic partitioning the sort becomes one over all devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Dispatch(NamedTuple):
    """Rows in expert order.

    row_TS: int32, the row of each token's slot.
    slot_M: int32, its inverse: row m is slot s of token t with slot_M[m] = t * S + s.
    group_sizes_E: int32, rows of each expert; they follow each other by expert index.
    """

    row_TS: jax.Array
    slot_M: jax.Array
    group_sizes_E: jax.Array


def sort_by_expert(ids_TS, num_experts: int) -> Dispatch:
    """Orders the M = T * S slots by expert, and within an expert by token.

    Args:
        ids_TS: int32, selected experts in 0..num_experts-1.
        num_experts: E.

    Returns:
        Dispatch(row_TS, slot_M, group_sizes_E).

    Source: spec §5.1.
    """
    T, S = ids_TS.shape
    M = T * S
    ids_M = ids_TS.reshape(M).astype(jnp.int32)
    order_M = lax.iota(jnp.int32, M)
    if num_experts * M < 2**31:
        # Distinct integer keys: several times faster on a CPU than a stable sort of pairs, and the same order.
        slot_M = lax.sort(ids_M * M + order_M, is_stable=False) % M
    else:
        slot_M = jnp.argsort(ids_M, stable=True).astype(jnp.int32)
    row_M = jnp.zeros((M,), jnp.int32).at[slot_M].set(order_M, unique_indices=True, mode="promise_in_bounds")
    group_sizes_E = jnp.zeros((num_experts,), jnp.int32).at[ids_M].add(1)
    return Dispatch(row_M.reshape(T, S), slot_M, group_sizes_E)


def to_experts(x_TL, dispatch: Dispatch):
    """Copies each token to its S rows (without a gradient of its own: see `sum_over_slots`).

    Args:
        x_TL: tokens.
        dispatch: from `sort_by_expert`.

    Returns:
        x_ML, rows in expert order.

    Source: spec §5.1.
    """
    return take_rows(x_TL, dispatch.slot_M // dispatch.row_TS.shape[1])


def sum_over_slots(g_ML, dispatch: Dispatch):
    """Adds each token's S rows: the transpose of `to_experts`.

    Args:
        g_ML: rows in expert order.
        dispatch: from `sort_by_expert`.

    Returns:
        g_TL in g_ML's dtype, summed in float32 or wider.

    Source: spec §5.1.
    """
    g_TSL = take_rows(g_ML, dispatch.row_TS).astype(jnp.promote_types(g_ML.dtype, jnp.float32))
    return jnp.sum(g_TSL, axis=1).astype(g_ML.dtype)


@jax.custom_vjp
def from_experts(y_ML, dispatch: Dispatch):
    """Copies rows back to their slots.

    Args:
        y_ML: rows in expert order.
        dispatch: from `sort_by_expert`.

    Returns:
        y_TSL, one row for each slot of each token.

    Source: spec §5.1.
    """
    return take_rows(y_ML, dispatch.row_TS)


def _from_experts_bwd(dispatch, g_TSL):
    return take_rows(g_TSL.reshape(-1, g_TSL.shape[-1]), dispatch.slot_M), no_gradient(dispatch)


from_experts.defvjp(lambda y_ML, dispatch: (from_experts(y_ML, dispatch), dispatch), _from_experts_bwd)


def take_rows(x, index):
    """x[index] for indices that are known to be in bounds."""
    return x.at[index].get(mode="promise_in_bounds")


def no_gradient(tree):
    """The cotangent of a tree of integers."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
