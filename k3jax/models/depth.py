"""What flows from layer to layer: the running sum, and the depth sources that Attention Residuals read."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Depth(NamedTuple):
    """State between layers (spec §4.2).

    Attributes:
        memory_BTRD: finished sources, oldest first; None = an ordinary residual stream.
        mask_R: which of them are written so far, inside a scan; None = all.
        partial_BTD: the running sum; None at the start of a block.
        started: whether partial_BTD holds anything yet; an array only inside a scan that began with nothing.
    """

    memory_BTRD: jax.Array | None
    mask_R: jax.Array | None = None
    partial_BTD: jax.Array | None = None
    started: jax.Array | bool = True


def source_mask(depth: Depth) -> jax.Array | None:
    """The mask over memory and running sum that a layer needs; None where every source counts."""
    if depth.memory_BTRD is None:
        return None
    known = depth.mask_R
    if depth.partial_BTD is None or (known is None and depth.started is True):
        return known
    if known is None:
        known = jnp.ones(depth.memory_BTRD.shape[2], bool)
    return jnp.append(known, depth.started)


def append(depth: Depth, source_BTD: jax.Array) -> Depth:
    """Writes one more source: into the next free slot of a masked memory, else at the end of a longer one.

    Args:
        depth: with a memory; one with a mask has to have a free slot.
        source_BTD: [B, T, D] in the memory's dtype.
    Returns:
        The depth with the source in its memory; the running sum stays as it is.
    Source: spec §4.2.
    """
    if depth.mask_R is None:
        return depth._replace(memory_BTRD=jnp.concatenate([depth.memory_BTRD, source_BTD[:, :, None]], axis=2))
    slot = jnp.sum(depth.mask_R)
    memory = jax.lax.dynamic_update_slice_in_dim(depth.memory_BTRD, source_BTD[:, :, None], slot, axis=2)
    return depth._replace(memory_BTRD=memory, mask_R=depth.mask_R.at[slot].set(True))


def reserve(depth: Depth, slots: int) -> Depth:
    """A memory with room for `slots` more sources, as a scan needs: its shape stays, its mask fills up.

    Args:
        depth: with a memory that is written in full (no mask yet).
        slots: sources that `append` will add.
    Returns:
        The depth with memory_BTRD [B, T, R + slots, D], zeros at the end, and mask_R true for the first R.
    """
    R = depth.memory_BTRD.shape[2]
    memory = jnp.pad(depth.memory_BTRD, ((0, 0), (0, 0), (0, slots), (0, 0)))
    return depth._replace(memory_BTRD=memory, mask_R=jnp.arange(R + slots) < R)
