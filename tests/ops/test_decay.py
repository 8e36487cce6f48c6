"""Both decay gates against their formulas in float64 and the analytic gradients of spec §2.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.decay import bounded_decay, softplus_decay
from tests.conftest import rel_error


def inputs(dtype=np.float32):
    random = np.random.default_rng(0)
    z = 4 * random.standard_normal((2, 5, 3, 8))
    return z.astype(dtype), random.uniform(-1, 2, 3).astype(dtype), random.standard_normal(z.shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_softplus_decay_and_gradients():
    z, a_log, dg = inputs(np.float64)
    rate = np.exp(a_log)[:, None]
    with jax.enable_x64(True):
        g, pull = jax.vjp(softplus_decay, z, a_log)
        dz, da = pull(dg)
    assert rel_error(g, -rate * np.log1p(np.exp(z))) < 1e-14
    assert rel_error(dz, -rate * sigmoid(z) * dg) < 1e-14
    assert rel_error(da, np.sum(dg * np.asarray(g), axis=(0, 1, 3))) < 1e-14


def test_bounded_decay_and_gradients():
    z, a_log, dg = inputs(np.float64)
    slope, bound = np.exp(a_log)[:, None], -3.0
    with jax.enable_x64(True):
        g, pull = jax.vjp(lambda z, a: bounded_decay(z, a, bound), z, a_log)
        dz, da = pull(dg)
    s = sigmoid(slope * z)
    assert rel_error(g, bound * s) < 1e-14
    assert rel_error(dz, dg * bound * s * (1 - s) * slope) < 1e-14
    assert rel_error(da, np.sum(dg * bound * s * (1 - s) * slope * z, axis=(0, 1, 3))) < 1e-14


def test_bounded_decay_without_slope():
    z, _, _ = inputs()
    assert rel_error(bounded_decay(z, None), -5 * sigmoid(np.float64(z))) < 1e-6


@pytest.mark.parametrize("gate", [softplus_decay, bounded_decay])
def test_saturated_gates_are_finite(gate):
    """Large z forgets, small z keeps; both ends, and their gradients, stay finite and of the right sign."""
    z = np.array([-1e4, -100, 0, 100, 1e4], np.float32)[:, None, None]
    g, pull = jax.vjp(gate, z, np.zeros(1, np.float32))
    assert np.isfinite(g).all() and np.all(np.diff(np.asarray(g).ravel()) <= 0) and np.all(np.asarray(g) <= 0)
    assert all(np.isfinite(grad).all() for grad in pull(jnp.ones_like(g)))


@pytest.mark.parametrize("gate", [softplus_decay, bounded_decay])
def test_bfloat16_is_widened(gate):
    z, a_log, _ = inputs()
    z = jnp.asarray(z, jnp.bfloat16)
    g = gate(z, jnp.asarray(a_log, jnp.bfloat16))
    assert g.dtype == jnp.float32
    assert rel_error(g, gate(np.float32(z), np.float32(jnp.asarray(a_log, jnp.bfloat16)))) < 1e-6


def test_bound_must_be_negative():
    with pytest.raises(ValueError, match=r"lower_bound is 5\.0; a log decay must be negative"):
        bounded_decay(jnp.zeros((1, 1, 1, 1)), jnp.zeros(1), 5.0)
