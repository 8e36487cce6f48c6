"""Inside jax.shard_map arrays are typed by the mesh axes they differ along; kernels need that said of their outputs."""

import jax


def varying_alike(arrays):
    """The same arrays (a pytree), each typed as differing along every mesh axis that any of them differs along."""
    axes = frozenset().union(*(_axes(x) for x in jax.tree.leaves(arrays)))

    def cast(x):
        missing = tuple(axes - _axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def output_like(array: jax.Array, shape, dtype) -> jax.ShapeDtypeStruct:
    """An output of a kernel that differs along the mesh axes that `array` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)


def _axes(x):
    return jax.typeof(x).manual_axis_type.varying
