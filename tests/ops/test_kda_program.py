"""KDA as part of a program: transformations, memory, and what it says to wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.delta_attention import kda, kda_step
from tests.conftest import rel_error
from tests.ops.kda_cases import NAMES, cotangents, objective_gradients, random_inputs, recurrence, run_quickly_compiled

FORMS = ["recurrent", "chunked"]
SHAPE = {"B": 2, "T": 20, "H": 1, "J": 2, "K": 8, "V": 4}


def loss(x, form, segment_ids=None):
    arrays = (x[name] for name in NAMES[:5])
    o, state = kda(
        *arrays,
        initial_state_BJKV=x["initial_state"],
        segment_ids_BT=segment_ids,
        implementation=form,
        chunk_size=8,
    )
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state))


@pytest.mark.parametrize("form", FORMS)
def test_vmap_and_remat_change_nothing(form):
    ids = np.tile(np.repeat([1, 2, 0], [7, 8, 5]), (2, 1)).astype(np.int32)
    runs = [random_inputs(seed, **SHAPE) for seed in (0, 1)]
    gradient = jax.grad(functools.partial(loss, form=form, segment_ids=ids))
    want = [run_quickly_compiled(gradient, x) for x in runs]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *runs)
    remat = jax.grad(jax.checkpoint(functools.partial(loss, form=form, segment_ids=ids)))
    got = run_quickly_compiled(jax.vmap(remat), stacked)
    for name in NAMES:
        assert rel_error(got[name], np.stack([w[name] for w in want])) < 1e-6, name


@pytest.mark.parametrize("form", FORMS)
def test_inside_a_scan_over_layers(form):
    """Three layers of v <- kda(v), scanned, against the recurrence applied three times."""
    x = random_inputs(2, **SHAPE)
    arrays = [x[name] for name in NAMES[:5]]

    def layer(v, beta):
        out = kda(arrays[0], arrays[1], v, arrays[3], beta, implementation=form, chunk_size=8)
        return out.o_BTJV, None

    betas = np.stack([x["beta"] * factor for factor in (0.5, 0.75, 1.0)]).astype(np.float32)

    def stack(betas, v):
        return jnp.sum(jnp.square(jax.lax.scan(jax.checkpoint(layer), v, betas)[0]))

    value, dbetas = jax.jit(jax.value_and_grad(stack))(betas, x["v"])

    def reference(betas):
        v = x["v"]
        for beta in betas:
            v, _ = recurrence(arrays[0], arrays[1], v, arrays[3], beta)
        return np.sum(v**2)

    assert abs(value - reference(betas)) < 1e-5 * abs(value)
    direction = np.random.default_rng(3).standard_normal(betas.shape)
    h = 1e-4
    slope = (reference(betas + h * direction) - reference(betas - h * direction)) / (2 * h)
    assert abs(np.sum(dbetas * direction) - slope) < 1e-4 * abs(slope)


def temporary_bytes(form, T, chunk_size):
    x = random_inputs(0, 1, T, 2, 2, 32, 32)
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    do, dfinal_state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), cotangents(x))

    def gradients(x, do, dfinal_state):
        out = objective_gradients(x, do, dfinal_state, implementation=form, chunk_size=chunk_size)
        return {name: out[f"d{name}"] for name in NAMES}

    lowered = jax.jit(gradients).lower(arrays, do, dfinal_state)
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes, 5 * x["q"].nbytes, x["initial_state"].nbytes


def test_chunked_memory_is_linear_in_time():
    short, _, _ = temporary_bytes("chunked", 1024, None)
    long, arrays, _ = temporary_bytes("chunked", 4096, None)
    assert long < 4 * short
    assert long < 3 * arrays  # q, k, v, g and o together


def test_recurrent_memory_grows_with_chunks_not_with_tokens():
    short, _, _ = temporary_bytes("recurrent", 1024, 64)
    long, _, state = temporary_bytes("recurrent", 2048, 64)
    # 1024 more tokens: 16 more states of chunks, and inputs and gradients themselves, some 20 rows of K a token.
    assert long - short < 16 * state + 1024 * 20 * state / 32
    assert long < 2048 * state / 2


def arguments(**changes):
    x = random_inputs(0, 1, 4, 2, 4, 8, 4)
    return x | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": np.zeros((1, 4, 2, 7), np.float32)}, r"k has shape \(1, 4, 2, 7\)"),
        ({"g": np.zeros((1, 4, 2, 8), np.float32)}, r"g has shape .* need \(1, 4, 4, 8\)"),
        ({"beta": np.zeros((1, 4, 2), np.float32)}, r"beta has shape .* need \(1, 4, 4\)"),
        ({"initial_state": np.zeros((1, 4, 4, 8), np.float32)}, r"initial_state has shape .* need \(1, 4, 8, 4\)"),
        ({"v": np.zeros((1, 4, 3, 4), np.float32)}, "3 value heads do not divide among 2"),
        ({"v": np.zeros((1, 4, 4), np.float32)}, "v has shape"),
        ({"q": np.zeros((1, 4, 2, 8), np.int32)}, "q has dtype int32"),
    ],
)
def test_wrong_arrays_are_named(changes, message):
    x = arguments(**changes)
    with pytest.raises(ValueError, match=message) as error:
        kda(*(x[name] for name in NAMES[:5]), initial_state_BJKV=x["initial_state"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "fast"}, "'fast'; use one of auto, recurrent, chunked, pallas"),
        ({"chunk_size": 48}, "chunk_size is 48; use a power of two"),
        ({"chunk_size": 0}, "chunk_size is 0; use a power of two"),
        ({"segment_ids_BT": np.ones((1, 5), np.int32)}, r"segment_ids has shape \(1, 5\)"),
        ({"segment_ids_BT": np.ones((1, 4), np.float32)}, "segment_ids has dtype float32"),
    ],
)
def test_wrong_options_are_named(options, message):
    x = arguments()
    with pytest.raises(ValueError, match=message) as error:
        kda(*(x[name] for name in NAMES[:5]), **options)
    assert "\n" not in str(error.value)


def test_empty_sequence_is_refused():
    x = arguments()
    with pytest.raises(ValueError, match="empty"):
        kda(*(x[name][:, :0] for name in NAMES[:5]))


def test_step_names_wrong_arrays():
    x = arguments()
    token = {name: x[name][:, 0] for name in NAMES[:5]}
    with pytest.raises(ValueError, match="v has shape"):
        kda_step(token["q"], token["k"], token["v"][0], token["g"], token["beta"], x["initial_state"])
