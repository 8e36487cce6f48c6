"""KDA and its short convolution with the sequence over a mesh axis ("context"), called inside `jax.shard_map`.

What a rank's tokens do to a state is affine: S leaves as M S + A, and a token that reads from S reads o + r S more. So
every rank runs once, on values widened by a state that starts as the identity, and has o, A, r and M; the pair (M, A),
whose size does not depend on T, is gathered once; each rank folds the pairs of the ranks before it into the state that
enters it and adds r S to its outputs. Gradients follow by transposition: the gather becomes a sum of scattered parts.

Counted a rank, batch row and value head: K (K + V) numbers travel, products with the state are K + V wide instead of V,
and there is one more, [T, K] x [K, V].
"""

import jax
import jax.numpy as jnp

from k3jax.ops.delta_attention import Implementation, KDAOutput, kda
from k3jax.ops.prefill import continues_document
from k3jax.ops.short_conv import short_conv

HIGHEST = jax.lax.Precision.HIGHEST


def context_kda(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTJV: jax.Array,
    g_BTJK: jax.Array,
    beta_BTJ: jax.Array,
    *,
    axis_name: str,
    scale: float | None = None,
    initial_state_BJKV: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation = "auto",
    decay_floor: float | None = None,
) -> KDAOutput:
    """`kda` on this rank's consecutive T tokens of sequences that lie over a mesh axis.

    Args:
        q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ: this rank's tokens, as `kda` takes them; rank 0 holds the first ones.
        axis_name: mesh axis over the sequence.
        scale, chunk_size, implementation, decay_floor: as `kda` takes them.
        initial_state_BJKV: state before the first token of rank 0, the same on every rank; None means zeros.
        segment_ids_BT: this rank's ids; a document may span any number of ranks. An id that goes on across a boundary
          is the same document.

    Returns:
        KDAOutput: o_BTJV of this rank's tokens in v's dtype; final_state_BJKV after the last non-padding token of the
        whole sequence, the same on every rank, float32 or wider.

    Raises:
        ValueError: whatever `kda` refuses.

    Source: spec §2.9.
    """
    B, _, J, V = v_BTJV.shape
    K = q_BTHK.shape[-1]
    rank, ranks = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    wide = jnp.result_type(q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ, jnp.float32)
    if initial_state_BJKV is None:
        state_BJKV = jnp.zeros((B, J, K, V), wide)
    else:
        wide = jnp.promote_types(wide, initial_state_BJKV.dtype)
        state_BJKV = initial_state_BJKV.astype(wide)

    identity_BJKK = jnp.broadcast_to(jnp.eye(K, dtype=wide), (B, J, K, K))
    if segment_ids_BT is not None:
        carries_on_B = continues_document(segment_ids_BT, *_before(segment_ids_BT, axis_name))
        identity_BJKK = jnp.where(carries_on_B[:, None, None, None], identity_BJKK, 0)
    # The reads r must not be rounded to v's dtype before they meet the state.
    values_BTJX = jnp.pad(v_BTJV.astype(wide), [(0, 0)] * 3 + [(0, K)])
    start_BJKX = jnp.concatenate([jnp.zeros((B, J, K, V), wide), identity_BJKK], axis=-1)
    o_BTJX, pair_BJKX = kda(
        q_BTHK, k_BTHK, values_BTJX, g_BTJK, beta_BTJ, scale=scale, initial_state_BJKV=start_BJKX,
        segment_ids_BT=segment_ids_BT, chunk_size=chunk_size, implementation=implementation, decay_floor=decay_floor,
    )  # fmt: skip

    entering_BJKV = state_BJKV
    for before, pair in enumerate(jax.lax.all_gather(pair_BJKX, axis_name)):
        entering_BJKV = jnp.where(rank == before, state_BJKV, entering_BJKV)
        added_BJKV, transition_BJKK = pair[..., :V], pair[..., V:]
        state_BJKV = jnp.einsum("bjkx,bjxv->bjkv", transition_BJKK, state_BJKV, precision=HIGHEST) + added_BJKV
    read_BTJV = jnp.einsum("btjk,bjkv->btjv", o_BTJX[..., V:], entering_BJKV, precision=HIGHEST)
    # The same on all ranks already; summed from one of them, so that shard_map knows it, too.
    final_state_BJKV = jax.lax.psum(jnp.where(rank == ranks - 1, state_BJKV, 0), axis_name)
    return KDAOutput((o_BTJX[..., :V] + read_BTJV).astype(v_BTJV.dtype), final_state_BJKV)


def context_short_conv(
    x_BTHK: jax.Array, taps_HKX: jax.Array, segment_ids_BT: jax.Array | None = None, *, axis_name: str
) -> jax.Array:
    """`short_conv` on this rank's tokens of sequences over a mesh axis; X - 1 tokens come from the rank before.

    Args:
        x_BTHK: this rank's tokens.
        taps_HKX: X taps a channel, the same on every rank.
        segment_ids_BT: this rank's ids, as `short_conv` takes them.
        axis_name: mesh axis over the sequence.

    Returns:
        [B, T, H, K] in x's dtype.

    Raises:
        ValueError: fewer than X - 1 tokens a rank.

    Source: spec §2.1, §2.9.
    """
    halo, T = taps_HKX.shape[-1] - 1, x_BTHK.shape[1]
    if halo == 0:
        return short_conv(x_BTHK, taps_HKX, segment_ids_BT)
    if halo > T:
        raise ValueError(f"context_short_conv: {T} tokens a rank are fewer than the {halo} that the next rank needs")

    def with_halo(array_BT):  # rank 0 gets zeros: no tokens
        return jnp.concatenate([_from_rank_before(array_BT[:, -halo:], axis_name), array_BT], axis=1)

    ids_BT = None if segment_ids_BT is None else with_halo(segment_ids_BT)
    return short_conv(with_halo(x_BTHK), taps_HKX, ids_BT)[:, halo:]


def _before(segment_ids_BT, axis_name):
    """The id of the token before this rank's first (0 = none), and whether any earlier token is not padding."""
    last_id_B = _from_rank_before(segment_ids_BT[:, -1], axis_name)
    any_token_RB = jax.lax.all_gather(jnp.any(segment_ids_BT != 0, axis=1), axis_name)
    earlier_R1 = jnp.arange(any_token_RB.shape[0])[:, None] < jax.lax.axis_index(axis_name)
    return last_id_B, jnp.any(any_token_RB & earlier_R1, axis=0)


def _from_rank_before(array, axis_name):
    """The array of the rank before; zeros on rank 0."""
    ranks = jax.lax.axis_size(axis_name)
    return jax.lax.ppermute(array, axis_name, [(r, r + 1) for r in range(ranks - 1)])
