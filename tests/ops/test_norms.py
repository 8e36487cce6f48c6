"""The two normalisations against their formulas, with the traps of spec §12."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.norms import l2_norm, rms_norm
from tests.conftest import rel_error


def test_formulas():
    x, gain = np.random.default_rng(0).normal(size=(3, 8)) * 1e-3, np.arange(1.0, 9.0)
    with jax.enable_x64(True):
        rms, l2 = rms_norm(jnp.asarray(x), jnp.asarray(gain), 1e-5), l2_norm(jnp.asarray(x))
    assert rel_error(rms, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain) < 1e-14
    assert rel_error(l2, x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)) < 1e-14


def test_zero_has_a_finite_gradient():
    for norm in (l2_norm, lambda x: rms_norm(x, jnp.ones(4), 1e-5)):
        assert np.isfinite(jax.jacobian(norm)(jnp.zeros(4))).all()


def test_gain_multiplies_after_the_cast_back():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 16)), jnp.bfloat16)
    gain = jnp.asarray(np.random.default_rng(2).normal(size=16), jnp.float32)
    unit = rms_norm(x, jnp.ones(16), 1e-5)
    assert unit.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rms_norm(x, gain, 1e-5), unit * gain.astype(jnp.bfloat16))
