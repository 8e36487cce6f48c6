"""What the chip's bfloat16 products do to KDA, measured where they are the same: with bfloat16 operands, interpreted.

A float32 product at default precision is one bfloat16 pass on a TPU and exact when interpreted, so no kernel may hold
one: then what is measured here is what the chip gives, up to the order of sums in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from tests.pallas_kernels.kernel_cases import ARRAYS, exact, random_case

T, K, V = 256, 128, 128
RMS = {"o": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3, "dg": 2e-2, "dbeta": 2e-2}
FLOORS = [None, -5.0]


def gates():
    """Log decays of both families, saturated and mild."""
    z = np.random.default_rng(0).standard_normal((T, K))
    return {
        "bounded, saturated": -5 / (1 + np.exp(-z - 6)),
        "bounded, mild": -5 / (1 + np.exp(-z + 6)),
        "bounded, spread": -5 / (1 + np.exp(-3 * z)),
        "softplus, saturated": -16 * np.logaddexp(0, z + 6),
        "softplus, mild": -np.logaddexp(0, z - 6),
    }


def run(x, scale, floor=None):
    def objective(x):
        arrays = (x[name][:, :, None] for name in ARRAYS)
        state = x["initial_state"][:, None]
        out = kda(*arrays, scale=scale, initial_state_BJKV=state, decay_floor=floor)
        o = out.o_BTJV[:, :, 0]
        return jnp.sum(o.astype(jnp.float32) * x["do"]) + jnp.sum(out.final_state_BJKV[:, 0] * x["dfinal_state"]), o

    grads, o = jax.grad(objective, has_aux=True)(x)
    return {"o": o} | {f"d{name}": grads[name] for name in ARRAYS}


@pytest.mark.parametrize("floor", FLOORS)
def test_error_of_bfloat16_inputs(floor):
    names = [name for name, g in gates().items() if floor is None or g.min() >= floor]
    cases = [random_case(i, T, K, V, gate=gates()[name]) for i, name in enumerate(names)]
    for case in cases:
        for name in ("q", "k", "v", "do", "beta"):
            case[name] = np.asarray(jnp.asarray(case[name], jnp.bfloat16), np.float32)
    x = {name: np.stack([case[name] for case in cases]) for name in cases[0]}
    rounded = {name: jnp.asarray(x[name], jnp.bfloat16) for name in ("q", "k", "v", "beta", "do")}
    got = jax.jit(functools.partial(run, scale=K**-0.5, floor=floor))(x | rounded)
    for i, (name, case) in enumerate(zip(names, cases, strict=True)):
        want = exact(case | {"q": case["q"] * np.float64(K**-0.5)})
        want["dq"] = want["dq"] * K**-0.5
        for n, bound in RMS.items():
            error = np.asarray(got[n][i], np.float64) - want[n]
            assert np.sqrt(np.mean(error**2) / np.mean(want[n] ** 2)) < bound, (name, n)


def equations(jaxpr):
    """Every equation of a jaxpr and of all jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def products(jaxpr):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]


def careless(jaxpr):
    """Products of float32 (or mixed) operands that do not ask for full precision."""
    return [
        eqn
        for eqn in products(jaxpr)
        if any(v.aval.dtype != jnp.bfloat16 for v in eqn.invars)
        and eqn.params["precision"] != (jax.lax.Precision.HIGHEST,) * 2
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("floor", FLOORS)
def test_no_float32_product_at_default_precision(floor, dtype):
    shapes = {"q": (T, K), "k": (T, K), "v": (T, V), "g": (T, K), "beta": (T,), "do": (T, V)}
    x = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, shape in shapes.items()}
    x |= {name: jax.ShapeDtypeStruct((1, K, V), jnp.float32) for name in ("initial_state", "dfinal_state")}
    jaxpr = jax.make_jaxpr(functools.partial(run, scale=1.0, floor=floor))(x).jaxpr
    kernels = [eqn.params for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call"]
    assert {kernel["name"] for kernel in kernels} == {"kda_forward", "kda_backward"}
    for kernel in kernels:
        assert len(products(kernel["jaxpr"])) > 15
        assert not careless(kernel["jaxpr"])


def test_a_careless_product_is_found():
    x = jnp.ones((8, 8))
    assert careless(jax.make_jaxpr(jax.jit(lambda x: jnp.dot(x, x)))(x).jaxpr)
    assert careless(jax.make_jaxpr(lambda x: jnp.dot(x, x.astype(jnp.bfloat16)))(x).jaxpr)
