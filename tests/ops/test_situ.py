"""SiTU against its formula, bound and limits."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.situ import situ_glu, swiglu
from tests.conftest import rel_error


def test_formula_and_gradient():
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=50) * 6, rng.normal(size=50) * 40
    sigmoid, tanh_g, tanh_u = 1 / (1 + np.exp(-gate)), np.tanh(gate / 4), np.tanh(up / 25)
    with jax.enable_x64(True):
        value, (d_gate, d_up) = jax.value_and_grad(lambda g, u: situ_glu(g, u).sum(), (0, 1))(
            jnp.asarray(gate), jnp.asarray(up)
        )
    assert rel_error(value, (4 * tanh_g * sigmoid * 25 * tanh_u).sum()) < 1e-14
    # spec §5.2's derivatives
    want_gate = ((1 - tanh_g**2) * sigmoid + 4 * tanh_g * sigmoid * (1 - sigmoid)) * 25 * tanh_u
    assert rel_error(d_gate, want_gate) < 1e-14
    assert rel_error(d_up, 4 * tanh_g * sigmoid * (1 - tanh_u**2)) < 1e-14


def test_bounded_and_tends_to_swiglu():
    big = jnp.asarray([-1e30, -50.0, 0.0, 50.0, 1e30])
    assert float(jnp.abs(situ_glu(big, big)).max()) <= 100.0
    gate, up = jnp.asarray([-2.0, 0.5, 3.0]), jnp.asarray([1.0, -4.0, 2.0])
    np.testing.assert_allclose(situ_glu(gate, up, 1e4, 1e4), swiglu(gate, up), rtol=1e-5)
    np.testing.assert_allclose(situ_glu(gate, up, 1e4, None), swiglu(gate, up), rtol=1e-5)


def test_dtype_is_kept_and_evaluated_wide():
    gate = jnp.asarray([3.0], jnp.bfloat16)
    assert situ_glu(gate, gate).dtype == jnp.bfloat16
    assert situ_glu(gate, gate) == situ_glu(gate.astype(jnp.float32), gate.astype(jnp.float32)).astype(jnp.bfloat16)
