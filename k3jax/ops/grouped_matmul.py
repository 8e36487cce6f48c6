"""Products of rows with the matrix of the group each row belongs to, and the order of rows that makes it cheap.

Tokens are copied into expert order (`sort_by_expert`, `to_experts`), multiplied there (`grouped_matmul`) and
copied back (`from_experts`). Nothing is dropped and nothing is padded: T * S rows, however they fall on the
experts. Every copy is a gather, also in the backward pass, because the order and its inverse are both known.

These run on the rows a device holds: with tokens sharded over devices call them inside `jax.shard_map`, or
the sort becomes one over all devices.
"""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_TILE = 128  # rows a product: smaller ones lose speed to overhead, larger ones to rows of other groups
_log = logging.getLogger(__name__)


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
        # Distinct integer keys: several times faster on a CPU than a stable sort of pairs, and the same
        # order.
        slot_M = lax.sort(ids_M * M + order_M, is_stable=False) % M
    else:
        slot_M = jnp.argsort(ids_M, stable=True).astype(jnp.int32)
    row_M = jnp.zeros((M,), jnp.int32).at[slot_M].set(order_M, unique_indices=True, mode="promise_in_bounds")
    group_sizes_E = jnp.zeros((num_experts,), jnp.int32).at[ids_M].add(1)
    return Dispatch(row_M.reshape(T, S), slot_M, group_sizes_E)


@jax.custom_vjp
def to_experts(x_TL, dispatch: Dispatch):
    """Copies each token to its S rows.

    Args:
        x_TL: tokens.
        dispatch: from `sort_by_expert`.

    Returns:
        x_ML, rows in expert order. Its gradient is summed over a token's rows in float32 or wider.

    Source: spec §5.1.
    """
    return _take(x_TL, dispatch.slot_M // dispatch.row_TS.shape[1])


def _to_experts_bwd(dispatch, g_ML):
    g_TSL = _take(g_ML, dispatch.row_TS).astype(jnp.promote_types(g_ML.dtype, jnp.float32))
    return jnp.sum(g_TSL, axis=1).astype(g_ML.dtype), _no_gradient(dispatch)


to_experts.defvjp(lambda x_TL, dispatch: (to_experts(x_TL, dispatch), dispatch), _to_experts_bwd)


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
    return _take(y_ML, dispatch.row_TS)


def _from_experts_bwd(dispatch, g_TSL):
    return _take(g_TSL.reshape(-1, g_TSL.shape[-1]), dispatch.slot_M), _no_gradient(dispatch)


from_experts.defvjp(lambda y_ML, dispatch: (from_experts(y_ML, dispatch), dispatch), _from_experts_bwd)


def grouped_matmul(x_MD, w_EDF, group_sizes_E):
    """Multiplies each row with the matrix of its group.

    On a TPU this is `jax.lax.ragged_dot`. Elsewhere that operation costs as much as E dense products (or
    falls to a masked dense one), and the rows go through tiles of one group each: rows of a tile past the
    group's end are computed and discarded, at most one tile a group, and an empty group costs nothing. Which
    of the two is decided when the program is lowered, by the platform it is lowered for. The gradient of an
    empty group's matrix is exactly zero.

    Args:
        x_MD: rows ordered by group.
        w_EDF: a matrix for each group, of x_MD's dtype.
        group_sizes_E: int32, rows of each group; rows past their sum belong to none.

    Returns:
        y_MF in x_MD's dtype, accumulated in float32 or wider; zero for rows of no group.

    Raises:
        ValueError: rows and matrices differ in dtype.

    Source: spec §5.1.
    """
    if x_MD.dtype != w_EDF.dtype:
        raise ValueError(f"grouped_matmul needs one dtype, got rows in {x_MD.dtype} and matrices in {w_EDF.dtype}")
    _say_choice()
    # Inside shard_map a weight all devices share becomes one that may differ, so that its gradient is summed over them.
    one = _varying(jnp.ones((), x_MD.dtype), x_MD, w_EDF, group_sizes_E)
    return _grouped_matmul(x_MD * one, w_EDF * one, group_sizes_E)


@functools.cache
def _say_choice():
    _log.info(
        "grouped matmul: jax.lax.ragged_dot in programs lowered for TPU; elsewhere tiles of %d rows of one expert,"
        " because ragged_dot costs as much there as a dense product with every expert",
        _TILE,
    )


@jax.custom_vjp
def _grouped_matmul(x_MD, w_EDF, group_sizes_E):
    return lax.platform_dependent(x_MD, w_EDF, group_sizes_E, tpu=_ragged, default=_tiled)


def _grouped_matmul_fwd(x_MD, w_EDF, group_sizes_E):
    return _grouped_matmul(x_MD, w_EDF, group_sizes_E), (x_MD, w_EDF, group_sizes_E)


def _grouped_matmul_bwd(saved, g_MF):
    dx_MD, dw_EDF = lax.platform_dependent(*saved, g_MF, tpu=_ragged_bwd, default=_tiled_bwd)
    return dx_MD, dw_EDF, _no_gradient(saved[2])


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


def _precision(dtype):
    """A float32 product stays one on a TPU, whose default is a single bfloat16 pass."""
    return None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST


def _ragged(x_MD, w_EDF, group_sizes_E):
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    y_MF = lax.ragged_dot(x_MD, w_EDF, group_sizes_E, precision=_precision(x_MD.dtype), preferred_element_type=wide)
    return y_MF.astype(x_MD.dtype)


def _ragged_bwd(x_MD, w_EDF, group_sizes_E, g_MF):
    return jax.vjp(lambda x_MD, w_EDF: _ragged(x_MD, w_EDF, group_sizes_E), x_MD, w_EDF)[1](g_MF)


def _tiled(x_MD, w_EDF, group_sizes_E):
    return _tiled_product(x_MD, w_EDF, group_sizes_E, contract=0)


def _tiled_bwd(x_MD, w_EDF, group_sizes_E, g_MF):
    dx_MD = _tiled_product(g_MF, w_EDF, group_sizes_E, contract=1)
    return dx_MD, _tiled_outer(x_MD, g_MF, group_sizes_E).astype(w_EDF.dtype)


def _tiled_product(x_MD, w_EDF, group_sizes_E, contract):
    """Rows times their group's matrix, which is contracted along its first (0) or second (1) axis."""
    M = x_MD.shape[0]
    F = w_EDF.shape[2 - contract]
    tile = min(_TILE, M)
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)

    def group(y_MF, one):
        w_DF, start, end = one

        def step(carry):
            first, y_MF = carry
            at = jnp.minimum(first, M - tile)
            product = lax.dot_general(
                lax.dynamic_slice_in_dim(x_MD, at, tile), w_DF, (((1,), (contract,)), ((), ())),
                precision=_precision(x_MD.dtype), preferred_element_type=wide,
            )  # fmt: skip
            kept = lax.dynamic_slice_in_dim(y_MF, at, tile)
            mine = _within(at, tile, first, end)
            rows = jnp.where(mine, product.astype(x_MD.dtype), kept)
            return first + tile, lax.dynamic_update_slice_in_dim(y_MF, rows, at, axis=0)

        return lax.while_loop(lambda carry: carry[0] < end, step, (start, y_MF))[1], None

    y_MF = _varying(jnp.zeros((M, F), x_MD.dtype), x_MD, w_EDF, group_sizes_E)
    return lax.scan(group, y_MF, (w_EDF, *_bounds(group_sizes_E)))[0]


def _tiled_outer(x_MD, g_MF, group_sizes_E):
    """The sum of x g^T over each group's rows, in float32 or wider."""
    M, D = x_MD.shape
    F = g_MF.shape[1]
    tile = min(_TILE, M)
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    zeros_DF = _varying(jnp.zeros((D, F), wide), x_MD, g_MF, group_sizes_E)

    def group(_, bounds):
        start, end = bounds

        def step(carry):
            first, dw_DF = carry
            at = jnp.minimum(first, M - tile)
            mine = _within(at, tile, first, end)
            # Masked on both sides: a row of another group may hold an infinity, and infinity times zero is
            # not zero.
            x = jnp.where(mine, lax.dynamic_slice_in_dim(x_MD, at, tile), 0)
            g = jnp.where(mine, lax.dynamic_slice_in_dim(g_MF, at, tile), 0)
            return first + tile, dw_DF + lax.dot_general(
                x, g, (((0,), (0,)), ((), ())), precision=_precision(x.dtype), preferred_element_type=wide
            )

        return None, lax.while_loop(lambda carry: carry[0] < end, step, (start, zeros_DF))[1]

    return lax.scan(group, None, _bounds(group_sizes_E))[1]


def _bounds(group_sizes_E):
    ends_E = jnp.cumsum(group_sizes_E)
    return ends_E - group_sizes_E, ends_E


def _within(at, tile, first, end):
    row = at + lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    return (row >= first) & (row < end)


def _varying(array, *like):
    """The array, typed as differing between devices where `like` does: a loop's carry inside shard_map must be.

    A choice between equals has the type of its condition, and compiles to nothing.
    """
    for x in like:
        array = jnp.where(x[(0,) * x.ndim] == 0, array, array)
    return array


def _take(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def _no_gradient(tree):
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
