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
from pallas_kernels.kda_levels import Decays, exact_dot


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


def chunk_gradient(
    q_CK, k_CK, beta_1C, do_CV, saved: Saved, dstate_VK, decays: Decays, sums_XC, same_CC=None
) -> Gradients:
    """Gradients of a chunk's inputs and of its entering state.

    Args:
        q_CK, k_CK: float32, normalised, q scaled.
        beta_1C: float32, not 0.
        do_CV: gradient of the output; its dtype is the operands' dtype of every product.
        saved: by the forward pass, in do's dtype.
        dstate_VK: float32 gradient of the leaving state.
        decays: of the chunk; documents already cut in from_start, to_end and whole.
        sums_XC: kda_levels.sum_matrix.
        same_CC: whether two tokens are of one document; None for one document.
    """
    dtype, C = do_CV.dtype, q_CK.shape[0]

    def product(x, y, contract="mk,kn"):
        return dot(x, y, contract, dtype)

    q_start, k_start, k_end = q_CK * decays.from_start, k_CK * decays.from_start, k_CK * decays.to_end
    written_VC = (beta_1C * saved.u_VC.astype(jnp.float32)).astype(dtype)
    written_CV = written_VC.T
    qk_CC, inverse_CC = saved.scores_C2C[:, :C], saved.scores_C2C[:, C:]

    do_VC = do_CV.T
    d_written_VC = product(do_VC, qk_CC) + product(dstate_VK, k_end, "mk,nk")
    dx_VC = product(beta_1C * d_written_VC, inverse_CC)
    d_reads_VX = jnp.concatenate([do_VC, -dx_VC.astype(dtype)], axis=1)
    reads_XK = jnp.concatenate([q_start, k_start]).astype(dtype)
    dstate_in_VK = decays.whole * dstate_VK + product(d_reads_VX, reads_XK)
    dbeta_1C = jnp.sum(dx_VC * saved.u_VC.astype(jnp.float32), axis=0, keepdims=True) / beta_1C

    dx_CV = dx_VC.T
    d_reads_XV = jnp.concatenate([do_CV, -dx_CV.astype(dtype)])
    d_starts = product(d_reads_XV, saved.state_VK)
    d_q_start, d_k_start = d_starts[:C], d_starts[C:]
    d_k_end = product(written_CV, dstate_VK)
    dq, dk = d_q_start * decays.from_start, d_k_start * decays.from_start + d_k_end * decays.to_end
    d_start_logs = d_q_start * q_start + d_k_start * k_start
    d_whole_1K = decays.whole * jnp.sum(saved.state_VK.astype(jnp.float32) * dstate_VK, axis=0, keepdims=True)
    last = iotas(*q_CK.shape)[0] == C - 1
    logs = [d_start_logs + jnp.where(last, d_whole_1K, 0.0), d_k_end * k_end]

    # Queries above keys; and transposed, by a product, which is cheaper than a transpose.
    d_scores_XC, d_scores_CX = product(d_reads_XV, written_VC), product(written_CV, d_reads_VX)
    causal_XC, causal_CX = _causal(C, 0), _causal(C, 1)
    if same_CC is not None:
        causal_XC &= jnp.concatenate([same_CC, same_CC])
        causal_CX &= jnp.concatenate([same_CC, same_CC], axis=1)
    for level in decays.levels:
        mask_XC, mask_CX = causal_XC, causal_CX
        if level.pairs is not None:
            mask_XC &= jnp.concatenate([level.pairs, level.pairs])
            mask_CX &= jnp.concatenate([level.pairs, level.pairs], axis=1)
        rows = jnp.concatenate([q_CK * level.row, k_CK * level.row]).astype(dtype)
        columns = (k_CK * level.column).astype(dtype)
        d_rows = product(jnp.where(mask_XC, d_scores_XC, 0.0), columns)
        d_columns = product(jnp.where(mask_CX, d_scores_CX, 0.0), rows)
        dq += d_rows[:C] * level.row
        dk += d_rows[C:] * level.row + d_columns * level.column
        if level.log_sign is not None:
            d_row_logs = rows.astype(jnp.float32) * d_rows
            d_column_logs = columns.astype(jnp.float32) * d_columns
            logs.append(d_row_logs[:C] + d_row_logs[C:] + level.log_sign * d_column_logs)
    dg = exact_dot(sums_XC, jnp.concatenate(logs), "km,kn", 3 if dtype == jnp.float32 else 2)
    return Gradients(dq, dk, dx_CV, dg, dbeta_1C, dstate_in_VK)


def _causal(C, row_axis):
    """Queries j <= i above keys j < i, [2 C, C]; or its transpose."""
    shape = (C, 2 * C) if row_axis else (2 * C, C)
    row, column = iotas(*shape)[row_axis], iotas(*shape)[1 - row_axis]
    return ((row < C) & (column <= row)) | (column < row - C)
