"""What float32 means: never narrowed, and multiplied in full."""

import jax
import jax.numpy as jnp
import pytest

from k3jax.ops.precision import exact, upcast, wide_dtype


@pytest.mark.parametrize(
    ("dtype", "wide", "precision"),
    [
        ("bfloat16", "float32", None),
        ("float16", "float32", None),
        ("float32", "float32", jax.lax.Precision.HIGHEST),
        (jnp.float32, "float32", jax.lax.Precision.HIGHEST),
        ("float64", "float64", jax.lax.Precision.HIGHEST),
    ],
)
def test_dtypes(dtype, wide, precision):
    with jax.enable_x64(True):
        assert wide_dtype(dtype) == wide
        assert upcast(jnp.ones(2, dtype)).dtype == wide
        assert exact(dtype) == precision
