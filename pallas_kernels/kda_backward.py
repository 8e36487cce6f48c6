"""Chunked KDA on a TPU, backward: chunks last to first, the gradient of the state stays in VMEM.

One program takes a chunk of several heads, reads what the forward kernel saved of it and gives the gradients of its
inputs. Normalisation and gate are undone here too, where they are fused.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kda_blocks, kda_levels
from pallas_kernels.kda_chunk import CHUNK, LOG2_E, VMEM_LIMIT, floor_applies
from pallas_kernels.kda_documents import documents_of_chunk, run_rows
from pallas_kernels.kda_forward import Options, heads_per_program
from pallas_kernels.kda_gradient import Saved, chunk_gradient
from pallas_kernels.manual_axes import output_like, varying_alike


class Backward(NamedTuple):
    """Gradients in their inputs' dtypes; dq and dk a value head, to be summed over those that share a head."""

    dq_BTX: jax.Array  # [B, T, J * K]
    dk_BTX: jax.Array
    dv_BTX: jax.Array
    dg_BTX: jax.Array
    dbeta_BJT: jax.Array  # float32
    dstate_BJVK: jax.Array  # float32
    dslope_B8X: jax.Array | None  # [B, 8, J * K] float32 partial sums over time; with the fused gate


def backward(q_BTX, k_BTX, g_BTX, beta_BJT, slope_B1X, run_BT, saved: Saved, do_BTX, dstate_BJVK, options: Options):
    """All chunks of all heads.

    Args:
        q_BTX, k_BTX, g_BTX, beta_BJT, slope_B1X, run_BT: as `kda_forward.forward` takes them, no beta 0.
        saved: what it saved; states [B, N, J, V, K], u [B, N, J, V, C], scores [B, N, J, C, 2 C].
        do_BTX: gradient of the output, in its dtype.
        dstate_BJVK: float32 gradient of the final state.
    """
    B, N, J, V, K = saved.state_VK.shape
    T, H = N * CHUNK, q_BTX.shape[-1] // K
    heads = heads_per_program(H, J)
    qk_heads = max(1, heads * H // J)

    def tokens(width, group=lambda j: j):
        return pl.BlockSpec((1, CHUNK, width), lambda b, j, n: (b, N - 1 - n, group(j)))

    def of_chunk(*shape):
        return pl.BlockSpec((1, 1, heads, *shape), lambda b, j, n: (b, N - 1 - n, j, 0, 0))

    qk_spec = tokens(qk_heads * K, lambda j: j * heads * H // J // qk_heads)
    state_spec = pl.BlockSpec((1, heads, V, K), lambda b, j, n: (b, j, 0, 0))
    beta_spec = pl.BlockSpec((1, heads, 1, CHUNK), lambda b, j, n: (b, j, 0, N - 1 - n))
    floor = None if options.decay_floor is None else options.decay_floor * LOG2_E
    scheme = kda_blocks if floor_applies(floor) else kda_levels
    parts = 2 if do_BTX.dtype == jnp.bfloat16 else 3
    sums_XC = scheme.sum_matrix(CHUNK)
    sums_XY, spread_CY = jnp.tile(sums_XC, (1, parts)), jnp.tile(sums_XC.T, (1, parts))
    inputs = {
        "sums": (sums_XY, pl.BlockSpec(sums_XY.shape, lambda b, j, n: (0, 0))),
        "spread": (spread_CY, pl.BlockSpec(spread_CY.shape, lambda b, j, n: (0, 0))),
        "q": (q_BTX, qk_spec),
        "k": (k_BTX, qk_spec),
        "g": (g_BTX, tokens(heads * K)),
        "beta": (beta_BJT[:, :, None], beta_spec),
        "state": (saved.state_VK, of_chunk(V, K)),
        "u": (saved.u_VC, of_chunk(V, CHUNK)),
        "scores": (saved.scores_C2C, of_chunk(CHUNK, 2 * CHUNK)),
        "do": (do_BTX, tokens(heads * V)),
        "dfinal_state": (dstate_BJVK, state_spec),
    }
    if slope_B1X is not None:
        inputs["slope"] = (slope_B1X, pl.BlockSpec((None, 1, heads * K), lambda b, j, n: (b, 0, j)))
    if run_BT is not None:
        inputs["run_rows"] = (run_rows(run_BT), pl.BlockSpec((1, 2, CHUNK), lambda b, j, n: (b, 0, N - 1 - n)))
    inputs = {name: (varying_alike((x, do_BTX))[0], spec) for name, (x, spec) in inputs.items()}

    def like(x, width):
        return output_like(do_BTX, (B, T, width), x.dtype)

    outputs = {
        "dq": (like(q_BTX, J * K), tokens(heads * K)),
        "dk": (like(k_BTX, J * K), tokens(heads * K)),
        "dv": (like(do_BTX, J * V), tokens(heads * V)),
        "dg": (like(g_BTX, J * K), tokens(heads * K)),
        "dbeta": (output_like(do_BTX, (B, J, 1, T), jnp.float32), beta_spec),
        "dstate": (output_like(do_BTX, dstate_BJVK.shape, jnp.float32), state_spec),
    }
    if slope_B1X is not None:
        dslope = output_like(do_BTX, (B, 8, J * K), jnp.float32)
        outputs["dslope"] = (dslope, pl.BlockSpec((1, 8, heads * K), lambda b, j, n: (b, 0, j)))

    def kernel(*refs):
        ref = dict(zip([*inputs, *outputs], refs[:-1], strict=True))
        _program(ref, refs[-1], qk_heads, heads, scheme, options)

    outs = pl.pallas_call(
        kernel,
        grid=(B, J // heads, N),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        scratch_shapes=[pltpu.VMEM((heads, V, K), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=options.interpret,
        name="kda_backward",
    )(*(x for x, _ in inputs.values()))
    grads = Backward(*outs, *[None] * (slope_B1X is None))
    return grads._replace(dbeta_BJT=grads.dbeta_BJT[:, :, 0])


def _program(ref, dstate_scratch, qk_heads, heads, scheme, options: Options):
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        dstate_scratch[...] = ref["dfinal_state"][0]
        if "dslope" in ref:
            ref["dslope"][...] = jnp.zeros_like(ref["dslope"])

    documents = documents_of_chunk(ref["run_rows"][0]) if "run_rows" in ref else None
    # The compiler's scheduler keeps close to the order it is given: heads written one behind the other would wait for
    # their own products one behind the other. So every head goes a stage, then every head the next.
    works = [
        _chunk_of_head(ref, dstate_scratch, h, h * qk_heads // heads, scheme, documents, options) for h in range(heads)
    ]
    for _ in itertools.zip_longest(*works):
        pass

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        ref["dstate"][0] = dstate_scratch[...]


def _chunk_of_head(ref, dstate_scratch, h, qk_h, scheme, documents, options: Options):
    V, K = dstate_scratch.shape[1:]
    channels, values = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
    do_CV = ref["do"][0, :, values]
    parts = 2 if do_CV.dtype == jnp.bfloat16 else 3
    q_raw, k_raw = (ref[name][0, :, qk_h * K : (qk_h + 1) * K].astype(jnp.float32) for name in ("q", "k"))
    q_CK, q_rate = _normalise(q_raw, options)
    k_CK, k_rate = _normalise(k_raw, options)
    z_CK = g_CK = ref["g"][0, :, channels].astype(jnp.float32)
    if options.lower_bound is not None:
        slope_1K = ref["slope"][:, channels]
        g_CK = options.lower_bound * jax.nn.sigmoid(slope_1K * z_CK)
    beta_1C = ref["beta"][0, h]
    factors = scheme.decays(jnp.maximum(g_CK, -1e6) * LOG2_E, ref["sums"][...], options.decay_floor, parts)
    if documents is not None:
        factors = factors._replace(
            from_start=jnp.where(documents.starts_C1, factors.from_start, 0.0),
            to_end=jnp.where(documents.ends_C1, factors.to_end, 0.0),
            whole=jnp.where(documents.whole_11, factors.whole, 0.0),
        )
    yield
    saved = Saved(ref["state"][0, 0, h], ref["u"][0, 0, h], ref["scores"][0, 0, h])
    yield
    grads = yield from chunk_gradient(
        q_CK * options.scale,
        k_CK,
        beta_1C,
        do_CV,
        saved,
        dstate_scratch[h],
        factors,
        scheme,
        ref["spread"][...],
        None if documents is None else documents.same_CC,
    )
    dstate_scratch[h] = grads.dstate_VK

    def write(name, lanes, x):
        ref[name][0, :, lanes] = x.astype(ref[name].dtype)

    write("dq", channels, _normalise_gradient(options.scale * grads.dq_CK, q_CK, q_rate))
    write("dk", channels, _normalise_gradient(grads.dk_CK, k_CK, k_rate))
    write("dv", values, grads.dv_CV)
    yield
    dg_CK = grads.dg_CK
    if options.lower_bound is not None:
        du_CK = dg_CK * g_CK * (1.0 - g_CK / options.lower_bound)  # of slope z, the sigmoid's argument
        dg_CK = slope_1K * du_CK
        ref["dslope"][0, :, channels] += jnp.sum((du_CK * z_CK).reshape(-1, 8, K), axis=0)
    write("dg", channels, dg_CK)
    ref["dbeta"][0, h] = grads.dbeta_1C


def _normalise(x_CK, options: Options):
    """x over its length, and 1 / length; or x and None where the caller has done it."""
    if options.norm_eps is None:
        return x_CK, None
    rate_C1 = jax.lax.rsqrt(jnp.sum(x_CK * x_CK, axis=1, keepdims=True) + options.norm_eps)
    return x_CK * rate_C1, rate_C1


def _normalise_gradient(dy_CK, y_CK, rate_C1):
    if rate_C1 is None:
        return dy_CK
    return rate_C1 * (dy_CK - y_CK * jnp.sum(y_CK * dy_CK, axis=1, keepdims=True))
