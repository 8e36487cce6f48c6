"""Quantile Balancing against stored solutions of an independent implementation, and invariants to the bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.ops import quantile_balancing as qb
from k3jax.ops.balancing import expert_load
from k3jax.ops.router import route
from k3jax.train.metrics import violations
from tests.conftest import FIXTURES

CASES = sorted(json.loads((FIXTURES / "quantile_balancing" / "cases.json").read_text()))
# With b = 0 and an even bin count the point mass at r = b lies on a bin edge, where rounding picks the side.
ON_AN_EDGE = {
    "balanced_small",
    "skewed",
    "top1",
    "many_experts",
    "coarse_bins",
    "worked_example",
    "indivisible",
}


@pytest.fixture(params=CASES)
def case(request):
    with np.load(FIXTURES / "quantile_balancing" / f"{request.param}.npz") as arrays:
        return request.param, dict(arrays)


def _loads(scores, bias, k):
    ids = np.argsort(-(scores.astype(np.float64) + bias), axis=1, kind="stable")[:, :k]
    return np.bincount(ids.reshape(-1), minlength=scores.shape[1])


def test_fixture_list_is_the_folder():
    assert {p.stem for p in (FIXTURES / "quantile_balancing").glob("*.npz")} == set(CASES)


def test_exact_bias_float64(case):
    _, a = case
    with jax.enable_x64(True):
        scores, bias, k = (
            jnp.asarray(a["scores"], jnp.float64),
            jnp.asarray(a["bias_prev"], jnp.float64),
            int(a["k"]),
        )
        np.testing.assert_allclose(qb.cutoff(scores, bias, k), a["alpha_prev"], rtol=0, atol=1e-15)
        for step, want in enumerate(a["exact_bias"]):
            bias = jax.jit(qb.exact_bias, static_argnums=2)(scores, bias, k)
            assert bias.dtype == jnp.float64
            np.testing.assert_allclose(bias, want, rtol=0, atol=1e-12)
            np.testing.assert_array_equal(_loads(a["scores"], np.asarray(bias), k), a["exact_loads"][step])


def test_exact_bias_float32(case):
    _, a = case
    bias = qb.exact_bias(a["scores"], jnp.asarray(a["bias_prev"]), int(a["k"]))
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, a["exact_bias"][0], rtol=0, atol=1e-6)


def test_histogram(case):
    name, a = case
    k, bins = int(a["k"]), int(a["num_bins"])
    parts = np.array_split(a["scores"], int(a["num_microbatches"]))
    counts = sum(qb.histogram(part, jnp.asarray(a["bias_prev"]), k, bins) for part in parts)
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts.sum(1), len(a["scores"]))
    # Entries that changed bin moved to a neighbour: cumulative counts agree up to what lies on that one edge.
    difference = np.cumsum(np.asarray(counts) - a["histogram"], axis=1)
    moved = np.abs(difference).sum(1)
    if name in ON_AN_EDGE:
        assert (np.count_nonzero(difference, axis=1) <= 1).all()
    else:
        assert moved.max() <= 1
    bias = qb.bias_from_histogram(counts, jnp.asarray(a["bias_prev"]), k)
    width = float(np.ptp(a["bias_prev"]) + 2) / bins
    tolerance = width if moved.any() else 1e-6
    np.testing.assert_allclose(bias, a["hist_bias"][0], rtol=0, atol=tolerance)


def test_bias_from_stored_histogram(case):
    _, a = case
    k = int(a["k"])
    bias = jax.jit(qb.bias_from_histogram, static_argnums=2)(a["histogram"], jnp.asarray(a["bias_prev"]), k)
    assert bias.dtype == jnp.float32
    want = a["hist_raw"][0] - a["hist_raw"][0].mean()
    np.testing.assert_allclose(bias, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(bias, a["hist_bias"][0], rtol=0, atol=1e-6)
    # Loads are as stored where no score is within rounding of its cutoff.
    np.testing.assert_array_equal(_loads(a["scores"], a["hist_bias"][0], k), a["hist_loads"][0])


def test_repeated_histogram_steps_stay_near_the_exact_ones(case):
    _, a = case
    k, bins, bias = int(a["k"]), int(a["num_bins"]), jnp.asarray(a["bias_prev"])
    for want in a["hist_bias"]:
        width = (float(jnp.ptp(bias)) + 2) / bins
        bias = qb.bias_from_histogram(qb.histogram(a["scores"], bias, k, bins), bias, k)
        np.testing.assert_allclose(bias, want, rtol=0, atol=2 * width)


def _skewed(T=600, E=24, seed=0):
    rng = np.random.default_rng(seed)
    scores = 1 / (1 + np.exp(-(rng.standard_normal((T, E)) + 1.5 * rng.standard_normal(E))))
    return jnp.asarray(scores, jnp.float32), jnp.asarray(0.2 * rng.standard_normal(E), jnp.float32)


def test_counts_add_over_microbatches_and_devices_to_the_bit():
    scores, bias = _skewed(T=608)
    mask = jnp.arange(608) % 7 != 3
    whole = jax.jit(lambda s, m: qb.histogram(s, bias, 4, 500, m))(scores, mask)
    parts = [qb.histogram(scores[i : i + 76], bias, 4, 500, mask[i : i + 76]) for i in range(0, 608, 76)]
    np.testing.assert_array_equal(sum(parts), whole)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_token = NamedSharding(mesh, PartitionSpec("data"))
    sharded = jax.jit(lambda s, m: qb.histogram(s, bias, 4, 500, m), out_shardings=NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_array_equal(sharded(*jax.device_put((scores, mask), by_token)), whole)


@pytest.mark.parametrize("bins", [1, 10, 128, 500, 1000])
def test_both_ways_of_counting_give_the_same_integers(bins, monkeypatch):
    rng = np.random.default_rng(bins)
    index, mask = jnp.asarray(rng.integers(0, bins, (301, 5)), jnp.int32), jnp.asarray(rng.random(301) < 0.8)
    want = np.stack([np.bincount(np.asarray(index)[np.asarray(mask), e], minlength=bins) for e in range(5)])
    monkeypatch.setattr(qb, "_CHUNK_ELEMENTS", 64 * 5 * (-(-bins // 128) + 128))
    np.testing.assert_array_equal(qb._count_by_scatter(index, mask, bins), want)
    np.testing.assert_array_equal(qb._count_by_products(index, mask, bins), want)


def test_padding_is_excluded():
    scores, bias = _skewed()
    mask = jnp.arange(600) % 3 != 1
    spoiled = jnp.where(mask[:, None], scores, 0.999)
    real = scores[np.flatnonzero(mask)]
    np.testing.assert_array_equal(qb.histogram(spoiled, bias, 4, 300, mask), qb.histogram(real, bias, 4, 300))
    np.testing.assert_array_equal(qb.exact_bias(spoiled, bias, 4, mask), qb.exact_bias(real, bias, 4))


def test_nothing_counted_keeps_the_bias():
    scores, bias = _skewed()
    nobody = jnp.zeros(600, bool)
    counts = qb.histogram(scores, bias, 4, 100, nobody)
    np.testing.assert_array_equal(counts, 0)
    np.testing.assert_array_equal(qb.bias_from_histogram(counts, bias, 4), bias)
    np.testing.assert_array_equal(qb.exact_bias(scores, bias, 4, nobody), bias)
    np.testing.assert_array_equal(qb.exact_bias(scores[:0], bias, 4), bias)


def test_histogram_is_within_a_bin_of_exact():
    scores, bias = _skewed()
    for bins in (50, 333, 1000):
        got = qb.bias_from_histogram(qb.histogram(scores, bias, 5, bins), bias, 5)
        width = (float(jnp.ptp(bias)) + 2) / bins
        np.testing.assert_allclose(got, qb.exact_bias(scores, bias, 5), rtol=0, atol=1.01 * width)


@pytest.mark.parametrize("method", ["exact", "histogram"])
def test_one_step_balances_a_skewed_router(method):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((2048, 32)), jnp.float32)
    router = jnp.asarray(rng.standard_normal((32, 16)) / 6, jnp.float32)
    x = x.at[:, 0].set(1)
    router = router.at[0].set(jnp.asarray(1.5 * rng.standard_normal(16), jnp.float32))
    bias, loads = jnp.zeros(16), []
    for _ in range(4):
        routing = route(x, router, bias, 4)
        loads.append(expert_load(routing.ids_TS, 16).tolist())
        if method == "exact":
            bias = qb.exact_bias(routing.scores_TE, bias, 4)
        else:
            bias = qb.bias_from_histogram(qb.histogram(routing.scores_TE, bias, 4, 1000), bias, 4)
        assert abs(float(bias.mean())) < 1e-6
    worst = violations(loads)
    assert worst[0] > 1.5 and worst[1] < 0.25 * worst[0] and worst[3] < 0.1, worst


def test_rank_is_exact_where_a_product_or_float32_would_fail():
    # n k overflows int32 and n k / E = 5357142.98 has no room for its fraction in float32.
    n, k, E = 300_000_007, 16, 896
    rank = -(-n * k // E)
    counts = np.tile(np.array([0, 0, n, 0], np.int32), (E, 1))  # raw = 0.5 * k / E
    counts[3] = [rank, 0, n - rank, 0]  # exactly enough in the first bin: raw = -0.5
    counts[7] = [rank - 1, 0, n - rank + 1, 0]  # one short: raw = 0 at the third bin's start
    bias = np.asarray(qb.bias_from_histogram(jnp.asarray(counts), jnp.zeros(E), k), np.float64)
    np.testing.assert_allclose(bias[3] - bias[0], -0.5 - 0.5 * k / E, atol=1e-6)
    np.testing.assert_allclose(bias[7] - bias[0], 0.0 - 0.5 * k / E, atol=1e-6)


def test_no_gradient():
    scores, bias = _skewed()
    slope = jax.grad(lambda s: jnp.sum(qb.exact_bias(s, bias, 4) ** 2) + jnp.sum(s))(scores)
    np.testing.assert_array_equal(slope, 1)


def test_every_expert_selected_is_refused():
    scores, bias = _skewed()
    for call in (
        lambda: qb.exact_bias(scores, bias, 24),
        lambda: qb.histogram(scores, bias, 24, 10),
        lambda: qb.bias_from_histogram(jnp.ones((24, 10), jnp.int32), bias, 24),
    ):
        with pytest.raises(ValueError, match="top-k is 24 of 24"):
            call()
    with pytest.raises(ValueError, match="at least one bin"):
        qb.histogram(scores, bias, 4, 0)
