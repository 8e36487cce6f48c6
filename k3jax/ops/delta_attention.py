"""Kimi Delta Attention: a linear attention whose state forgets per channel and learns by the delta rule.

A state S [K, V] a value head maps keys to values. Each token, with log decay g, write strength beta (spec
§2.3):

    S <- diag(exp(g)) S                  forget
    S <- S + beta k (v - S^T k)^T        correct what S predicts for k AFTER forgetting
    o  = S^T (scale q)                   read AFTER the write
"""

import functools
import logging
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from k3jax.ops import kda_token
from k3jax.ops.decay import bounded_decay
from k3jax.ops.kda_chunked import chunked
from k3jax.ops.kda_recurrent import recurrent
from k3jax.ops.norms import l2_norm
from k3jax.ops.varying import varying_like
from pallas_kernels.kda import kda as kernel_kda
from pallas_kernels.kda_chunk import CHUNK as KERNEL_CHUNK

Implementation = Literal["auto", "recurrent", "chunked", "pallas"]
# Measured on CPU, heads of 32 to 128 channels: 32 is 5% to 25% faster than 64, 16 is slower again.
DEFAULT_CHUNK_SIZE = 32

_log = logging.getLogger(__name__)


class KDAOutput(NamedTuple):
    """What the tokens read and the state they leave behind; after `kda_step` the same two without a time
    axis."""

    o_BTJV: jax.Array
    final_state_BJKV: jax.Array

    @property
    def o_BJV(self) -> jax.Array:
        return self.o_BTJV

    @property
    def state_BJKV(self) -> jax.Array:
        return self.final_state_BJKV


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
    chunk_size: int | None = None,
    implementation: Implementation = "auto",
    decay_floor: float | None = None,
    norm_eps: float | None = None,
    lower_bound: float | None = None,
    a_log_J: jax.Array | None = None,
) -> KDAOutput:
    """Kimi Delta Attention over whole sequences; differentiable in every array, both states included.

    A token forgets first (S <- diag(exp(g)) S), then writes its prediction error (S <- S + beta k (v - S^T
    k)^T), then reads (o = S^T (scale q)). Any decay g <= 0 is finite and exact, and no output depends on a
    later token, to the bit.

    Args:
        q_BTHK: queries, usually of unit length.
        k_BTHK: keys, usually of unit length.
        v_BTJV: values. J is a multiple of H; value head j uses query/key head j // (J / H). V may differ from
          K.
        g_BTJK: log decay, natural log, <= 0, of any magnitude.
        beta_BTJ: write strength, in (0, 1), or (0, 2) where negative eigenvalues are allowed.
        scale: multiplies q; None means K**-0.5.
        initial_state_BJKV: state before the first non-padding token; None means zeros. It belongs to the first
          document of its row.
        segment_ids_BT: integers; equal neighbours are one document, 0 is padding. A document starts from a zero
          state wherever the id changes, and after padding even if the id repeats. Padding reads 0 and leaves
          the state untouched. None means one document a row and no padding.
        chunk_size: tokens a chunk, a power of two; None means 32. The recurrent form uses it only to bound
          memory; the Pallas kernels have 128 and take no other.
        implementation: "recurrent" scans token by token (the reference); "chunked" uses matrix products inside
          chunks and a custom gradient that keeps the inputs and a state a chunk; "pallas" is the same in TPU
          kernels, compiled where the program is lowered for TPU and interpreted, slowly, where for CPU; "auto" is
          recurrent for a single token, else pallas on TPU where it serves the call, else chunked, and logs which
          and why, once.
        decay_floor: a promise that no g is below it (the bounded gate's bound). Down to -5.5 the Pallas kernels
          have a cheaper form for it; the others are the same with and without. A broken promise gives wrong numbers.
        norm_eps: q and k are raw and become l2_norm(., norm_eps); in the Pallas kernels, where they are.
        lower_bound: g is a raw gate and becomes bounded_decay(g, a_log_J, lower_bound), likewise; promises the floor.
        a_log_J: with lower_bound only.

    Returns:
        KDAOutput: o_BTJV in v's dtype; final_state_BJKV after the last non-padding token, float32 or wider
        (the initial state, or zeros, where there is none).

    Raises:
        ValueError: shapes that do not fit together, T = 0, an unknown implementation, a chunk size that is not
          a power of two or not the kernels', float64 with pallas.
        NotImplementedError: when pallas is lowered for another platform than TPU and CPU.

    Source: spec §2.3, §2.4, §2.7.
    """
    _check(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, initial_state_BJKV, segment_ids_BT)
    if implementation not in get_args(Implementation):
        valid = ", ".join(get_args(Implementation))
        raise ValueError(f"kda: implementation is {implementation!r}; use one of {valid}")
    dtype = jnp.result_type(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, jnp.float32)
    if initial_state_BJKV is not None:
        dtype = jnp.promote_types(dtype, initial_state_BJKV.dtype)
    if implementation == "auto":
        implementation = _choose(v_BTJV.shape[1], dtype, chunk_size)
    if implementation == "pallas":
        if chunk_size not in (None, KERNEL_CHUNK):
            raise ValueError(f"kda: chunk_size is {chunk_size}; the Pallas kernels have {KERNEL_CHUNK}: leave it None")
        out = kernel_kda(
            q_BTHK,
            k_BTHK,
            v_BTJV,
            g_BTJK,
            beta_BTJ,
            scale=scale,
            initial_state_BJKV=initial_state_BJKV,
            segment_ids_BT=segment_ids_BT,
            norm_eps=norm_eps,
            lower_bound=lower_bound,
            a_log_J=a_log_J,
            decay_floor=decay_floor,
        )
        return KDAOutput(*out)
    if norm_eps is not None:
        q_BTHK, k_BTHK = l2_norm(q_BTHK, norm_eps), l2_norm(k_BTHK, norm_eps)
    if lower_bound is not None:
        g_BTJK = bounded_decay(g_BTJK, a_log_J, lower_bound)
    elif a_log_J is not None:
        raise ValueError("kda: a_log_J is given without lower_bound; it belongs to the raw gate")
    chunk_size = DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size
    if not isinstance(chunk_size, int) or chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"kda: chunk_size is {chunk_size!r}; use a power of two, 32 or 64")
    B, _, J, V = v_BTJV.shape
    K = q_BTHK.shape[-1]
    scale = K**-0.5 if scale is None else float(scale)
    if initial_state_BJKV is None:
        state_BJKV = jnp.zeros((B, J, K, V), dtype)
    else:
        state_BJKV = initial_state_BJKV.astype(dtype)
    state_BJKV = varying_like(state_BJKV, q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ)

    run_BT = None
    if segment_ids_BT is not None:
        run_BT = _runs(segment_ids_BT)
        token_BT11 = (segment_ids_BT != 0)[..., None, None]
        q_BTHK, k_BTHK, v_BTJV, g_BTJK = (jnp.where(token_BT11, x, 0) for x in (q_BTHK, k_BTHK, v_BTJV, g_BTJK))
        beta_BTJ = jnp.where(token_BT11[..., 0], beta_BTJ, 0)

    form = recurrent if implementation == "recurrent" else chunked
    o_BTJV, final_state_BJKV = form(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, run_BT, scale, chunk_size)
    return KDAOutput(o_BTJV.astype(v_BTJV.dtype), final_state_BJKV)


def kda_step(
    q_BHK: jax.Array,
    k_BHK: jax.Array,
    v_BJV: jax.Array,
    g_BJK: jax.Array,
    beta_BJ: jax.Array,
    state_BJKV: jax.Array,
    *,
    scale: float | None = None,
) -> KDAOutput:
    """One token of Kimi Delta Attention, for decoding.

    Args:
        q_BHK: query.
        k_BHK: key.
        v_BJV: value; J a multiple of H.
        g_BJK: log decay, <= 0.
        beta_BJ: write strength.
        state_BJKV: state after the tokens before this one.
        scale: multiplies q; None means K**-0.5.

    Returns:
        KDAOutput: o_BJV in v's dtype and state_BJKV after this token, float32 or wider.

    Raises:
        ValueError: shapes that do not fit together.

    Source: spec §2.3, §2.8.
    """
    step = [x[:, None] for x in (q_BHK, k_BHK, v_BJV, g_BJK, beta_BJ)]
    _check(*step, state_BJKV, None)
    dtype = jnp.result_type(q_BHK, k_BHK, v_BJV, g_BJK, beta_BJ, state_BJKV, jnp.float32)
    groups = v_BJV.shape[1] // q_BHK.shape[1]
    scale = q_BHK.shape[-1] ** -0.5 if scale is None else scale
    q_BJK, k_BJK = (jnp.repeat(x.astype(dtype), groups, axis=1) for x in (q_BHK, k_BHK))
    v, g_BJK, beta_BJ, state_BJKV = (x.astype(dtype) for x in (v_BJV, g_BJK, beta_BJ, state_BJKV))
    o_BJV, state_BJKV = kda_token.update(scale * q_BJK, k_BJK, v, g_BJK, beta_BJ, state_BJKV)
    return KDAOutput(o_BJV.astype(v_BJV.dtype), state_BJKV)


def _choose(T: int, dtype, chunk_size: int | None) -> Implementation:
    """What "auto" is for this call."""
    if T == 1:
        return "recurrent"
    # The device of the mesh that the program is traced for, if one is named, else the process's.
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform != "tpu":
        choice, why = "chunked", "because the Pallas kernels are for TPU"
    elif dtype != jnp.float32:
        choice, why = "chunked", f"because the Pallas kernels know no {dtype}"
    elif chunk_size not in (None, KERNEL_CHUNK):
        choice, why = "chunked", f"because chunk_size is {chunk_size} and the Pallas kernels have {KERNEL_CHUNK}"
    else:
        choice, why = "pallas", "the fastest form here"
    _log_choice(platform, choice, why)
    return choice


@functools.cache
def _log_choice(platform: str, choice: str, why: str) -> None:
    _log.info("kda on %s: %s implementation, %s", platform, choice, why)


def _runs(segment_ids_BT):
    """int32 number of each token's document, 0 for the first of a row; padding carries on the document before
    it."""
    is_token_BT = segment_ids_BT != 0
    changed_BT = segment_ids_BT != jnp.pad(segment_ids_BT[:, :-1], [(0, 0), (1, 0)])
    starts_BT = jnp.cumsum(is_token_BT & changed_BT, axis=1, dtype=jnp.int32)
    return jnp.maximum(starts_BT - 1, 0)


def _check(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, state_BJKV, segment_ids_BT):
    """Shapes and dtypes that fit together, or a ValueError that says which does not."""
    for name, x in (("q", q_BTHK), ("v", v_BTJV)):
        if x.ndim != 4:
            raise ValueError(f"kda: {name} has shape {x.shape}; it needs [batch, time, heads, channel]")
    B, T, H, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    if T == 0:
        raise ValueError("kda: the sequences are empty (T = 0); give at least one token")
    if H == 0 or J % H:
        raise ValueError(f"kda: {J} value heads do not divide among {H} query/key heads; make J a multiple of H")
    expected = {
        "q": (q_BTHK, (B, T, H, K)),
        "k": (k_BTHK, (B, T, H, K)),
        "v": (v_BTJV, (B, T, J, V)),
        "g": (g_BTJK, (B, T, J, K)),
        "beta": (beta_BTJ, (B, T, J)),
        "initial_state": (state_BJKV, (B, J, K, V)),
        "segment_ids": (segment_ids_BT, (B, T)),
    }
    for name, (x, shape) in expected.items():
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"kda: {name} has shape {x.shape}; q {q_BTHK.shape} and v {v_BTJV.shape} need {shape}")
        kind = jnp.integer if name == "segment_ids" else jnp.floating
        if not jnp.issubdtype(x.dtype, kind):
            raise ValueError(f"kda: {name} has dtype {x.dtype}; it needs {kind.__name__} numbers")
