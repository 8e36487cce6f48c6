"""Both forms of KDA against stored float64 references: outputs, states and every gradient."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.decay import bounded_decay, softplus_decay
from k3jax.ops.delta_attention import kda
from tests.conftest import FIXTURES, rel_error
from tests.ops.kda_cases import run_quickly_compiled

FOLDER = FIXTURES / "kda_ops"
CASES = json.loads((FOLDER / "cases.json").read_text())
PACKED = [name for name in CASES if CASES[name]["cu_seqlens"]]
INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
# Values and gradients agree to this in float32, whatever the decay.
FLOAT32_TOLERANCE = 1e-5


def apply(case, x, implementation, segment_ids=None):
    """The case's op from its raw inputs: gate and normalisation inside, so that gradients reach what is stored."""
    q, k, g = x["q"], x["k"], x["g"]
    if case["qk_l2norm"]:
        q, k = (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    if case["gate"] != "log":
        z = g + x["dt_bias"].reshape(g.shape[2:])
        bounded = case["gate"] == "lower_bound"
        g = bounded_decay(z, x["A_log"], case["lower_bound"]) if bounded else softplus_decay(z, x["A_log"])
    return kda(
        q,
        k,
        x["v"],
        g,
        x["beta"],
        scale=case["scale"],
        initial_state_BJKV=x.get("initial_state"),
        segment_ids_BT=segment_ids,
        implementation=implementation,
        # float32 in chunks as users get them, float64 in smaller ones: two sizes covered, and less to compile.
        chunk_size=None if q.dtype == jnp.float32 else 16,
    )


def objective_gradients(case, x, do, dfinal_state, implementation, segment_ids=None):
    def objective(x):
        o, final_state = apply(case, x, implementation, segment_ids)
        loss = jnp.sum(o * do)
        if dfinal_state is not None:
            loss += jnp.sum(final_state * dfinal_state)
        return loss, {"o": o, "final_state": final_state}

    grads, out = run_quickly_compiled(jax.grad(objective, has_aux=True), x)
    return out | {f"d{name}": grad for name, grad in grads.items()}


def segments_apart(case, x, stored, implementation):
    """Every segment run alone, as rows of one batch padded with tokens of all zeros, which change nothing."""
    starts = np.asarray(case["cu_seqlens"])
    lengths = np.diff(starts)
    index = starts[:-1, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    inside = np.arange(lengths.max()) < lengths[:, None]

    def rows(a):
        return jnp.where(inside.reshape(*inside.shape, *[1] * (a.ndim - 2)), jnp.asarray(a)[0, index], 0)

    apart = {name: a if name == "initial_state" else rows(a) for name, a in x.items()}
    do, dfinal_state = rows(stored["do"]), stored["dfinal_state"]
    got = objective_gradients(case, apart, do, dfinal_state, implementation)
    whole = ("final_state", "dinitial_state")
    return {
        name: a if name in whole else np.concatenate([np.asarray(a)[i, :n] for i, n in enumerate(lengths)])[None]
        for name, a in got.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
@pytest.mark.parametrize("name", CASES)
def test_matches_stored_reference(name, implementation, dtype):
    case = CASES[name]
    with np.load(FOLDER / f"{name}.npz") as stored, jax.enable_x64(dtype == "float64"):
        x = {n: np.asarray(stored[n], dtype) for n in INPUTS if n in stored}
        if case["cu_seqlens"]:
            got = segments_apart(case, x, stored, implementation)
        else:
            got = objective_gradients(case, x, stored["do"], stored["dfinal_state"], implementation)
        assert set(got) == {"o", "final_state", *(f"d{n}" for n in x)}
        for n, value in got.items():
            assert value.dtype == dtype, n
            exact = stored[n].dtype == np.float64
            tolerance = FLOAT32_TOLERANCE if dtype == "float32" else 1e-10 if exact else 1e-7
            assert rel_error(value, stored[n]) < tolerance, n


@pytest.mark.parametrize(
    ("implementation", "dtype"), [("recurrent", "float64"), ("chunked", "float32"), ("chunked", "float64")]
)
@pytest.mark.parametrize("name", PACKED)
def test_packed_call_matches_segments_apart(name, implementation, dtype):
    """One call with segment ids; a row takes one initial state, so without any the stored outputs must come back."""
    case = CASES[name]
    with np.load(FOLDER / f"{name}.npz") as stored, jax.enable_x64(dtype == "float64"):
        x = {n: np.asarray(stored[n], dtype) for n in INPUTS if n in stored}
        first_state = x.pop("initial_state", None)
        ids = np.repeat(np.arange(1, len(case["cu_seqlens"])), np.diff(case["cu_seqlens"]))[None]
        zero_states = stored["dfinal_state"].copy()
        zero_states[:-1] = 0  # a packed row gives only its last segment's state
        apart_stored = {"do": stored["do"], "dfinal_state": zero_states}
        packed_x, apart_x = dict(x), dict(x)
        if first_state is not None:
            packed_x["initial_state"] = first_state[:1]
            apart_x["initial_state"] = first_state.copy()
            apart_x["initial_state"][1:] = 0
        want = segments_apart(case, apart_x, apart_stored, "recurrent")
        got = objective_gradients(case, packed_x, stored["do"], zero_states[-1:], implementation, ids.astype(np.int32))
        tolerance = FLOAT32_TOLERANCE if dtype == "float32" else 1e-12
        for n, value in got.items():
            last = {"final_state": want[n][-1:], "dinitial_state": want[n][:1]}.get(n, want[n])
            assert rel_error(value, last) < tolerance, n
        if first_state is None:
            assert rel_error(got["o"], stored["o"]) < (FLOAT32_TOLERANCE if dtype == "float32" else 1e-10)
