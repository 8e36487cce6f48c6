"""Next-token cross entropy over a large vocabulary, without ever holding the logits of a whole batch."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.precision import exact, wide_dtype

# Logits a chunk may hold: 2^24 in float32 are 64 MiB. A vocabulary of bytes then has one chunk at usual sizes.
_CHUNK_LOGITS = 2**24
# A mesh shares the batch out, so a chunk of a large batch may be larger than that; fewer columns would be slow.
_MIN_COLUMNS = 16


class Loss(NamedTuple):
    """Sums over the tokens that have a target. Divide by the count of the global batch for means."""

    nats: jax.Array
    z: jax.Array
    count: jax.Array
    correct: jax.Array


def next_token_loss(
    hidden_BTD: jax.Array,
    head_DW: jax.Array,
    targets_BT: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Loss:
    """Sums cross entropy over the tokens with a target, one chunk of columns of the batch at a time.

    nats = sum(logsumexp(logits) - logits[target]) and z = z_loss * sum(logsumexp(logits)^2), with logits
    float32 or wider. The gradient computes each chunk's logits again from the arguments and one log-sum-exp
    a token, so that neither pass holds more than a chunk of them.

    Args:
        hidden_BTD: [B, T, D] final hidden states; row t predicts targets[:, t].
        head_DW: [D, W] output head.
        targets_BT: int [B, T] tokens to predict, below W; a negative one is ignored.
        z_loss: weight of the squared log-sum-exp.
        chunk_size: tokens a chunk, rounded down to whole columns of the batch (at least one); need not divide
            anything. None keeps a chunk under 2^24 logits, or at 16 columns where those are more.

    Returns:
        Loss: nats and z, float32 or wider; count and correct (the first largest logit is the target's), int32.
        Without any target every field and every gradient is 0.

    Raises:
        ValueError: shapes that do not fit, or a chunk size below 1.

    Source: spec §1.4 (loss in float32).
    """
    rows = _rows(hidden_BTD, head_DW, targets_BT, chunk_size)
    valid_BT = targets_BT >= 0
    square_BT = jnp.where(valid_BT, rows.logsumexp_BT, 0) ** 2
    return Loss(
        nats=jnp.sum(jnp.where(valid_BT, rows.nats_BT, 0)),
        z=z_loss * jnp.sum(square_BT),
        count=jnp.sum(valid_BT, dtype=jnp.int32),
        correct=jnp.sum(rows.first_BT == targets_BT, dtype=jnp.int32),
    )


class _Rows(NamedTuple):
    nats_BT: jax.Array
    logsumexp_BT: jax.Array
    first_BT: jax.Array


def _rows(hidden_BTD, head_DW, targets_BT, chunk_size) -> _Rows:
    if hidden_BTD.ndim != 3 or head_DW.ndim != 2 or head_DW.shape[0] != hidden_BTD.shape[2]:
        raise ValueError(
            f"next_token_loss: hidden must be [B, T, D] and head [D, W], got {hidden_BTD.shape} and {head_DW.shape}"
        )
    if targets_BT.shape != hidden_BTD.shape[:2] or not jnp.issubdtype(targets_BT.dtype, jnp.integer):
        raise ValueError(
            f"next_token_loss: targets must be integers {hidden_BTD.shape[:2]} to fit hidden, "
            f"got {targets_BT.dtype} {targets_BT.shape}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"next_token_loss: chunk_size must be at least 1, got {chunk_size}")
    (B, T), W = targets_BT.shape, head_DW.shape[1]
    columns = max(_MIN_COLUMNS, _CHUNK_LOGITS // (B * W)) if chunk_size is None else max(1, chunk_size // B)
    dtype = jnp.result_type(hidden_BTD, head_DW)
    return _chunked(hidden_BTD.astype(dtype), head_DW.astype(dtype), targets_BT, min(columns, T))


def _dot(spec, a, b):
    return jnp.einsum(spec, a, b, precision=exact(a.dtype), preferred_element_type=wide_dtype(a.dtype))


# C is the columns of a chunk and N the number of chunks: a chunk is [B, C], so that a sharded batch stays sharded.


def _split(x_BTX, C):
    """[B, T, ...] -> [N, B, C, ...], zeros after the end."""
    B, T, *rest = x_BTX.shape
    N = -(-T // C)
    x_BTX = jnp.pad(x_BTX, ((0, 0), (0, N * C - T), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x_BTX.reshape(B, N, C, *rest), 1, 0)


def _join(x_NBCX, T):
    N, B, C, *rest = x_NBCX.shape
    return jnp.moveaxis(x_NBCX, 0, 1).reshape(B, N * C, *rest)[:, :T]


def _is_target(targets_BC, W):
    return targets_BC[..., None] == jnp.arange(W, dtype=targets_BC.dtype)


def _forward(hidden_BTD, head_DW, targets_BT, C):
    W = head_DW.shape[1]

    def chunk(_, xs):
        hidden_BCD, targets_BC = xs
        logits_BCW = _dot("bcd,dw->bcw", hidden_BCD, head_DW)
        top_BC = jnp.max(logits_BCW, axis=-1)
        total_BC = jnp.sum(jnp.exp(logits_BCW - top_BC[..., None]), axis=-1)
        logsumexp_BC = top_BC + jnp.log(total_BC)
        # A masked sum and a masked minimum instead of a gather and an argmax: plain reductions, which also
        # stay local when the vocabulary is sharded.
        hit_BC = jnp.sum(jnp.where(_is_target(targets_BC, W), logits_BCW, 0), axis=-1)
        index_W = jnp.arange(W, dtype=jnp.int32)
        first_BC = jnp.min(jnp.where(logits_BCW == top_BC[..., None], index_W, W), axis=-1)
        return None, _Rows(logsumexp_BC - hit_BC, logsumexp_BC, first_BC)

    _, rows = lax.scan(chunk, None, (_split(hidden_BTD, C), _split(targets_BT, C)))
    rows = jax.tree.map(lambda x: _join(x, hidden_BTD.shape[1]), rows)
    return rows, (hidden_BTD, head_DW, targets_BT, rows.logsumexp_BT)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(hidden_BTD, head_DW, targets_BT, C) -> _Rows:
    return _forward(hidden_BTD, head_DW, targets_BT, C)[0]


def _backward(C, saved, cotangents):
    hidden_BTD, head_DW, targets_BT, logsumexp_BT = saved
    dtype, wide, W = head_DW.dtype, logsumexp_BT.dtype, head_DW.shape[1]
    dnats_BT, dsum_BT = cotangents.nats_BT, cotangents.nats_BT + cotangents.logsumexp_BT

    def chunk(dhead_DW, xs):
        hidden_BCD, targets_BC, logsumexp_BC, dnats_BC, dsum_BC = xs
        p_BCW = jnp.exp(_dot("bcd,dw->bcw", hidden_BCD, head_DW) - logsumexp_BC[..., None])
        hit_BCW = jnp.where(_is_target(targets_BC, W), dnats_BC[..., None], 0)
        dlogits_BCW = (p_BCW * dsum_BC[..., None] - hit_BCW).astype(dtype)
        dhead_DW += _dot("bcd,bcw->dw", hidden_BCD, dlogits_BCW)
        return dhead_DW, _dot("bcw,dw->bcd", dlogits_BCW, head_DW).astype(dtype)

    # Columns past the end have zero cotangents, and so add exactly nothing.
    xs = tuple(_split(x, C) for x in (hidden_BTD, targets_BT, logsumexp_BT, dnats_BT, dsum_BT))
    dhead_DW, dhidden_NBCD = lax.scan(chunk, jnp.zeros(head_DW.shape, wide), xs)
    return _join(dhidden_NBCD, hidden_BTD.shape[1]), dhead_DW.astype(dtype), None


_chunked.defvjp(_forward, _backward)
