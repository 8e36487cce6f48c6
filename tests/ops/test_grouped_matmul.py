"""Grouped products and the routed experts against a loop over experts in float64 numpy."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import grouped_matmul as gm
from k3jax.ops.expert_mlp import expert_mlp
from tests.conftest import rel_error

PATHS = {"tiled": (gm._tiled, gm._tiled_bwd), "ragged": (gm._ragged, gm._ragged_bwd)}
SIZES = {
    "uneven": [130, 0, 7, 263, 1, 0],
    "one group": [0, 0, 401, 0, 0, 0],
    "empty ends": [0, 200, 0, 201, 0, 0],
    "rows of no group": [5, 0, 150, 30, 0, 0],
    "single row": [0, 1, 0, 0, 0, 0],
    "nothing": [0, 0, 0, 0, 0, 0],
    "whole tiles": [128, 256, 0, 128, 0, 0],
}


def _groups(sizes, M):
    return np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(M - sum(sizes), -1)])


def _product(sizes, D=24, F=40, seed=0):
    M = max(sum(sizes), 201 if sum(sizes) != 1 else 1)
    rng = np.random.default_rng(seed)
    shapes = (M, D), (len(sizes), D, F), (M, F)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SIZES)
def test_grouped_matmul_and_gradients(name, path):
    sizes = SIZES[name]
    x, w, g = _product(sizes)
    group = _groups(sizes, len(x))
    y, dx, dw = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e in range(len(sizes)):
        rows = group == e
        y[rows], dx[rows] = x[rows] @ w[e].astype(np.float64), g[rows] @ w[e].T.astype(np.float64)
        dw[e] = x[rows].T.astype(np.float64) @ g[rows]
    forward, backward = (jax.jit(f) for f in PATHS[path])
    sizes = jnp.array(sizes, jnp.int32)
    assert rel_error(forward(x, w, sizes), y) < 1e-6
    got_dx, got_dw = backward(x, w, sizes, g)
    assert rel_error(got_dx, dx) < 1e-6
    assert rel_error(got_dw, dw) < 1e-6
    np.testing.assert_array_equal(np.asarray(got_dw)[np.asarray(sizes) == 0], 0)
    np.testing.assert_array_equal(np.asarray(got_dx)[group < 0], 0)


@pytest.mark.parametrize("path", PATHS)
def test_empty_groups_in_bfloat16_have_zero_gradient(path):
    x, w, g = (jnp.asarray(a, jnp.bfloat16) for a in _product([8, 0, 8, 0])[:3])
    sizes = jnp.array([8, 0, 8, 0], jnp.int32)
    x, g = x[:16], g[:16]
    _, dw = jax.jit(PATHS[path][1])(x, w, sizes, g)
    assert dw.dtype == jnp.bfloat16
    dw = np.asarray(dw, np.float32)
    assert np.isfinite(dw).all()
    np.testing.assert_array_equal(dw[[1, 3]], 0)
    for e, rows in ((0, slice(0, 8)), (2, slice(8, 16))):
        want = np.asarray(x[rows], np.float64).T @ np.asarray(g[rows], np.float64)
        assert rel_error(dw[e], want) < 1e-2


def test_an_infinite_row_stays_in_its_group():
    x, w, g = _product([100, 90, 11, 0])
    x[120] = np.inf
    sizes = jnp.array([100, 90, 11, 0], jnp.int32)
    y = np.asarray(gm.grouped_matmul(x, w, sizes))
    _, dw = gm._tiled_bwd(x, w, sizes, g)
    assert np.isfinite(np.delete(y, 120, axis=0)).all() and not np.isfinite(y[120]).any()
    assert np.isfinite(np.asarray(dw)[[0, 2, 3]]).all()


def test_mixed_dtypes_are_refused():
    x, w, _ = _product([5, 6])
    with pytest.raises(ValueError, match="one dtype, got rows in float32 and matrices in bfloat16"):
        gm.grouped_matmul(x, jnp.asarray(w, jnp.bfloat16), jnp.array([5, 6]))


def test_sort_by_expert_is_stable_and_invertible():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 7, (53, 3)).astype(np.int32)
    got = jax.jit(gm.sort_by_expert, static_argnums=1)(ids, 9)
    np.testing.assert_array_equal(got.slot_M, np.argsort(ids.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(np.asarray(got.row_TS).reshape(-1)[np.asarray(got.slot_M)], np.arange(159))
    np.testing.assert_array_equal(got.group_sizes_E, np.bincount(ids.reshape(-1), minlength=9))


def test_choice_is_logged_once(caplog):
    gm._say_choice.cache_clear()
    x, w, _ = _product([5, 6])
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            jax.jit(lambda *a: gm.grouped_matmul(*a))(x[:11], w, jnp.array([5, 6]))
    assert len([r for r in caplog.records if "ragged_dot" in r.message]) == 1


def _silu_gate(gate, up):
    return jax.nn.silu(gate) * up


def _layer(T=70, S=3, E=6, L=12, F=20, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((T, E)) + 0.5 * rng.random(E), axis=1)[:, :S].astype(np.int32)
    shapes = (T, L), (T, S), (E, L, F), (E, L, F), (E, F, L)
    x, weights, gate, up, down = (rng.standard_normal(s).astype(dtype) / s[-1] ** 0.25 for s in shapes)
    return x, ids, np.abs(weights), gate, up, down


def _by_loop(x, ids, weights, gate, up, down):
    """Every expert on every token, in the dtype of the inputs, masked by selection."""
    y = 0
    for e in range(gate.shape[0]):
        share_T = jnp.sum(jnp.where(ids == e, weights, 0), axis=1)
        y += share_T[:, None] * (_silu_gate(x @ gate[e], x @ up[e]) @ down[e])
    return y


DIFFERENTIABLE = (0, 2, 3, 4, 5)


def _value_and_gradients(f, args):
    probe = jnp.asarray(np.random.default_rng(9).standard_normal(args[0].shape), args[0].dtype)
    return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(f(*a) * probe), argnums=DIFFERENTIABLE))(*args)


@pytest.mark.parametrize(
    "kind", ["ordinary", "one expert", "one token", "many tiles", "all experts", "an unused expert", "repeated"]
)
def test_expert_mlp_and_gradients(kind):
    sizes = {
        "one token": {"T": 1}, "many tiles": {"T": 300, "E": 3, "S": 2}, "all experts": {"S": 6},
    }.get(kind, {})  # fmt: skip
    with jax.enable_x64(True):
        x, ids, weights, gate, up, down = _layer(**sizes, dtype=np.float64)
        if kind == "one expert":
            ids, weights = np.full((70, 1), 4, np.int32), weights[:, :1]
        if kind == "an unused expert":
            ids = np.where(ids == 2, 3, ids)
        if kind == "repeated":
            ids[:, 1] = ids[:, 0]
        args = [jnp.asarray(a) for a in (x, ids, weights, gate, up, down)]
        value, slopes = _value_and_gradients(functools.partial(expert_mlp, activation=_silu_gate), args)
        want, want_slopes = _value_and_gradients(_by_loop, args)
        assert rel_error(expert_mlp(*args, _silu_gate), _by_loop(*args)) < 1e-13
        assert rel_error(value, want) < 1e-12
        for got, slope in zip(slopes, want_slopes, strict=True):
            assert got.dtype == jnp.float64
            assert rel_error(got, slope) < 1e-12
        unused = np.setdiff1d(np.arange(gate.shape[0]), ids)
        for slope in slopes[2:]:
            np.testing.assert_array_equal(np.asarray(slope)[unused], 0)


def test_expert_mlp_gradient_matches_finite_differences():
    with jax.enable_x64(True):
        args = [jnp.asarray(a) for a in _layer(T=9, dtype=np.float64)]
        loss = functools.partial(expert_mlp, activation=_silu_gate)
        _, slopes = _value_and_gradients(loss, args)
        probe = jnp.asarray(np.random.default_rng(9).standard_normal(args[0].shape))
        rng = np.random.default_rng(1)
        for which, slope in zip(DIFFERENTIABLE, slopes, strict=True):
            way = jnp.asarray(rng.standard_normal(args[which].shape))
            ends = [
                jnp.sum(probe * loss(*[a + h * way if i == which else a for i, a in enumerate(args)]))
                for h in (1e-6, -1e-6)
            ]
            assert rel_error([jnp.sum(slope * way)], [(ends[0] - ends[1]) / 2e-6]) < 1e-7


def test_expert_mlp_float32_and_bfloat16():
    args = [jnp.asarray(a) for a in _layer(T=150)]
    _, want_slopes = _value_and_gradients(_by_loop, args)
    _, slopes = _value_and_gradients(functools.partial(expert_mlp, activation=_silu_gate), args)
    assert max(map(rel_error, slopes, want_slopes)) < 2e-6
    half = [a if i in (1, 2) else a.astype(jnp.bfloat16) for i, a in enumerate(args)]
    y = expert_mlp(*half, _silu_gate)
    assert y.dtype == jnp.bfloat16
    assert rel_error(y, _by_loop(*args)) < 2e-2
    _, slopes = _value_and_gradients(functools.partial(expert_mlp, activation=_silu_gate), half)
    assert [s.dtype for s in slopes] == [half[i].dtype for i in DIFFERENTIABLE]
    assert max(map(rel_error, slopes, want_slopes)) < 3e-2


def test_weights_act_on_outputs_rounded_to_the_compute_dtype():
    x, ids, weights, gate, up, down = (jnp.asarray(a) for a in _layer(T=20, S=2))
    x, gate, up, down = (a.astype(jnp.bfloat16) for a in (x, gate, up, down))
    one = jnp.ones((20, 1), jnp.float32)
    outputs = [expert_mlp(x, ids[:, s : s + 1], one, gate, up, down, _silu_gate) for s in (0, 1)]
    want = sum(o.astype(jnp.float32) * weights[:, s, None] for s, o in enumerate(outputs))
    np.testing.assert_array_equal(expert_mlp(x, ids, weights, gate, up, down, _silu_gate), want.astype(jnp.bfloat16))


def test_expert_mlp_under_scan_and_remat():
    args = [jnp.asarray(a) for a in _layer(T=40)]
    stacked = [jnp.stack([a, a[::-1]]) for a in args[3:]]

    def scanned(x, ids, weights, *stacks):
        def layer(x, w):
            return x + expert_mlp(x, ids, weights, *w, _silu_gate), None

        return jax.lax.scan(jax.checkpoint(layer), x, stacks)[0]

    def unrolled(x, ids, weights, *stacks):
        for i in range(2):
            x = x + _by_loop(x, ids, weights, *[s[i] for s in stacks])
        return x

    _, got = _value_and_gradients(scanned, args[:3] + stacked)
    _, want = _value_and_gradients(unrolled, args[:3] + stacked)
    assert max(map(rel_error, got, want)) < 1e-5


def test_expert_mlp_inside_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    args = [jnp.asarray(a) for a in _layer(T=80)]
    by_token, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        lambda *a: expert_mlp(*a, _silu_gate), mesh=mesh, in_specs=(by_token,) * 3 + (whole,) * 3, out_specs=by_token
    )
    _, got = _value_and_gradients(sharded, args)
    _, want = _value_and_gradients(_by_loop, args)
    assert max(map(rel_error, got, want)) < 1e-5


def test_memory_grows_with_rows_not_with_experts():
    def temporary(E):
        T, S, L, F = 512, 2, 64, 64
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((T, L), (T, S), (T, S), (E, L, F), (E, L, F), (E, F, L))]
        args[1] = jax.ShapeDtypeStruct((T, S), jnp.int32)
        grad = jax.grad(lambda *a: jnp.sum(expert_mlp(*a, _silu_gate)), argnums=(0, 2))
        return jax.jit(grad).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary(64) < 1.3 * temporary(4)
