"""Routing against numpy, its gradient against finite differences, and what the bias must not touch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.router import route
from tests.conftest import rel_error


def _inputs(T=37, D=16, E=12, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, router = rng.standard_normal((T, D)), rng.standard_normal((D, E)) / D**0.5
    return x.astype(dtype), router.astype(dtype), (0.3 * rng.standard_normal(E)).astype(np.float32)


def _by_hand(x, router, bias, k, factor):
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ router.astype(np.float64))))
    ids = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :k]
    picked = np.take_along_axis(scores, ids, axis=1)
    return ids, factor * picked / (picked.sum(1, keepdims=True) + 1e-20), scores


@pytest.mark.parametrize("k", [1, 3, 12])
def test_matches_numpy(k):
    x, router, bias = _inputs()
    got = jax.jit(lambda *a: route(*a, k, routed_scaling_factor=2.5))(x, router, bias)
    ids, weights, scores = _by_hand(x, router, bias, k, 2.5)
    assert got.ids_TS.dtype == jnp.int32 and got.weights_TS.dtype == got.scores_TE.dtype == jnp.float32
    np.testing.assert_array_equal(got.ids_TS, ids)
    assert rel_error(got.weights_TS, weights) < 1e-6
    assert rel_error(got.scores_TE, scores) < 1e-6


def test_ties_go_to_the_lower_index():
    x, router = np.zeros((3, 4), np.float32), np.zeros((4, 6), np.float32)
    assert route(x, router, jnp.zeros(6), 3).ids_TS.tolist() == [[0, 1, 2]] * 3
    assert route(x, router, jnp.array([0, 0, 0.1, 0, 0.1, 0]), 3).ids_TS.tolist() == [[2, 4, 0]] * 3


def test_float64_is_not_narrowed():
    with jax.enable_x64(True):
        x, router, bias = _inputs(dtype=np.float64)
        got = route(jnp.asarray(x), jnp.asarray(router), jnp.asarray(bias), 4)
        _, weights, _ = _by_hand(x, router, bias, 4, 1.0)
        assert got.weights_TS.dtype == jnp.float64
        assert rel_error(got.weights_TS, weights) < 1e-14


def test_bfloat16_tokens_are_routed_in_float32():
    x, router, bias = _inputs()
    x, router = jnp.asarray(x, jnp.bfloat16), jnp.asarray(router, jnp.bfloat16)
    got = route(x, router, bias, 4)
    ids, weights, _ = _by_hand(np.asarray(x, np.float64), np.asarray(router, np.float64), bias, 4, 1.0)
    np.testing.assert_array_equal(got.ids_TS, ids)
    assert got.weights_TS.dtype == jnp.float32 and rel_error(got.weights_TS, weights) < 1e-6


def test_bias_is_in_the_selection_only():
    x, router, bias = _inputs()
    unbiased = route(x, router, jnp.zeros(12), 4)
    biased = route(x, router, jnp.zeros(12).at[5].set(10.0), 4)
    np.testing.assert_array_equal(unbiased.scores_TE, biased.scores_TE)
    assert (biased.ids_TS[:, 0] == 5).all()
    picked = np.take_along_axis(np.asarray(biased.scores_TE), np.asarray(biased.ids_TS), 1)
    assert rel_error(biased.weights_TS, picked / picked.sum(1, keepdims=True)) < 1e-6
    slope = jax.grad(lambda b: jnp.sum(route(x, router, b, 4).weights_TS ** 2))(bias)
    np.testing.assert_array_equal(slope, 0)


def test_gradient_matches_finite_differences():
    with jax.enable_x64(True):
        x, router, bias = (jnp.asarray(a, jnp.float64) for a in _inputs(T=9, D=5, E=7, dtype=np.float64))
        probe = jnp.asarray(np.random.default_rng(1).standard_normal((9, 3)))

        def loss(x, router):
            return jnp.sum(route(x, router, bias, 3, routed_scaling_factor=1.7).weights_TS * probe)

        slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, router)
        rng = np.random.default_rng(2)
        for which, slope in enumerate(slopes):
            args = [x, router]
            way = jnp.asarray(rng.standard_normal(args[which].shape))
            ends = []
            for sign in (1, -1):
                ends.append(loss(*[a + sign * 1e-6 * way if i == which else a for i, a in enumerate(args)]))
            assert rel_error([jnp.sum(slope * way)], [(ends[0] - ends[1]) / 2e-6]) < 1e-7
        assert float(jnp.abs(slopes[1]).min(axis=0).max()) > 0


@pytest.mark.parametrize("k", [0, 13])
def test_impossible_top_k(k):
    with pytest.raises(ValueError, match=f"cannot select {k} of 12 experts"):
        route(*_inputs(), k)


def test_narrow_bias_is_refused():
    x, router, bias = _inputs()
    with pytest.raises(ValueError, match="router bias is bfloat16"):
        route(x, router, jnp.asarray(bias, jnp.bfloat16), 2)


def test_forced_experts_are_visited_with_weights_of_ones_own_scores():
    """The top k forced changes nothing; other experts get their own scores over their sum, whatever the bias says."""
    rng = np.random.default_rng(0)
    x, router, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((5, 8), (8, 6), (6,)))
    natural = route(x, router, bias, 2)
    same = route(x, router, bias, 2, forced_ids_TS=natural.ids_TS)
    for got, want in zip(same, natural, strict=True):
        np.testing.assert_array_equal(got, want)
    ids = jnp.asarray([[0, 5], [1, 2], [3, 4], [5, 0], [2, 3]], jnp.int32)
    forced = route(x, router, bias, 2, routed_scaling_factor=3.0, forced_ids_TS=ids)
    scores = np.take_along_axis(1 / (1 + np.exp(-np.asarray(x, float) @ np.asarray(router, float))), np.asarray(ids), 1)
    np.testing.assert_array_equal(forced.ids_TS, ids)
    np.testing.assert_allclose(forced.weights_TS, 3 * scores / scores.sum(1, keepdims=True), rtol=1e-5)
