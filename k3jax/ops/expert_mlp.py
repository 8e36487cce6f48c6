"""The routed experts of a layer: each token through its own few gated MLPs, none dropped.

Rows in expert order, times their expert's matrices, is a grouped product. On a TPU `jax.lax.ragged_dot` is a kernel
for it, though its gradient to the matrices is not one, and goes through tiles there too. Elsewhere that operation
costs as much as a dense product with every expert, and the rows go through tiles of one expert each: gate, up,
activation and down while the tile is in cache. Rows of a tile past its expert's end are computed and discarded, less
than one tile an expert; an expert without tokens costs nothing and its gradient is exactly zero. Which of the two is
decided when a program is lowered, by the platform it is lowered for.

Memory grows with the rows, T * S, not with the number of experts.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.dispatch import (
    Dispatch,
    from_experts,
    no_gradient,
    sort_by_expert,
    sum_over_slots,
    take_rows,
    to_experts,
)
from k3jax.ops.precision import exact, upcast, wide_dtype
from k3jax.ops.varying import varying_like

_TILE = 128  # rows: fewer lose speed to overhead, more to rows past the end of their expert
_log = logging.getLogger(__name__)


class _Experts(NamedTuple):
    """Matrices of every expert, or of one with the leading axis gone."""

    gate_ELF: jax.Array
    up_ELF: jax.Array
    down_EFL: jax.Array


class _Hidden(NamedTuple):
    """What the backward pass needs beside the inputs."""

    gate_MF: jax.Array
    up_MF: jax.Array


def expert_mlp(
    x_TL: jax.Array,
    ids_TS: jax.Array,
    weights_TS: jax.Array,
    w_gate_ELF: jax.Array,
    w_up_ELF: jax.Array,
    w_down_EFL: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Sums a token's experts, each weighted at its output: sum_s weights[t, s] * expert_ids[t, s](x[t]).

    Products accumulate in float32 or wider and are rounded to x_TL's dtype, the experts' outputs too; these are then
    weighted and summed over slots in float32 or wider. With tokens sharded over devices call this inside
    `jax.shard_map`: each device then sorts its own tokens.

    Args:
        x_TL: tokens in the experts' width (the latent, or the model width without one).
        ids_TS: int32, selected experts.
        weights_TS: weight of each selected expert, float32 or wider.
        w_gate_ELF: gate matrices, of x_TL's dtype.
        w_up_ELF: up matrices, of x_TL's dtype.
        w_down_EFL: down matrices, of x_TL's dtype.
        activation: (gate, up) -> hidden, elementwise, with nothing to learn.

    Returns:
        y_TL in x_TL's dtype.

    Raises:
        ValueError: tokens and matrices differ in dtype.

    Source: spec §5.1.
    """
    experts = _Experts(w_gate_ELF, w_up_ELF, w_down_EFL)
    for w in experts:
        if w.dtype != x_TL.dtype:
            raise ValueError(f"expert_mlp needs one dtype, got tokens in {x_TL.dtype} and matrices in {w.dtype}")
    _say_choice()
    # Inside shard_map a matrix that all devices share becomes one that may differ, so that its gradient is summed.
    one = varying_like(jnp.ones((), x_TL.dtype), x_TL, ids_TS, weights_TS, *experts)
    x_TL, experts = jax.tree.map(lambda array: array * one, (x_TL, experts))
    dispatch = sort_by_expert(ids_TS, w_gate_ELF.shape[0])
    y_TSL = from_experts(_rows(activation, x_TL, dispatch, experts), dispatch)
    return jnp.sum(upcast(y_TSL) * weights_TS[:, :, None], axis=1).astype(x_TL.dtype)


def _say_choice():
    """Says once a platform how experts are computed there; the choice itself falls as each program is lowered."""
    # The device of the mesh that the program is traced for, if one is named, else the process's.
    device = jax.sharding.get_abstract_mesh().abstract_device
    _log_choice(jax.default_backend() if device is None else device.platform)


@functools.cache
def _log_choice(platform: str) -> None:
    if platform == "tpu":
        _log.info("experts on tpu: jax.lax.ragged_dot, and tiles of %d rows or more for the matrices' gradient", _TILE)
    else:
        _log.info("experts on %s: tiles of %d rows, each through one expert's matrices", platform, _TILE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(activation, x_TL, dispatch, experts):
    """y_ML: every row through its expert."""
    return lax.platform_dependent(
        x_TL, dispatch, experts,
        tpu=lambda *args: _ragged(activation, *args)[0], default=functools.partial(_tiled, activation),
    )  # fmt: skip


def _rows_fwd(activation, x_TL, dispatch, experts):
    y_ML, hidden = lax.platform_dependent(
        x_TL, dispatch, experts,
        tpu=functools.partial(_ragged, activation), default=functools.partial(_tiled_fwd, activation),
    )  # fmt: skip
    return y_ML, (x_TL, dispatch, experts, hidden)


def _rows_bwd(activation, saved, g_ML):
    dx_ML, d_experts = lax.platform_dependent(
        *saved, g_ML,
        tpu=functools.partial(_ragged_bwd, activation), default=functools.partial(_tiled_bwd, activation),
    )  # fmt: skip
    dispatch = saved[1]
    return sum_over_slots(dx_ML, dispatch), no_gradient(dispatch), d_experts


_rows.defvjp(_rows_fwd, _rows_bwd)


def _ragged(activation, x_TL, dispatch, experts):
    sizes_E = dispatch.group_sizes_E
    x_ML = to_experts(x_TL, dispatch)
    hidden = _Hidden(_ragged_dot(x_ML, experts.gate_ELF, sizes_E), _ragged_dot(x_ML, experts.up_ELF, sizes_E))
    return _ragged_dot(activation(*hidden), experts.down_EFL, sizes_E), hidden


def _ragged_bwd(activation, x_TL, dispatch, experts, hidden, g_ML):
    def transposed(x_MD, w_EDF, g_MF):
        dx_MD = jax.vjp(lambda x_MD: _ragged_dot(x_MD, w_EDF, dispatch.group_sizes_E), x_MD)[1](g_MF)[0]
        return dx_MD, _tiled_outer(x_MD, g_MF, dispatch)

    x_ML = to_experts(x_TL, dispatch)
    hidden_MF, through_activation = jax.vjp(activation, *hidden)
    g_hidden_MF, d_down_EFL = transposed(hidden_MF, experts.down_EFL, g_ML)
    g_gate_MF, g_up_MF = through_activation(g_hidden_MF)
    dx_gate_ML, d_gate_ELF = transposed(x_ML, experts.gate_ELF, g_gate_MF)
    dx_up_ML, d_up_ELF = transposed(x_ML, experts.up_ELF, g_up_MF)
    return dx_gate_ML + dx_up_ML, _Experts(d_gate_ELF, d_up_ELF, d_down_EFL)


def _ragged_dot(x_MD, w_EDF, sizes_E):
    y_MF = lax.ragged_dot(
        x_MD, w_EDF, sizes_E, precision=exact(x_MD.dtype), preferred_element_type=wide_dtype(x_MD.dtype)
    )
    return y_MF.astype(x_MD.dtype)


def _tiled_outer(x_MD, g_MF, dispatch):
    """The sum of x g^T over each expert's rows.

    `ragged_dot`'s own derivative masks a dense product with all rows, once an expert. The sum is read and written with
    every tile and at full size no cache holds it: tiles are as long as a mean expert has rows, within bounds.
    """

    def tile(rows, one, nothing, d_DF):
        return nothing, d_DF + _wide_dot(rows.get(x_MD), rows.get(g_MF), (0, 0))

    zero = varying_like(jnp.zeros((x_MD.shape[1], g_MF.shape[1]), wide_dtype(x_MD.dtype)), x_MD)
    mean = max(x_MD.shape[0] // dispatch.group_sizes_E.shape[0], 1)
    length = min(max(1 << (mean.bit_length() - 1), _TILE), 8 * _TILE)
    return _over_tiles(tile, (), zero, dispatch, (), length)[1].astype(x_MD.dtype)


def _tiled(activation, x_TL, dispatch, experts):
    def tile(rows, one, y_ML, nothing):
        y_tile, _ = _one_tile(activation, rows.tokens(x_TL), one)
        return rows.put(y_ML, y_tile), nothing

    return _over_tiles(tile, _zero_rows(x_TL, dispatch, experts.down_EFL), (), dispatch, experts)[0]


def _tiled_fwd(activation, x_TL, dispatch, experts):
    def tile(rows, one, kept, nothing):
        return jax.tree.map(rows.put, kept, _one_tile(activation, rows.tokens(x_TL), one)), nothing

    gate_MF, up_MF, y_ML = (_zero_rows(x_TL, dispatch, w) for w in experts)
    return _over_tiles(tile, (y_ML, _Hidden(gate_MF, up_MF)), (), dispatch, experts)[0]


def _one_tile(activation, x_ML, one):
    hidden = _Hidden(_dot(x_ML, one.gate_ELF, (1, 0)), _dot(x_ML, one.up_ELF, (1, 0)))
    return _dot(activation(*hidden), one.down_EFL, (1, 0)), hidden


def _tiled_bwd(activation, x_TL, dispatch, experts, hidden, g_ML):
    dtype = x_TL.dtype

    def tile(rows, one, dx_ML, d_one):
        x, g = rows.only_mine(rows.tokens(x_TL)), rows.get(g_ML)
        h, through_activation = jax.vjp(activation, *map(rows.get, hidden))
        d_gate, d_up = through_activation(_dot(g, one.down_EFL, (1, 1)).astype(h.dtype))
        dx = _dot(d_gate, one.gate_ELF, (1, 1)) + _dot(d_up, one.up_ELF, (1, 1))
        d_one = _Experts(
            d_one.gate_ELF + _wide_dot(x, d_gate, (0, 0)),
            d_one.up_ELF + _wide_dot(x, d_up, (0, 0)),
            d_one.down_EFL + _wide_dot(h, g, (0, 0)),
        )
        return rows.put(dx_ML, dx), d_one

    zero = jax.tree.map(lambda w: varying_like(jnp.zeros(w.shape[1:], wide_dtype(dtype)), x_TL), experts)
    dx_ML, d_experts = _over_tiles(tile, varying_like(jnp.zeros_like(g_ML), x_TL), zero, dispatch, experts)
    return dx_ML, jax.tree.map(lambda w: w.astype(dtype), d_experts)


class _Rows(NamedTuple):
    """One tile: the rows at..at+tile-1, of which some belong to the expert at hand."""

    at: jax.Array
    mine_M: jax.Array
    dispatch: Dispatch

    def tokens(self, x_TL):
        slots = self._slice(self.dispatch.slot_M)
        return take_rows(x_TL, slots // self.dispatch.row_TS.shape[1])

    def get(self, array):
        return self.only_mine(self._slice(array))

    def only_mine(self, tile):
        # A choice, not a product: the rows of another expert may hold an infinity.
        return jnp.where(self.mine_M, tile, 0)

    def put(self, array, tile):
        tile = jnp.where(self.mine_M, tile, self._slice(array))
        return lax.dynamic_update_slice_in_dim(array, tile, self.at, axis=0)

    def _slice(self, array):
        return lax.dynamic_slice_in_dim(array, self.at, self.mine_M.shape[0])


def _over_tiles(tile, carry, own, dispatch, experts, length=_TILE):
    """Runs `tile(rows, one, carry, own) -> (carry, own)` over every tile of every expert.

    `carry` goes through all of them, `own` starts anew with each expert and is stacked.
    """
    M = dispatch.slot_M.shape[0]
    length = min(length, M)

    def expert(carry, matrices_and_bounds):
        one, start, end = matrices_and_bounds

        def step(state):
            first, carry, own = state
            at = jnp.minimum(first, M - length)
            row_M = at + lax.broadcasted_iota(jnp.int32, (length, 1), 0)
            rows = _Rows(at, (row_M >= first) & (row_M < end), dispatch)
            return first + length, *tile(rows, one, carry, own)

        return lax.while_loop(lambda state: state[0] < end, step, (start, carry, own))[1:]

    ends_E = jnp.cumsum(dispatch.group_sizes_E)
    return lax.scan(expert, carry, (experts, ends_E - dispatch.group_sizes_E, ends_E))


def _zero_rows(x_TL, dispatch, w):
    return varying_like(jnp.zeros((dispatch.slot_M.shape[0], w.shape[2]), x_TL.dtype), x_TL)


def _dot(a, b, contract):
    return _wide_dot(a, b, contract).astype(a.dtype)


def _wide_dot(a, b, contract):
    axes = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(a, b, axes, precision=exact(a.dtype), preferred_element_type=wide_dtype(a.dtype))
