"""The gradient of one chunk of one head, as a function of arrays that fit in fast memory (spec §2.6).

The forward kernel leaves three things a chunk: the state S entering it, U = T X, each token's value less what the state
and its neighbours predict for its key, and the [C, C] matrices Aqk and T = (I + Akk diag(b))^-1. With V' = b U and dS
the gradient of the state leaving the chunk:

    dV' = Aqk^T dO + (K F) dS
    dX  = T^T (b dV')                    dX is the gradient of V - (K E) S, so of V
    dS <- E_C dS + (Q E)^T dO - (K E)^T dX
    d(Q E) = dO S^T, d(K E) = -dX S^T, d(K F) = V' dS^T
    dAqk = tril(dO V'^T), dAkk = -strict_tril(dX V'^T)
    db  = row sums of dX U / b           dX = b (dV' - Akk^T dX), and the bracket is the gradient of b U by b

Nothing is solved again. Arrays are held transposed ([V, C], [V, K]) where that spares a product a transposed left
operand. The gradient of a log decay is what its factor was multiplied into times that product's gradient; it takes the
operands as the product rounded them, so that what two rows of a pair contribute cancels to float32 outside the pair.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda_chunk import dot, iotas


class Saved(NamedTuple):
    """What the forward pass leaves of one chunk of one head."""

    state_VK: jax.Array  # entering the chunk
    u_VC: jax.Array
    scores_C2C: jax.Array  # Aqk and T side by side


class Gradients(NamedTuple):
    """dq is of the scaled query; dstate of the entering state."""

    dq_CK: jax.Array
    dk_CK: jax.Array
    dv_CV: jax.Array
    dg_CK: jax.Array
    dbeta_1C: jax.Array
    dstate_VK: jax.Array


def chunk_gradient(q_CK, k_CK, beta_1C, do_CV, saved: Saved, dstate_VK, decays, scheme, spread_CY, same_CC=None):
    """Gradients of a chunk's inputs and of its entering state.

    Args:
        q_CK, k_CK: float32, normalised, q scaled.
        beta_1C: float32, not 0.
        do_CV: gradient of the output; its dtype is the operands' dtype of every product.
        saved: by the forward pass, in do's dtype.
        dstate_VK: float32 gradient of the leaving state.
        decays: of the chunk by `scheme`; documents already cut in from_start, to_end and whole.
        scheme: the module that knows the decays, kda_blocks or kda_levels.
        spread_CY: scheme.sum_matrix transposed, repeated once a bfloat16 part of a log's gradient.
        same_CC: whether two tokens are of one document; None for one document.
    """
    dtype, C = do_CV.dtype, q_CK.shape[0]

    def product(x, y, contract="mk,kn"):
        return dot(x, y, contract, dtype)

    q_start, k_start, k_end = q_CK * decays.from_start, k_CK * decays.from_start, k_CK * decays.to_end
    u_VC = saved.u_VC.astype(jnp.float32)
    written_VC = (beta_1C * u_VC).astype(dtype)
    qk_CC, inverse_CC = saved.scores_C2C[:, :C], saved.scores_C2C[:, C:]

    do_VC = do_CV.T
    yield
    d_written_VC = product(do_VC, qk_CC) + product(dstate_VK, k_end, "mk,nk")
    yield
    dx_VC = product(beta_1C * d_written_VC, inverse_CC)
    yield
    d_reads_VX = jnp.concatenate([do_VC, -dx_VC.astype(dtype)], axis=1)
    reads_XK = jnp.concatenate([q_start, k_start]).astype(dtype)
    dstate_in_VK = decays.whole * dstate_VK + product(d_reads_VX, reads_XK)
    dbeta_1C = jnp.sum(dx_VC * u_VC, axis=0, keepdims=True) / beta_1C

    dx_CV = dx_VC.T
    yield
    d_reads_XV = jnp.concatenate([do_CV, -dx_CV.astype(dtype)])
    d_starts = product(d_reads_XV, saved.state_VK)
    d_q_start, d_k_start = d_starts[:C], d_starts[C:]
    yield
    d_k_end = product(written_VC.T, dstate_VK)
    d_whole_1K = decays.whole * jnp.sum(saved.state_VK.astype(jnp.float32) * dstate_VK, axis=0, keepdims=True)

    yield
    causal_XC = _causal(C)
    if same_CC is not None:
        causal_XC &= jnp.concatenate([same_CC, same_CC])
    d_scores_XC = jnp.where(causal_XC, product(d_reads_XV, written_VC), 0.0)
    yield
    dq, dk, pair_logs = yield from scheme.pair_gradient(q_CK, k_CK, d_scores_XC, decays, dtype)
    dq += d_q_start * decays.from_start
    dk += d_k_start * decays.from_start + d_k_end * decays.to_end
    yield
    d_start_logs, d_end_logs = d_q_start * q_start + d_k_start * k_start, d_k_end * k_end
    parts = 3 if dtype == jnp.float32 else 2
    dg = scheme.log_gradient(d_start_logs, d_end_logs, d_whole_1K, pair_logs, spread_CY, parts)
    return Gradients(dq, dk, dx_CV, dg, dbeta_1C, dstate_in_VK)


def _causal(C):
    """[2 C, C]: queries j <= i above keys j < i."""
    row, column = iotas(2 * C, C)
    return ((row < C) & (column <= row)) | (column < row - C)
