"""Chunked KDA on a TPU, forward: one program holds a chunk of several heads; their states stay in VMEM.

With S the state entering a chunk, E the decay from the chunk's start to each row, F from each row to the chunk's end
(spec §2.4), and b the write strengths:

    U  = (I + Akk diag(b))^-1 (V - (K E) S)      errors, the writes of the chunk taken into account
    O  = (Q E) S + Aqk (b U)
    S+ = E_C S + (K F)^T (b U)

The state and U are held transposed, [V, K] and [V, C]: then the decay of a channel lies along lanes, b is a row, and
V is the only operand that has to be transposed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kda_chunk
from pallas_kernels.kda_chunk import CHUNK, LOG2_E, VMEM_LIMIT, Product
from pallas_kernels.kda_documents import documents_of_chunk, run_rows
from pallas_kernels.manual_axes import output_like, varying_alike


class Options(NamedTuple):
    """What is static."""

    scale: float  # multiplies q
    norm_eps: float | None = None  # q and k are divided by sqrt(their sum of squares + eps); None: taken as they are
    lower_bound: float | None = (
        None  # g holds z, and the log decay is lower_bound * sigmoid(slope * z); None: log decay
    )
    decay_floor: float | None = None  # promised: no log decay is below it; None: no promise
    interpret: bool = False


class Forward(NamedTuple):
    o_BTX: jax.Array  # [B, T, J * V], v's dtype
    final_state_BJVK: jax.Array  # float32
    # What the gradient needs of each chunk, in v's dtype, or None:
    states_BNJVK: jax.Array | None  # the entering state
    u_BNJVC: jax.Array | None  # U, transposed
    scores_BNJCX: jax.Array | None  # [C, 2 C]: Aqk beside (I + Akk diag(b))^-1


def forward(q_BTX, k_BTX, v_BTX, g_BTX, beta_BJT, slope_B1X, state_BJVK, run_BT, options: Options, save_states: bool):
    """All chunks of all heads.

    Args:
        q_BTX, k_BTX: [B, T, H * K]; T a multiple of CHUNK, K and V of 128. bfloat16 or float32.
        v_BTX: [B, T, J * V]; value head j uses query/key head j // (J / H).
        g_BTX: [B, T, J * K] log decay (natural log), or z where options.lower_bound is set. bfloat16 or float32.
        beta_BJT: float32 write strengths; 0 for padding.
        slope_B1X: [B, 1, J * K] float32, exp(A) of each channel's head; only with options.lower_bound, else None.
        state_BJVK: float32 initial state, transposed.
        run_BT: int32 number of the document each token belongs to, counted from 0, or None for one document a row.
        save_states: whether to return the state entering each chunk.
    """
    B, T, _ = v_BTX.shape
    _, J, V, K = state_BJVK.shape
    H = q_BTX.shape[-1] // K
    heads = heads_per_program(H, J)
    qk_heads = max(1, heads * H // J)
    N = T // CHUNK
    dtype = jnp.bfloat16 if v_BTX.dtype == jnp.bfloat16 else jnp.float32

    def tokens(width, group=lambda j: j):
        return pl.BlockSpec((1, CHUNK, width), lambda b, j, n: (b, n, group(j)))

    qk_spec = tokens(qk_heads * K, lambda j: j * heads * H // J // qk_heads)
    inputs = {
        "q": (q_BTX, qk_spec),
        "k": (k_BTX, qk_spec),
        "v": (v_BTX, tokens(heads * V)),
        "g": (g_BTX, tokens(heads * K)),
        "beta": (beta_BJT[:, :, None], pl.BlockSpec((1, heads, 1, CHUNK), lambda b, j, n: (b, j, 0, n))),
        "state": (state_BJVK, pl.BlockSpec(memory_space=pl.ANY)),
    }
    if slope_B1X is not None:
        inputs["slope"] = (slope_B1X, pl.BlockSpec((None, 1, heads * K), lambda b, j, n: (b, 0, j)))
    if run_BT is not None:
        inputs["run_rows"] = (run_rows(run_BT), pl.BlockSpec((1, 2, CHUNK), lambda b, j, n: (b, 0, n)))
    inputs = {name: (varying_alike((x, v_BTX))[0], spec) for name, (x, spec) in inputs.items()}
    shape = functools.partial(output_like, v_BTX)
    outputs = {
        "o": (shape(v_BTX.shape, v_BTX.dtype), tokens(heads * V)),
        "final_state": (
            shape(state_BJVK.shape, jnp.float32),
            pl.BlockSpec((1, heads, V, K), lambda b, j, n: (b, j, 0, 0)),
        ),
    }
    if save_states:
        for name, sizes in {"states": (V, K), "u": (V, CHUNK), "scores": (CHUNK, 2 * CHUNK)}.items():
            spec = pl.BlockSpec((1, 1, heads, *sizes), lambda b, j, n: (b, n, j, 0, 0))
            outputs[name] = (shape((B, N, J, *sizes), dtype), spec)

    def kernel(*refs):
        ref = dict(zip([*inputs, *outputs], refs, strict=True))
        _program(ref, qk_heads, heads, options, dtype)

    outs = pl.pallas_call(
        kernel,
        grid=(B, J // heads, N),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[x for x, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=options.interpret,
        name="kda_forward",
    )(*(x for x, _ in inputs.values()))
    return Forward(*outs, *[None] * (5 - len(outs)))


def heads_per_program(H, J):
    """The most value heads, up to 8, that divide J and cover whole groups of query/key heads or lie inside one."""
    r = J // H
    return max(p for p in range(1, 9) if J % p == 0 and (p % r == 0 or r % p == 0))


def _program(ref, qk_heads, heads, options: Options, dtype):
    state_JVK = ref["final_state"].at[0]  # the block stays in VMEM over all chunks: the running state itself

    b, j, n = (pl.program_id(axis) for axis in range(3))

    @pl.when(n == 0)
    def _():
        pltpu.sync_copy(ref["state"].at[b, pl.ds(j * heads, heads)], state_JVK)

    documents = documents_of_chunk(ref["run_rows"][0]) if "run_rows" in ref else None
    constants = {}

    def constant(key, make):
        if key not in constants:
            constants[key] = make()
        return constants[key]

    kda_chunk.side_by_side(
        [
            _chunk_of_head(ref, state_JVK, h, h * qk_heads // heads, options, dtype, constant, documents)
            for h in range(heads)
        ]
    )


def head_inputs(ref, h, qk_h, options: Options):
    """q (scaled), k, g (base 2) of a head in float32, normalised and gated where the options say so."""
    K = ref["final_state"].shape[-1]

    def head(name, h):
        return ref[name][0, :, h * K : (h + 1) * K].astype(jnp.float32)

    q_CK, k_CK, g_CK = head("q", qk_h), head("k", qk_h), head("g", h)
    if options.norm_eps is None:
        q_CK = q_CK * options.scale
    else:
        q_CK, k_CK = _unit(q_CK, options.norm_eps, options.scale), _unit(k_CK, options.norm_eps, 1.0)
    if options.lower_bound is None:
        # Sums of g must stay finite; exp is 0 long before this floor.
        return q_CK, k_CK, jnp.maximum(g_CK, -1e6) * LOG2_E
    slope_1K = ref["slope"][:, h * K : (h + 1) * K] * -LOG2_E
    return q_CK, k_CK, (options.lower_bound * LOG2_E) / (1.0 + jnp.exp2(slope_1K * g_CK))


def _unit(x_CK, eps, length):
    """Rows scaled to a length."""
    return x_CK * jax.lax.rsqrt(jnp.sum(x_CK * x_CK, axis=1, keepdims=True) * length**-2 + eps * length**-2)


def _chunk_of_head(ref, state_JVK, h, qk_h, options: Options, dtype, constant, documents):
    V = state_JVK.shape[1]
    product = functools.partial(Product, dtype=dtype)
    q_CK, k_CK, g_CK = head_inputs(ref, h, qk_h, options)
    beta_1C = ref["beta"][0, h]
    yield
    floor = None if options.decay_floor is None else options.decay_floor * LOG2_E
    qk_CC, kk_CC, q_start_CK, k_start_CK, k_end_CK, whole_1K = yield from kda_chunk.intra_chunk(
        q_CK, k_CK, g_CK, floor, dtype, constant
    )
    reads_1C, writes_1C = 1.0, beta_1C
    if documents is not None:
        qk_CC, kk_CC = jnp.where(documents.same_CC, qk_CC, 0.0), jnp.where(documents.same_CC, kk_CC, 0.0)
        q_start_CK = jnp.where(documents.starts_C1, q_start_CK, 0.0)
        reads_1C = jnp.where(documents.starts_1C, 1.0, 0.0)
        writes_1C = jnp.where(documents.ends_1C, beta_1C, 0.0)
        whole_1K = jnp.where(documents.whole_11, whole_1K, 0.0)
    inverse_CC = yield from kda_chunk.unit_lower_inverse(kk_CC, beta_1C, dtype)

    state_VK = state_JVK[h]
    if "states" in ref:
        ref["states"][0, 0, h] = state_VK.astype(dtype)
    v_VC = ref["v"][0, :, h * V : (h + 1) * V].astype(jnp.float32).T
    expected_VC = yield product(state_VK, k_start_CK, "mk,nk")
    u_VC = yield product(v_VC - reads_1C * expected_VC, inverse_CC, "mk,nk")
    if "u" in ref:
        ref["u"][0, 0, h] = u_VC.astype(dtype)
        ref["scores"][0, 0, h] = jnp.concatenate([qk_CC.astype(dtype), inverse_CC.astype(dtype)], axis=1)
    reads_CX, read_VX = _beside(q_start_CK, qk_CC, dtype), _beside(state_VK, u_VC * beta_1C, dtype)
    o_CV = yield product(reads_CX, read_VX, "mk,nk")
    ref["o"][0, :, h * V : (h + 1) * V] = o_CV.astype(ref["o"].dtype)
    written_VK = yield product(u_VC * writes_1C, k_end_CK, "mk,kn")
    state_JVK[h] = whole_1K * state_VK + written_VK


def _beside(x, y, dtype):
    return jnp.concatenate([x.astype(dtype), y.astype(dtype)], axis=1)
