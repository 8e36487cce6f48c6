"""Arrays that may differ between devices, as `jax.shard_map` types them."""

import jax
import jax.numpy as jnp


def varying_like(array: jax.Array, *like: jax.Array) -> jax.Array:
    """The array, typed as differing between devices where any of `like` does: a loop's carry must be.

    Only a shard_map that checks this (check_vma=True, its default) asks for it. A choice between equals has the type
    of its condition, and compiles to nothing.

    Args:
        array: any array.
        like: non-empty arrays.

    Returns:
        The same numbers.
    """
    for x in like:
        array = jnp.where(x[(0,) * x.ndim] == 0, array, array)
    return array
