"""The short causal convolution in front of KDA's queries, keys and values."""

import jax
import jax.numpy as jnp

from k3jax.ops.precision import upcast


def short_conv(x_BTHK: jax.Array, taps_HKX: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    """Causal depthwise convolution over time; no bias, no activation.

    y_t = sum_j taps[..., j] x_{t - X + 1 + j}: the last tap multiplies the current token, and what lies before
    the row or before the token's document counts as zero.

    Args:
        x_BTHK: input, any float dtype.
        taps_HKX: X taps a channel.
        segment_ids_BT: equal neighbours are one document, 0 is padding (input and output 0 there).
    Returns:
        [B, T, H, K] in x's dtype; sums are float32 or wider.
    Source: spec §2.1, §2.7.
    """
    num_taps = taps_HKX.shape[-1]
    T = x_BTHK.shape[1]
    wide, taps = upcast(x_BTHK), upcast(taps_HKX)
    y = wide * taps[..., -1]
    reach_BT = adjacent_BT = None if segment_ids_BT is None else _same_as_before(segment_ids_BT)
    for back in range(1, min(num_taps, T)):
        shifted = jnp.pad(wide[:, :-back], ((0, 0), (back, 0), (0, 0), (0, 0)))
        if reach_BT is not None:
            shifted = jnp.where(reach_BT[..., None, None], shifted, 0)
            # t reaches back one more if t - 1 reached this far: an id that returns (A, B, A) does not fool it.
            reach_BT = adjacent_BT & jnp.pad(reach_BT[:, :-1], ((0, 0), (1, 0)))
        y = y + shifted * taps[..., -1 - back]
    if segment_ids_BT is not None:
        y = jnp.where((segment_ids_BT != 0)[..., None, None], y, 0)
    return y.astype(x_BTHK.dtype)


def _same_as_before(segment_ids_BT: jax.Array) -> jax.Array:
    return jnp.pad(segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
