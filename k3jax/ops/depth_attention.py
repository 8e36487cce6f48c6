"""Attention Residuals: a softmax over depth that replaces the residual stream."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.precision import wide_dtype


class AttentionResidual(NamedTuple):
    """What a mix over depth gives: the mixed hidden states and the weight of each source."""

    mix_BTD: jax.Array
    weights_BTR: jax.Array


def attention_residual(
    sources_BTRD: jax.Array,
    query_D: jax.Array,
    gain_D: jax.Array,
    *,
    partial_BTD: jax.Array | None = None,
    mask_R: jax.Array | None = None,
    eps: float = 1e-5,
) -> AttentionResidual:
    """Mixes the sources of each token by a softmax over depth.

    score_r = query . (gain * v_r * rsqrt(mean(v_r^2) + eps)), weights = softmax(score),
    mix = sum_r weights_r v_r: keys are normalised, values are not, and nothing is divided by sqrt(D).
    Everything is float32 inside. The gradient is written by hand: it keeps the arguments and two scalars
    a source and token, never a float32 [B, T, R, D] array.

    Args:
        sources_BTRD: [B, T, R, D] sources, oldest first, R >= 1 (R >= 0 beside a partial sum).
        query_D: [D] pseudo-query of this consumer.
        gain_D: [D] gain of the key norm. Only query * gain matters.
        partial_BTD: [B, T, D] one more source, the last one: the running sum of the unfinished block.
        mask_R: bool [R], or [R + 1] beside a partial sum; False takes a source out: weight exactly 0, no
            gradient. May be traced. At least one source has to stay. None keeps all.
        eps: added to the mean square of a source.

    Returns:
        AttentionResidual: mix_BTD [B, T, D] in the dtype of the sources; weights_BTR [B, T, R] float32 or
        wider, or [B, T, R + 1] with the partial sum last. An only source, unmasked, comes back as it is.

    Raises:
        ValueError: shapes that do not fit, or no source at all.

    Source: spec §4.1, §4.2 (MIX), §4.5 (gradient).
    """
    _check(sources_BTRD, query_D, gain_D, partial_BTD, mask_R)
    count = sources_BTRD.shape[2] + (partial_BTD is not None)
    if count == 1 and mask_R is None:
        only_BTD = sources_BTRD[:, :, 0] if partial_BTD is None else partial_BTD
        weights_BTR = jnp.ones((*only_BTD.shape[:2], 1), wide_dtype(only_BTD.dtype))
        return AttentionResidual(only_BTD.astype(sources_BTRD.dtype), weights_BTR)
    wide = jnp.promote_types(jnp.result_type(sources_BTRD, query_D, gain_D), jnp.float32)
    # The two vectors act only as a product, so the hand-written gradient stops at the product.
    probe_D = query_D.astype(wide) * gain_D.astype(wide)
    parts = () if partial_BTD is None else (partial_BTD,)
    if sources_BTRD.shape[2] > 0:
        parts = (sources_BTRD, *parts)
    mix_BTD, weights_BTR = _mix(parts, probe_D, mask_R, eps)
    return AttentionResidual(mix_BTD.astype(sources_BTRD.dtype), weights_BTR)


def _check(sources_BTRD, query_D, gain_D, partial_BTD, mask_R) -> None:
    if sources_BTRD.ndim != 4:
        raise ValueError(f"attention_residual: sources must be [B, T, R, D], got {sources_BTRD.shape}")
    B, T, R, D = sources_BTRD.shape
    for name, vector in (("query", query_D), ("gain", gain_D)):
        if vector.shape != (D,):
            raise ValueError(f"attention_residual: {name} must be [{D}] like the sources, got {vector.shape}")
    if partial_BTD is not None and partial_BTD.shape != (B, T, D):
        raise ValueError(f"attention_residual: partial must be {(B, T, D)}, got {partial_BTD.shape}")
    count = R + (partial_BTD is not None)
    if count == 0:
        raise ValueError("attention_residual: no source; give R >= 1 sources or a partial sum")
    if mask_R is not None and (mask_R.shape != (count,) or mask_R.dtype != jnp.bool_):
        raise ValueError(
            f"attention_residual: mask must be bool [{count}], one entry a source (partial last), "
            f"got {mask_R.dtype} {mask_R.shape}"
        )


# `parts` holds the stack [B, T, R, D] and/or the partial sum [B, T, D]. They are never joined: what is
# joined is scalars of a source, [B, T, R]. Every product below has one operand without free dimensions.
# Compilers for accelerators turn those into fused multiply-and-reduce (nothing wide is written for narrow
# sources), and the one for CPUs runs them as matrix-vector products; the same sums written as multiply and
# reduce would have their broadcasts stored there.

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _dot(part, other, wide):
    """Inner product over D, [B, T, R]; other is the part itself, [D] or [B, T, D]."""
    letters = {1: "d", 3: "btd", 4: "btrd"}
    out = "btr" if part.ndim == 4 else "bt"
    dot = _einsum(f"{letters[part.ndim]},{letters[other.ndim]}->{out}", part.astype(wide), other.astype(wide))
    return dot if part.ndim == 4 else dot[..., None]


def _per_part(parts, array_BTR):
    """Splits scalars of all sources into those of each part."""
    if parts[0].ndim == 3:
        return [array_BTR]
    R = parts[0].shape[2]
    return [array_BTR[:, :, :R], array_BTR[:, :, R:]][: len(parts)]


def _weighted(parts, weights_BTR):
    """sum_r weights_r v_r, [B, T, D]."""
    total_BTD = 0
    for part, w in zip(parts, _per_part(parts, weights_BTR), strict=True):
        part = part.astype(w.dtype)
        total_BTD += _einsum("btr,btrd->btd", w, part) if part.ndim == 4 else w * part
    return total_BTD


def _stats(parts, probe_D, eps):
    """rsqrt(mean v^2 + eps) and score of every source, each [B, T, R]; keys are never formed."""
    wide, D = probe_D.dtype, probe_D.shape[0]
    square_BTR = jnp.concatenate([_dot(part, part, wide) for part in parts], axis=-1)
    probed_BTR = jnp.concatenate([_dot(part, probe_D, wide) for part in parts], axis=-1)
    inverse_BTR = lax.rsqrt(square_BTR / D + eps)
    return inverse_BTR, probed_BTR * inverse_BTR


def _softmax(score_BTR, mask_R):
    if mask_R is not None:
        score_BTR = jnp.where(mask_R, score_BTR, -jnp.inf)
    return jax.nn.softmax(score_BTR, axis=-1)


def _forward(parts, probe_D, mask_R, eps):
    inverse_BTR, score_BTR = _stats(parts, probe_D, eps)
    weights_BTR = _softmax(score_BTR, mask_R)
    mix_BTD = _weighted(parts, weights_BTR).astype(jnp.result_type(*parts))
    return (mix_BTD, weights_BTR), (parts, probe_D, mask_R, inverse_BTR, score_BTR)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mix(parts, probe_D, mask_R, eps):
    return _forward(parts, probe_D, mask_R, eps)[0]


def _backward(eps, saved, cotangents):
    parts, probe_D, mask_R, inverse_BTR, score_BTR = saved
    dmix_BTD, dweights_BTR = cotangents
    wide, D = probe_D.dtype, probe_D.shape[0]
    weights_BTR = _softmax(score_BTR, mask_R)
    dweights_BTR += jnp.concatenate([_dot(part, dmix_BTD, wide) for part in parts], axis=-1)
    dscore_BTR = weights_BTR * (dweights_BTR - jnp.sum(weights_BTR * dweights_BTR, -1, keepdims=True))
    # d score / d v = inverse * probe - score * inverse^2 / D * v
    toward_BTR = dscore_BTR * inverse_BTR
    shrink_BTR = toward_BTR * inverse_BTR * score_BTR / D
    # Without the barrier the compiler computes these scalars of a source again for each of its D channels.
    scalars = lax.optimization_barrier((weights_BTR, toward_BTR, shrink_BTR))
    dmix_BTD = dmix_BTD.astype(wide)
    dparts = []
    for part, *pab in zip(parts, *(_per_part(parts, x) for x in scalars), strict=True):
        p, a, b = (x[..., None] for x in pab) if part.ndim == 4 else pab
        dmix = dmix_BTD[:, :, None] if part.ndim == 4 else dmix_BTD
        dparts.append((p * dmix + a * probe_D - b * part.astype(wide)).astype(part.dtype))
    dprobe_D = jnp.sum(_weighted(parts, toward_BTR), axis=(0, 1))
    return tuple(dparts), dprobe_D, None


_mix.defvjp(_forward, _backward)
