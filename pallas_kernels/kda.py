"""Chunked KDA with Pallas TPU kernels, from arrays as users hold them: layout, padding, documents, gradient, platform.

Letters: B batch, T time, H query/key heads, J value heads, K key channels, V value channels; X heads times channels.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda_backward import backward
from pallas_kernels.kda_chunk import CHUNK
from pallas_kernels.kda_documents import document_numbers
from pallas_kernels.kda_forward import Options, forward
from pallas_kernels.kda_gradient import Saved
from pallas_kernels.manual_axes import varying_alike
from pallas_kernels.platform import on_platform

LANES = 128  # channels are padded to whole registers
NO_WRITE = 1e-15  # stands for a write strength of 0, by which the gradient divides; far below rounding
GATE_PADDING = -1e30  # a raw gate this low forgets nothing


class Output(NamedTuple):
    o_BTJV: jax.Array
    final_state_BJKV: jax.Array


class Inputs(NamedTuple):
    """Arrays as the kernels take them, padding inert (kda_forward.forward)."""

    q_BTX: jax.Array
    k_BTX: jax.Array
    v_BTX: jax.Array
    g_BTX: jax.Array
    beta_BJT: jax.Array
    slope_B1X: jax.Array | None
    state_BJVK: jax.Array


def kda(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTJV: jax.Array,
    g_BTJK: jax.Array,
    beta_BTJ: jax.Array,
    *,
    scale: float | None = None,
    initial_state_BJKV: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    norm_eps: float | None = None,
    lower_bound: float | None = None,
    a_log_J: jax.Array | None = None,
    decay_floor: float | None = None,
) -> Output:
    """Kimi Delta Attention over whole sequences, differentiable in every array, on TPU or interpreted on CPU.

    Which of the two is decided when the program is lowered, so a CPU host can compile for a TPU. No output depends on a
    later token, to the bit. Products of bfloat16 inputs are single bfloat16 passes added in float32 (some 3e-3 relative
    root mean square), of float32 inputs full float32.

    Args:
        q_BTHK: queries, bfloat16 or float32; of unit length, or any where norm_eps is given.
        k_BTHK: keys, as q.
        v_BTJV: values; J a multiple of H, value head j uses query/key head j // (J / H).
        g_BTJK: log decay, natural log, <= 0, of any magnitude; or the raw gate where lower_bound is given.
        beta_BTJ: write strength, in (0, 2).
        scale: multiplies q; None means K**-0.5.
        initial_state_BJKV: state before the first non-padding token; None means zeros.
        segment_ids_BT: integers; equal neighbours are one document, 0 is padding that reads 0 and changes nothing. A
            document starts from a zero state wherever the id changes, the first from the initial state.
        norm_eps: divides q and k by sqrt(sum of squares + norm_eps) in the kernels; None takes them as they are.
        lower_bound: takes g as raw gate z and makes the log decay lower_bound * sigmoid(exp(a_log) z) in the kernels;
            promises that floor.
        a_log_J: log of the slope of each value head, with lower_bound only; None means slope 1.
        decay_floor: a promise that no g is below it. Down to -5.5 it selects cheaper blocks of 16 rows; without it any
            decay is exact. A broken promise gives wrong numbers.

    Returns:
        Output: o_BTJV in v's dtype and final_state_BJKV float32, after the last non-padding token.

    Raises:
        ValueError: float64 arrays, a lower_bound that is not negative, a_log_J without lower_bound.
        NotImplementedError: on lowering for a platform other than TPU and CPU.

    Source: spec §2.1-2.7.
    """
    arrays = (q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, initial_state_BJKV, a_log_J)
    if any(x is not None and x.dtype == jnp.float64 for x in arrays):
        raise ValueError("kda: the TPU kernels know no float64; cast to float32 or use another implementation")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda: lower_bound is {lower_bound}; a log decay must be negative, -5.0 say")
    if a_log_J is not None and lower_bound is None:
        raise ValueError("kda: a_log_J belongs to the fused gate; give lower_bound too, or the log decay alone")
    B, T, _, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    scale = K**-0.5 if scale is None else float(scale)
    options = Options(scale, norm_eps, lower_bound, decay_floor if lower_bound is None else lower_bound)

    run_BT, g_padding = None, 0.0 if lower_bound is None else GATE_PADDING
    if segment_ids_BT is not None:
        token_BT11 = (segment_ids_BT != 0)[..., None, None]
        q_BTHK, k_BTHK, v_BTJV = (jnp.where(token_BT11, x, 0) for x in (q_BTHK, k_BTHK, v_BTJV))
        g_BTJK = jnp.where(token_BT11, g_BTJK, jnp.asarray(g_padding, g_BTJK.dtype))
        beta_BTJ = jnp.where(token_BT11[..., 0], beta_BTJ, 0)
        run_BT = _padded(document_numbers(segment_ids_BT), {1: CHUNK}, mode="edge")

    operand = jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in (q_BTHK, k_BTHK, v_BTJV)) else jnp.float32
    slope_B1X = None
    if lower_bound is not None:
        slope_J = jnp.ones(J) if a_log_J is None else jnp.exp(a_log_J.astype(jnp.float32))
        slope_B1X = jnp.broadcast_to(jnp.repeat(slope_J, K + -K % LANES), (B, 1, J * (K + -K % LANES)))
    if initial_state_BJKV is None:
        initial_state_BJKV = jnp.zeros((B, J, K, V))
    state_BJVK = jnp.swapaxes(initial_state_BJKV, 2, 3).astype(jnp.float32)
    inputs = Inputs(
        _rows(q_BTHK.astype(operand)),
        _rows(k_BTHK.astype(operand)),
        _rows(v_BTJV.astype(operand)),
        _rows(g_BTJK, g_padding),
        _padded(beta_BTJ.astype(jnp.float32).swapaxes(1, 2), {2: CHUNK}),
        slope_B1X,
        _padded(state_BJVK, {2: LANES, 3: LANES}),
    )
    o_BTX, final_state_BJVK = _kda(*varying_alike((inputs, run_BT)), options)
    o_BTJV = o_BTX.reshape(B, -1, J, o_BTX.shape[-1] // J)[:, :T, :, :V]
    return Output(o_BTJV.astype(v_BTJV.dtype), jnp.swapaxes(final_state_BJVK[:, :, :V, :K], 2, 3))


def _padded(x, multiples, **mode):
    """x with the axes of `multiples` padded behind to a multiple."""
    widths = [(0, -n % multiples.get(axis, 1)) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, widths, **mode) if any(after for _, after in widths) else x


def _rows(x_BTJK, padding=0.0):
    """[B, T, J, K] -> [B, T, J K], T and K padded."""
    x_BTJK = _padded(x_BTJK, {1: CHUNK, 3: LANES}, constant_values=padding)
    return x_BTJK.reshape(*x_BTJK.shape[:2], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kda(inputs: Inputs, run_BT, options: Options):
    out = _forward(inputs, run_BT, options, save=False)
    return out.o_BTX, out.final_state_BJVK


def _kda_forward(inputs: Inputs, run_BT, options: Options):
    out = _forward(inputs, run_BT, options, save=True)
    saved = Saved(out.states_BNJVK, out.u_BNJVC, out.scores_BNJCX)
    return (out.o_BTX, out.final_state_BJVK), (inputs, run_BT, saved)


def _kda_backward(options: Options, residuals, cotangents):
    inputs, run_BT, saved = residuals
    grads = _backward(inputs, run_BT, saved, *varying_alike(cotangents), options)
    K = inputs.state_BJVK.shape[-1]
    H = inputs.q_BTX.shape[-1] // K
    dslope_B1X = None
    if inputs.slope_B1X is not None:
        dslope_B1X = grads.dslope_B8X.sum(axis=1, keepdims=True)
    d_inputs = Inputs(
        _sum_sharing(grads.dq_BTX, K, H),
        _sum_sharing(grads.dk_BTX, K, H),
        grads.dv_BTX,
        grads.dg_BTX,
        grads.dbeta_BJT,
        dslope_B1X,
        grads.dstate_BJVK,
    )
    return d_inputs, None


_kda.defvjp(_kda_forward, _kda_backward)


@functools.partial(jax.jit, static_argnames=("options", "save"))
def _forward(inputs: Inputs, run_BT, options: Options, save: bool):
    def kernel(interpret, inputs, run_BT):
        return forward(*_writing(inputs), run_BT, options._replace(interpret=interpret), save)

    return _batched(kernel)(inputs, run_BT)


@functools.partial(jax.jit, static_argnames="options")
def _backward(inputs: Inputs, run_BT, saved: Saved, do_BTX, dstate_BJVK, options: Options):
    def kernel(interpret, inputs, *args):
        q_BTX, k_BTX, _, g_BTX, beta_BJT, slope_B1X, _ = _writing(inputs)
        return backward(q_BTX, k_BTX, g_BTX, beta_BJT, slope_B1X, *args, options._replace(interpret=interpret))

    return _batched(kernel)(inputs, run_BT, saved, do_BTX, dstate_BJVK)


def _batched(kernel):
    """The kernel of arrays that all lead with the batch; an axis that jax.vmap adds becomes more of it."""

    @jax.custom_batching.custom_vmap
    def call(*args):
        return on_platform(kernel, *args)

    @call.def_vmap
    def call_batched(size, are_batched, *args):
        def merge(x, is_batched):
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        outs = call(*jax.tree.map(merge, args, tuple(are_batched)))
        outs = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), outs)
        return outs, jax.tree.map(lambda _: True, outs)

    return call


def _writing(inputs: Inputs):
    return inputs._replace(beta_BJT=jnp.where(inputs.beta_BJT == 0, NO_WRITE, inputs.beta_BJT))


def _sum_sharing(x_BTX, K: int, H: int):
    """Summed over the value heads that share a query/key head."""
    B, T, X = x_BTX.shape
    if X == H * K:
        return x_BTX
    return x_BTX.reshape(B, T, H, -1, K).astype(jnp.float32).sum(axis=3).reshape(B, T, H * K).astype(x_BTX.dtype)
