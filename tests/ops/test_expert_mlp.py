"""The routed experts against every expert run on every token, with the tiled and with the ragged products."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import expert_mlp as module
from k3jax.ops.dispatch import from_experts, sort_by_expert, sum_over_slots, to_experts
from k3jax.ops.expert_mlp import expert_mlp
from tests.conftest import rel_error


def test_sort_by_expert_is_stable_and_invertible():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 7, (53, 3)).astype(np.int32)
    got = jax.jit(sort_by_expert, static_argnums=1)(ids, 9)
    np.testing.assert_array_equal(got.slot_M, np.argsort(ids.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(np.asarray(got.row_TS).reshape(-1)[np.asarray(got.slot_M)], np.arange(159))
    np.testing.assert_array_equal(got.group_sizes_E, np.bincount(ids.reshape(-1), minlength=9))


def test_copies_and_their_transposes():
    rng = np.random.default_rng(1)
    ids = jnp.asarray(rng.integers(0, 5, (31, 3)), jnp.int32)
    dispatch = sort_by_expert(ids, 5)
    x, y = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((31, 4), (93, 4)))
    slot = np.argsort(np.asarray(ids).reshape(-1), kind="stable")
    np.testing.assert_array_equal(to_experts(x, dispatch), np.asarray(x)[slot // 3])
    back = np.zeros((93, 4), np.float32)
    back[slot] = y
    np.testing.assert_array_equal(from_experts(y, dispatch), back.reshape(31, 3, 4))
    # <to x, y> = <x, sum y>, and from's gradient is its inverse because it is a permutation.
    ahead = jnp.vdot(to_experts(x, dispatch), y)
    assert rel_error(jnp.vdot(x, sum_over_slots(y, dispatch)), ahead) < 1e-5
    g = jnp.asarray(rng.standard_normal((31, 3, 4)), jnp.float32)
    slope = jax.grad(lambda y: jnp.vdot(from_experts(y, dispatch), g))(y)
    np.testing.assert_array_equal(slope, np.asarray(g).reshape(93, 4)[slot])


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

    def loss(*args):
        y = f(*args)
        return jnp.sum(y * probe), y

    (_, y), slopes = jax.jit(jax.value_and_grad(loss, argnums=DIFFERENTIABLE, has_aux=True))(*args)
    return y, slopes


@pytest.fixture(params=["tiled", "ragged"])
def path(request, monkeypatch):
    """Runs the TPU's path on the CPU too: what it is lowered to differs, what it must give does not."""
    if request.param == "ragged":
        ran = []
        monkeypatch.setattr(module, "_tiled", lambda *args: ran.append(0) or module._ragged(*args)[0])
        monkeypatch.setattr(module, "_tiled_fwd", lambda *args: ran.append(1) or module._ragged(*args))
        monkeypatch.setattr(module, "_tiled_bwd", lambda *args: ran.append(2) or module._ragged_bwd(*args))
        yield request.param
        assert {1, 2} <= set(ran)
    else:
        yield request.param


KINDS = {
    "uneven": {},
    "one expert": {"S": 1},
    "one token": {"T": 1},
    "several tiles": {"T": 300, "E": 3, "S": 2},
    "whole tiles": {"T": 128, "E": 3, "S": 3},
    "unused experts": {},
    "repeated": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, path):
    x, ids, weights, gate, up, down = _layer(**KINDS[kind], dtype=np.float64)
    if kind == "one expert":
        ids[:] = 4
    if kind == "unused experts":
        ids = np.where((ids == 0) | (ids == 2) | (ids == 5), 3, ids)
    if kind == "repeated":
        ids[:, 1] = ids[:, 0]
    with jax.enable_x64(True):
        args = [jnp.asarray(a) for a in (x, ids, weights, gate, up, down)]
        y, slopes = _value_and_gradients(functools.partial(expert_mlp, activation=_silu_gate), args)
        want, want_slopes = _value_and_gradients(_by_loop, args)
    assert y.dtype == jnp.float64 and rel_error(y, want) < 1e-13
    for got, slope in zip(slopes, want_slopes, strict=True):
        assert got.dtype == jnp.float64 and rel_error(got, slope) < 1e-12
    unused = np.setdiff1d(np.arange(gate.shape[0]), ids)
    for slope in slopes[2:]:
        np.testing.assert_array_equal(np.asarray(slope)[unused], 0)


def test_experts_without_tokens_in_bfloat16_have_zero_gradient(path):
    x, ids, weights, gate, up, down = _layer(T=16, S=1, E=4)
    ids = np.repeat(np.array([[0], [2]], np.int32), 8, axis=0)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, gate, up, down)]
    _, slopes = _value_and_gradients(
        functools.partial(expert_mlp, activation=_silu_gate), [half[0], ids, jnp.asarray(weights), *half[1:]]
    )
    for slope in slopes[2:]:
        slope = np.asarray(slope, np.float32)
        assert np.isfinite(slope).all() and np.abs(slope[[0, 2]]).max() > 0
        np.testing.assert_array_equal(slope[[1, 3]], 0)


def test_an_infinite_token_stays_with_its_experts():
    x, ids, weights, gate, up, down = (jnp.asarray(a) for a in _layer(T=150, S=1))
    ids = jnp.arange(150, dtype=jnp.int32)[:, None] // 40
    x = x.at[60].set(jnp.inf)
    y, slopes = _value_and_gradients(
        functools.partial(expert_mlp, activation=_silu_gate), [x, ids, weights, gate, up, down]
    )
    assert np.isfinite(np.delete(np.asarray(y), 60, axis=0)).all()
    for slope in slopes[2:]:
        assert np.isfinite(np.delete(np.asarray(slope), 1, axis=0)).all()
        assert not np.isfinite(np.asarray(slope)[1]).all()


def test_mixed_dtypes_are_refused():
    x, ids, weights, gate, up, down = (jnp.asarray(a) for a in _layer(T=4))
    with pytest.raises(ValueError, match="one dtype, got tokens in float32 and matrices in bfloat16"):
        expert_mlp(x, ids, weights, gate, up, down.astype(jnp.bfloat16), _silu_gate)


def test_choice_is_logged_once_a_platform(caplog):
    """Of the platform at hand; for a mesh of TPUs, none of which need be here, of TPU."""
    module._log_choice.cache_clear()
    tpu = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu"))
    args = [jnp.asarray(a) for a in _layer(T=4)]
    with caplog.at_level(logging.INFO, logger=module.__name__):
        for _ in range(2):
            jax.eval_shape(lambda *a: expert_mlp(*a, _silu_gate), *args)
            with jax.sharding.use_abstract_mesh(tpu):
                jax.eval_shape(lambda *a: expert_mlp(*a, _silu_gate), *args)
    assert [r.getMessage() for r in caplog.records if r.name == module.__name__] == [
        "experts on cpu: tiles of 128 rows, each through one expert's matrices",
        "experts on tpu: jax.lax.ragged_dot, and tiles of 128 rows or more for the matrices' gradient",
    ]


def test_gradient_matches_finite_differences():
    with jax.enable_x64(True):
        args = [jnp.asarray(a) for a in _layer(T=9, dtype=np.float64)]
        ours = functools.partial(expert_mlp, activation=_silu_gate)
        _, slopes = _value_and_gradients(ours, args)
        probe = jnp.asarray(np.random.default_rng(9).standard_normal(args[0].shape))
        loss = jax.jit(lambda *args: jnp.sum(probe * ours(*args)))
        rng = np.random.default_rng(1)
        for which, slope in zip(DIFFERENTIABLE, slopes, strict=True):
            way = jnp.asarray(rng.standard_normal(args[which].shape))
            ends = [loss(*[a + h * way if i == which else a for i, a in enumerate(args)]) for h in (1e-6, -1e-6)]
            assert rel_error([jnp.sum(slope * way)], [(ends[0] - ends[1]) / 2e-6]) < 1e-7


def test_float32_and_bfloat16():
    args = [jnp.asarray(a) for a in _layer(T=150)]
    ours = functools.partial(expert_mlp, activation=_silu_gate)
    want, want_slopes = _value_and_gradients(_by_loop, args)
    y, slopes = _value_and_gradients(ours, args)
    assert max(map(rel_error, (y, *slopes), (want, *want_slopes))) < 2e-6
    half = [a if i in (1, 2) else a.astype(jnp.bfloat16) for i, a in enumerate(args)]
    y, slopes = _value_and_gradients(ours, half)
    assert y.dtype == jnp.bfloat16
    assert [s.dtype for s in slopes] == [half[i].dtype for i in DIFFERENTIABLE]
    assert max(map(rel_error, (y, *slopes), (want, *want_slopes))) < 3e-2


def test_weights_act_on_outputs_rounded_to_the_compute_dtype():
    x, ids, weights, gate, up, down = (jnp.asarray(a) for a in _layer(T=20, S=2))
    x, gate, up, down = (a.astype(jnp.bfloat16) for a in (x, gate, up, down))
    ours = jax.jit(functools.partial(expert_mlp, activation=_silu_gate))
    one = jnp.ones((20, 1), jnp.float32)
    outputs = [ours(x, ids[:, s : s + 1], one, gate, up, down) for s in (0, 1)]
    want = sum(o.astype(jnp.float32) * weights[:, s, None] for s, o in enumerate(outputs))
    np.testing.assert_array_equal(ours(x, ids, weights, gate, up, down), want.astype(jnp.bfloat16))


def test_under_scan_and_remat():
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


def test_inside_shard_map():
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiles_for_tpu_to_ragged_products_of_the_rows_alone(dtype):
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    T, S, E, L, F = 2048, 4, 32, 256, 512
    mesh = jax.sharding.Mesh(topologies.get_topology_desc("v6e:2x2", platform="tpu").devices[:1], ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [(T, L), (T, S), (T, S), (E, L, F), (E, L, F), (E, F, L)]
    args = [jax.ShapeDtypeStruct(s, {1: "int32", 2: "float32"}.get(i, dtype)) for i, s in enumerate(shapes)]
    grad = jax.grad(lambda *a: jnp.sum(expert_mlp(*a, _silu_gate).astype(jnp.float32)), argnums=DIFFERENTIABLE)
    compiled = jax.jit(grad, in_shardings=whole, out_shardings=whole).lower(*args).compile()
    kernels = re.findall(r"%ragged-dot-none\S* = .*tpu_custom_call", compiled.as_text())
    assert len(kernels) == 6, kernels  # three products forward, and three back to the rows
    # The compiler counts a loop's body once, so this says that nothing is multiplied with every expert.
    assert compiled.cost_analysis()["flops"] < 2 * (6 * 2 * T * S * L * F)
