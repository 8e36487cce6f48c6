"""KDA over a prompt, with the states that a prefix cache keeps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.delta_attention import Implementation, kda


class KDAPrefill(NamedTuple):
    """What the tokens read, the state they leave behind, and the states on the way, N = T // block_size of them."""

    o_BTJV: jax.Array
    final_state_BJKV: jax.Array
    block_states_BNJKV: jax.Array


def kda_prefill(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTJV: jax.Array,
    g_BTJK: jax.Array,
    beta_BTJ: jax.Array,
    *,
    block_size: int,
    scale: float | None = None,
    initial_state_BJKV: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: Implementation = "auto",
    decay_floor: float | None = None,
) -> KDAPrefill:
    """`kda`, and the state after every block of tokens: what a cache of prefixes stores beside the blocks of MLA.

    A row of another length than T is padded on the right with segment id 0: its final state is the one after its last
    token, and so are its states of all blocks behind. A scan over the blocks carries the state, so only the states
    asked for are ever held. State n depends on the tokens before (n + 1) * block_size alone, to the bit.

    Args:
        q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ: as `kda` takes them.
        block_size: tokens between two states, >= 1; a multiple of the chunk wastes no work.
        scale, initial_state_BJKV, segment_ids_BT, chunk_size, implementation, decay_floor: as `kda` takes them.

    Returns:
        KDAPrefill: o_BTJV and final_state_BJKV as `kda` returns them; block_states_BNJKV[:, n] is the state after the
        last non-padding token before position (n + 1) * block_size, in the final state's dtype.

    Raises:
        ValueError: a block size below 1; whatever `kda` refuses.

    Source: spec §2.7, §2.8.
    """
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"kda_prefill: block_size is {block_size!r}; use a positive number of tokens, 64 or 512 say")
    arrays_BT = q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ
    options = {
        "scale": scale, "chunk_size": chunk_size, "implementation": implementation, "decay_floor": decay_floor,
    }  # fmt: skip
    B, T, J, V = v_BTJV.shape
    dtype = jnp.result_type(*arrays_BT, jnp.float32)
    if initial_state_BJKV is None:
        initial_state_BJKV = jnp.zeros((B, J, q_BTHK.shape[-1], V), dtype)
    if block_size >= T:
        o_BTJV, state_BJKV = kda(
            *arrays_BT, initial_state_BJKV=initial_state_BJKV, segment_ids_BT=segment_ids_BT, **options
        )
        return KDAPrefill(o_BTJV, state_BJKV, state_BJKV[:, None][:, : T // block_size])

    def in_blocks(x_BT):  # tokens of zeros fill the last block up and leave the state as it is
        x_BT = jnp.pad(x_BT, [(0, 0), (0, -T % block_size)] + [(0, 0)] * (x_BT.ndim - 2))
        return jnp.moveaxis(x_BT.reshape(B, -1, block_size, *x_BT.shape[2:]), 1, 0)

    def block(carry, x):
        state_BJKV, last_id_B, seen_B = carry
        arrays_BT, ids_BT = x
        if ids_BT is not None:
            carries_on_B = continues_document(ids_BT, last_id_B, seen_B)
            state_BJKV = jnp.where(carries_on_B[:, None, None, None], state_BJKV, 0)
            last_id_B, seen_B = ids_BT[:, -1], seen_B | jnp.any(ids_BT != 0, axis=1)
        o_BTJV, state_BJKV = kda(*arrays_BT, initial_state_BJKV=state_BJKV, segment_ids_BT=ids_BT, **options)
        return (state_BJKV, last_id_B, seen_B), (o_BTJV, state_BJKV)

    ids = None if segment_ids_BT is None else in_blocks(segment_ids_BT)
    no_id_B = jnp.zeros(B, jnp.int32 if segment_ids_BT is None else segment_ids_BT.dtype)
    state_BJKV = initial_state_BJKV.astype(jnp.promote_types(dtype, initial_state_BJKV.dtype))
    carry, (o, states) = jax.lax.scan(
        block, (state_BJKV, no_id_B, no_id_B != 0), (tuple(map(in_blocks, arrays_BT)), ids)
    )
    o_BTJV = jnp.moveaxis(o, 0, 1).reshape(B, -1, J, V)[:, :T]
    return KDAPrefill(o_BTJV, carry[0], jnp.moveaxis(states, 0, 1)[:, : T // block_size])


def continues_document(segment_ids_BT: jax.Array, last_id_B: jax.Array, seen_B: jax.Array) -> jax.Array:
    """Whether the state before a piece of a row belongs to the piece's first document.

    Args:
        segment_ids_BT: ids of the piece.
        last_id_B: id of the token just before it; 0 where that is padding or there is none.
        seen_B: whether any token before the piece is not padding.

    Returns:
        bool [B]: the first document began before the piece; or none began yet, and it takes the initial state; or the
        piece is all padding, and the state passes through.

    Source: spec §2.7.
    """
    is_token_BT = segment_ids_BT != 0
    goes_on_B = is_token_BT[:, 0] & (segment_ids_BT[:, 0] == last_id_B)
    return goes_on_B | ~seen_B | ~jnp.any(is_token_BT, axis=1)
