"""KDA against the recurrence at its corners: any decay, repeated keys, causality, state passing, any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.ops.delta_attention import kda, kda_step
from tests.conftest import rel_error
from tests.ops.kda_cases import (
    NAMES,
    compiled_gradients,
    cotangents,
    objective_gradients,
    random_inputs,
    recurrence,
    run_quickly_compiled,
)

FORMS = ["recurrent", "chunked"]
# One shape for most tests here, so that they share compilations: two chunks of 16 and a part of a third.
SHAPE = {"B": 1, "T": 41, "H": 1, "J": 2, "K": 8, "V": 4}


def float64_gradients(x, do, dfinal_state):
    with jax.enable_x64(True):
        x = {name: np.asarray(value, np.float64) for name, value in x.items()}
        out = compiled_gradients("recurrent", 16)(x, np.float64(do), np.float64(dfinal_state))
        return jax.tree.map(np.asarray, out)


def worst_error(x, chunk_size=16):
    """Largest error, over outputs and all gradients, of the float32 chunked form against the float64 recurrence."""
    do, dfinal_state = cotangents(x)
    got = compiled_gradients("chunked", chunk_size)(x, do, dfinal_state)
    want = float64_gradients(x, do, dfinal_state)
    # A gradient that saturated decay wipes out is compared with the size of the others.
    floor = 1e-3 * max(np.max(np.abs(a)) for name, a in want.items() if name.startswith("d"))
    errors = {}
    for name, a in want.items():
        assert np.isfinite(got[name]).all(), name
        errors[name] = np.max(np.abs(got[name] - a)) / max(np.max(np.abs(a)), floor)
    return max(errors.values())


@pytest.mark.parametrize("form", FORMS)
def test_two_tokens_by_hand(form):
    """The error of token 2 is taken after forgetting, and each token reads what it has just written."""
    half, quarter = np.log(0.5), np.log(0.25)
    q = np.array([[1, 0], [1, 1]], np.float32)
    k = np.array([[1, 0], [1, 0]], np.float32)
    v = np.array([[8], [4]], np.float32)
    g = np.array([[half, half], [half, quarter]], np.float32)
    beta = np.array([0.5, 0.25], np.float32)
    state = np.array([[4], [16]], np.float32)
    # Token 1: S = [2, 8]; the error 8 - 2 = 6 is written at 0.5: S = [5, 8]; it reads 5.
    # Token 2: S = [2.5, 2]; the error 4 - 2.5 = 1.5 is written at 0.25: S = [2.875, 2]; it reads 4.875.
    arrays = (x[None, :, None] for x in (q, k, v, g, beta))
    out = kda(*arrays, scale=1.0, initial_state_BJKV=state[None, None], implementation=form)
    np.testing.assert_allclose(out.o_BTJV[0, :, 0, 0], [5, 4.875], rtol=1e-6)
    np.testing.assert_allclose(out.final_state_BJKV[0, 0, :, 0], [2.875, 2], rtol=1e-6)


@pytest.mark.parametrize("gate", [0, -1e-6, -5, -11, -100, -1000])
def test_any_uniform_decay(gate):
    assert worst_error(random_inputs(1, **SHAPE, gate=gate)) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_complete_forgetting(form):
    """A log decay of -inf is a reset, not a NaN, and what came before it gets no gradient from after."""
    x = random_inputs(2, **SHAPE)
    x["g"][:, 20] = -np.inf
    do, dfinal_state = cotangents(x)
    do[:, :20] = 0
    got = compiled_gradients(form, 16)(x, do, dfinal_state)
    after = {name: x[name][:, 20:] for name in NAMES[:5]}
    after["g"] = np.concatenate([np.zeros_like(after["g"][:, :1]), after["g"][:, 1:]], axis=1)
    o, final_state = recurrence(**after)
    assert rel_error(got["o"][:, 20:], o) < 1e-6
    assert rel_error(got["final_state"], final_state) < 1e-6
    for name in NAMES[:5]:
        assert np.isfinite(got[f"d{name}"]).all(), name
        assert not np.any(got[f"d{name}"][:, :20]), name
    assert not np.any(got["dinitial_state"])


@pytest.mark.parametrize("positions", [[0], [15], [16], [17, 18], [40], range(0, 41, 5)])
def test_single_tokens_of_extreme_decay(positions):
    x = random_inputs(3, **SHAPE)
    x["g"][:, list(positions)] = -1000
    assert worst_error(x) < 2e-6


def test_mixed_extreme_decay():
    """Neighbouring channels and tokens from no decay to e^-1000, where sums taken as differences lose every digit."""
    x = random_inputs(4, **SHAPE)
    x["g"] = -(10 ** np.random.default_rng(4).uniform(-8, 3, x["g"].shape)).astype(np.float32)
    assert worst_error(x) < 2e-6


@pytest.mark.parametrize(("beta", "tolerance"), [(1, 2e-6), (2, 3e-5)])
@pytest.mark.parametrize("gate", [0, -1e-3])
def test_identical_keys(gate, beta, tolerance):
    """The triangular system is as far from the identity as it can be.

    At beta 2 each token reflects the state and every entry of the inverse is 2: rounding the scores alone costs 1e-5.
    """
    x = random_inputs(5, **SHAPE, gate=gate)
    x["k"][:] = x["k"][:, :1]
    x["beta"][:] = beta
    assert worst_error(x) < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_no_decay_is_the_delta_rule(form):
    x = random_inputs(6, **SHAPE, gate=0)
    got = compiled_gradients(form, 16)(x, *cotangents(x))
    k, v, beta = (x[name][0].astype(np.float64) for name in ("k", "v", "beta"))
    for j in range(SHAPE["J"]):
        S = x["initial_state"][0, j].astype(np.float64)
        for t in range(SHAPE["T"]):  # S <- (I - beta k k^T) S + beta k v^T
            S = (np.eye(len(S)) - beta[t, j] * np.outer(k[t, 0], k[t, 0])) @ S + beta[t, j] * np.outer(k[t, 0], v[t, j])
            want = S.T @ x["q"][0, t, 0] * SHAPE["K"] ** -0.5
            np.testing.assert_allclose(got["o"][0, t, j], want, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_no_writes_read_the_decayed_initial_state(form):
    x = random_inputs(7, **SHAPE)
    x["beta"][:] = 0
    got = compiled_gradients(form, 16)(x, *cotangents(x))
    decay = np.exp(np.cumsum(x["g"].astype(np.float64), axis=1))
    state = decay[..., None] * x["initial_state"][:, None]
    want = np.einsum("btk,btjkv->btjv", x["q"][:, :, 0], state) * SHAPE["K"] ** -0.5
    assert rel_error(got["o"], want) < 1e-6
    assert rel_error(got["final_state"], state[:, -1]) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_later_tokens_change_no_earlier_bit(form):
    """Outputs before P, and gradients before P of an objective that ends at P, are the same bits whatever follows."""
    x = random_inputs(8, **SHAPE)
    changed = random_inputs(9, **SHAPE)
    do, dfinal_state = cotangents(x)
    gradients = compiled_gradients(form, 16)
    for P in (1, 7, 8, 15, 16, 17, 29, 40):
        do_before = np.where(np.arange(SHAPE["T"])[:, None, None] < P, do, 0)
        base = gradients(x, do_before, 0 * dfinal_state)
        for name in NAMES[:5]:
            other = dict(x)
            other[name] = np.concatenate([x[name][:, :P], changed[name][:, P:]], axis=1)
            got = gradients(other, do_before, 0 * dfinal_state)
            for out in ("o", *(f"d{n}" for n in NAMES[:5])):
                assert np.array_equal(got[out][:, :P], base[out][:, :P]), (P, name, out)
            assert np.array_equal(got["dinitial_state"], base["dinitial_state"]), (P, name)


def test_gradients_match_finite_differences():
    """Along one random direction through all inputs at once, in float64: independent of any autodiff."""
    with jax.enable_x64(True):
        x = random_inputs(10, **SHAPE, dtype=np.float64)
        direction = random_inputs(11, **SHAPE, dtype=np.float64)
        do, dfinal_state = cotangents(x)
        got = run_quickly_compiled(
            lambda x: objective_gradients(x, do, dfinal_state, implementation="chunked", chunk_size=16), x
        )
        slope = sum(np.sum(got[f"d{name}"] * direction[name]) for name in NAMES)

    def objective(step):
        o, final_state = recurrence(**{name: x[name] + step * direction[name] for name in NAMES})
        return np.sum(o * do) + np.sum(final_state * dfinal_state)

    h = 2e-4  # central differences of order 4: error of order h^4
    difference = (8 * (objective(h) - objective(-h)) - (objective(2 * h) - objective(-2 * h))) / (12 * h)
    assert abs(slope - difference) < 1e-7 * abs(difference)


def test_steps_equal_the_whole():
    x = random_inputs(12, B=2, T=19, H=2, J=4, K=8, V=4)
    o, final_state = recurrence(**x, scale=0.3)
    step = jax.jit(lambda *token_and_state: kda_step(*token_and_state, scale=0.3))
    state = x["initial_state"]
    for t in range(19):
        out = step(*(x[name][:, t] for name in NAMES[:5]), state)
        state = out.state_BJKV
        assert rel_error(out.o_BJV, o[:, t]) < 2e-6
    assert rel_error(state, final_state) < 2e-6


def test_sequence_in_two_calls():
    """The state handed from one call to the next continues the sequence, at a cut inside a chunk."""
    x = random_inputs(13, **SHAPE)
    o, final_state = recurrence(**x)

    def two_calls(x):
        first = kda(*(x[n][:, :21] for n in NAMES[:5]), initial_state_BJKV=x["initial_state"], chunk_size=16)
        second = kda(*(x[n][:, 21:] for n in NAMES[:5]), initial_state_BJKV=first.final_state_BJKV, chunk_size=16)
        return first, second

    first, second = run_quickly_compiled(two_calls, x)
    assert rel_error(np.concatenate([first.o_BTJV, second.o_BTJV], axis=1), o) < 1e-6
    assert rel_error(second.final_state_BJKV, final_state) < 1e-6


def test_many_groups_of_chunks_equal_one(monkeypatch):
    """How many chunks are worked on at once changes time and memory only."""
    from k3jax.ops import kda_chunked

    x = random_inputs(14, B=2, T=150, H=1, J=1, K=8, V=8)
    do, dfinal_state = cotangents(x)
    want = float64_gradients(x, do, dfinal_state)
    monkeypatch.setattr(kda_chunked, "GROUP_ELEMENTS", 2 * 2 * 16 * 8)
    got = run_quickly_compiled(
        lambda x: objective_gradients(x, do, dfinal_state, implementation="chunked", chunk_size=16), x
    )
    for name, value in got.items():
        assert rel_error(value, want[name]) < 2e-6, name


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_inputs(form):
    """Only the inputs and the output are rounded: 5e-3 relative root mean square against float64."""
    x = random_inputs(15, B=1, T=70, H=2, J=2, K=32, V=32)
    rounded = {name: jnp.asarray(x[name], jnp.bfloat16) for name in ("q", "k", "v", "beta")}
    out = kda(rounded["q"], rounded["k"], rounded["v"], x["g"], rounded["beta"], implementation=form)
    want, _ = recurrence(**{name: np.asarray(a, np.float64) for name, a in rounded.items()}, g=x["g"])
    assert out.o_BTJV.dtype == jnp.bfloat16
    assert out.final_state_BJKV.dtype == jnp.float32
    error = np.asarray(out.o_BTJV, np.float64) - want
    assert np.sqrt(np.mean(error**2) / np.mean(want**2)) < 5e-3


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 70),
    H=st.integers(1, 2),
    group=st.integers(1, 2),
    K=st.sampled_from([1, 5, 8]),
    V=st.sampled_from([1, 3, 8]),
    chunk_size=st.sampled_from([1, 2, 8, 32]),
)
def test_any_shape(B, T, H, group, K, V, chunk_size):
    x = random_inputs(T, B, T, H, H * group, K, V)
    o, final_state = recurrence(**x)
    got = run_quickly_compiled(
        lambda x: kda(
            *(x[n] for n in NAMES[:5]),
            initial_state_BJKV=x["initial_state"],
            chunk_size=chunk_size,
            implementation="chunked",
        ),
        x,
    )
    assert rel_error(got.o_BTJV, o) < 2e-6
    assert rel_error(got.final_state_BJKV, final_state) < 2e-6
