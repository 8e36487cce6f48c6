"""Load measures and the older balancing rules, by hand-worked cases."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.balancing import auxiliary_loss, expert_load, sign_bias
from k3jax.ops.router import route
from k3jax.train.metrics import violations
from tests.conftest import rel_error


def test_expert_load_counts_unmasked_tokens():
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 9, (50, 3)).astype(np.int32), rng.random(50) < 0.6
    load = expert_load(jnp.asarray(ids), 9)
    assert load.dtype == jnp.int32
    np.testing.assert_array_equal(load, np.bincount(ids.reshape(-1), minlength=9))
    masked = expert_load(jnp.asarray(ids), 9, jnp.asarray(mask))
    np.testing.assert_array_equal(masked, np.bincount(ids[mask].reshape(-1), minlength=9))
    np.testing.assert_array_equal(expert_load(jnp.asarray(ids), 9, jnp.zeros(50, bool)), 0)


def test_sign_bias_moves_against_the_load():
    got = sign_bias(jnp.array([5, 3, 4, 4]), jnp.array([0.1, 0.2, 0.3, 0.4]), 0.01)
    np.testing.assert_allclose(got, [0.09, 0.21, 0.3, 0.4], rtol=1e-6)
    # A mean between two integers, and loads that float32 cannot tell apart.
    np.testing.assert_allclose(sign_bias(jnp.array([1, 1, 0]), jnp.zeros(3), 1.0), [-1, -1, 1])
    big = 2**25
    np.testing.assert_allclose(sign_bias(jnp.array([big, big + 1, big - 1]), jnp.zeros(3), 1.0), [0, -1, 1])
    assert sign_bias(jnp.array([5, 3]), jnp.zeros(2), 0.1).dtype == jnp.float32


def test_sign_bias_evens_out_a_skewed_router():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1024, 16)), jnp.float32).at[:, 0].set(1)
    router = jnp.asarray(0.2 * rng.standard_normal((16, 8)), jnp.float32)
    router = router.at[0].set(jnp.asarray(rng.standard_normal(8), jnp.float32))
    load = jax.jit(lambda bias: expert_load(route(x, router, bias, 2).ids_TS, 8))
    bias, loads = jnp.zeros(8), []
    for _ in range(61):
        loads.append(load(bias))
        bias = sign_bias(loads[-1], bias, 0.02)
    worst = violations(np.array(loads).tolist())
    assert worst[-1] < 0.2 * worst[0]


def _scores(T=40, E=6):
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.random((T, E)), jnp.float32), jnp.asarray(rng.integers(0, E, (T, 2)), jnp.int32)


def test_auxiliary_loss_by_hand():
    scores, ids = _scores()
    mask = np.arange(40) % 4 != 0
    s = np.asarray(scores, np.float64)[mask]
    load = np.bincount(np.asarray(ids)[mask].reshape(-1), minlength=6)
    fraction, share = load / (2 * mask.sum()), (s / s.sum(1, keepdims=True)).mean(0)
    got = auxiliary_loss(scores, ids, jnp.asarray(mask))
    assert rel_error(got.value(), 6 * np.sum(fraction * share)) < 1e-6
    slope = jax.grad(lambda s: auxiliary_loss(s, ids, jnp.asarray(mask)).value())(scores)
    np.testing.assert_array_equal(np.asarray(slope)[~mask], 0)
    total = s.sum(1, keepdims=True)
    want = 6 * (fraction - (s * fraction).sum(1, keepdims=True) / total) / total / mask.sum()
    assert rel_error(np.asarray(slope)[mask], want) < 1e-5


def test_auxiliary_loss_is_one_when_even_and_zero_when_empty():
    even = auxiliary_loss(jnp.ones((6, 3)), jnp.array([[0], [1], [2]] * 2))
    np.testing.assert_allclose(even.value(), 1, rtol=1e-6)
    crowded = auxiliary_loss(jnp.array([[1.0, 0, 0]] * 6), jnp.zeros((6, 1), jnp.int32))
    np.testing.assert_allclose(crowded.value(), 3, rtol=1e-6)
    empty = auxiliary_loss(jnp.ones((6, 3)), jnp.zeros((6, 1), jnp.int32), jnp.zeros(6, bool))
    assert float(empty.value()) == 0


def test_auxiliary_sums_add_over_devices():
    scores, ids = _scores()
    whole = auxiliary_loss(scores, ids)
    halves = [auxiliary_loss(scores[i : i + 20], ids[i : i + 20]) for i in (0, 20)]
    pooled = jax.tree.map(jnp.add, *halves)
    np.testing.assert_array_equal(pooled.load_E, whole.load_E)
    assert rel_error(pooled.value(), whole.value()) < 1e-6
