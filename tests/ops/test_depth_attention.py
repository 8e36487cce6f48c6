"""Attention Residuals against a float64 reference, finite differences, the K3 fixture; what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from k3jax.ops.depth_attention import attention_residual
from tests.conftest import FIXTURES, rel_error

EPS = 1e-5


def reference(sources, query, gain, mask=None, eps=EPS):
    v = np.asarray(sources, np.float64)
    key = v / np.sqrt((v**2).mean(-1, keepdims=True) + eps) * np.asarray(gain, np.float64)
    score = key @ np.asarray(query, np.float64)
    score = score if mask is None else np.where(mask, score, -np.inf)
    weights = np.exp(score - score.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights[..., None] * v).sum(2), weights


def inputs(R=3, B=2, T=5, D=8, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(B, T, R, D)) * rng.lognormal(size=(B, T, R, 1))
    return tuple(jnp.asarray(x, dtype) for x in (v, rng.normal(size=D), 1 + 0.3 * rng.normal(size=D)))


def test_matches_the_reference_in_float32_and_float64():
    with jax.enable_x64(True):
        for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-14)):
            v, w, g = inputs(dtype=dtype, D=64)
            got = attention_residual(v, w, g)
            want = reference(v, w, g)
            assert got.mix_BTD.dtype == got.weights_BTR.dtype == dtype
            assert rel_error(got.mix_BTD, want[0]) < tolerance
            assert rel_error(got.weights_BTR, want[1]) < 10 * tolerance


def test_hand_worked_pair():
    # Both sources have mean square 1, so keys are the sources; scores ln 3 and 0 give weights 3/4 and 1/4.
    v = jnp.array([[[[1.0, 1.0], [1.0, -1.0]]]])
    w = jnp.array([np.log(3.0) / 2, np.log(3.0) / 2])
    got = attention_residual(v, w, jnp.ones(2), eps=0.0)
    np.testing.assert_allclose(got.weights_BTR, [[[0.75, 0.25]]], rtol=1e-6)
    np.testing.assert_allclose(got.mix_BTD, [[[1.0, 0.5]]], rtol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-9)])
def test_kimi_k3_fixture(dtype, tolerance):
    with jax.enable_x64(True):
        probes = np.load(FIXTURES / "kimi_k3_tiny" / "probes.npz")
        weights = load_file(FIXTURES / "kimi_k3_tiny" / "model.safetensors")
        layer = f"language_model.model.layers.{int(probes['mix_layer'])}."
        query = weights[layer + "mlp_res_proj.weight"].reshape(-1).astype(dtype)
        gain = weights[layer + "mlp_res_norm.weight"].astype(dtype)
        blocks, x = (jnp.asarray(probes[name], dtype) for name in ("mix_blocks", "x"))
        got = attention_residual(blocks, query, gain, partial_BTD=x).mix_BTD
        assert got.dtype == dtype
        assert rel_error(got, probes["mix_out"]) < tolerance


def test_a_zero_query_weighs_sources_exactly_alike():
    v, w, g = inputs(R=5)
    weights = attention_residual(v, 0 * w, g, partial_BTD=v[:, :, 0]).weights_BTR
    assert (np.asarray(weights) == np.float32(1) / np.float32(6)).all()
    mask = jnp.array([True, False, True, False, False])
    weights = attention_residual(v, 0 * w, g, mask_R=mask).weights_BTR
    assert (np.asarray(weights) == np.where(mask, 0.5, 0)).all()


def test_one_source_comes_back_as_it_is():
    v, w, g = inputs(R=1, dtype=jnp.bfloat16)
    got = attention_residual(v, w, g)
    assert got.mix_BTD.dtype == jnp.bfloat16 and got.weights_BTR.dtype == jnp.float32
    assert (got.mix_BTD == v[:, :, 0]).all() and (got.weights_BTR == 1).all()
    empty = attention_residual(v[:, :, :0], w, g, partial_BTD=v[:, :, 0])
    assert (empty.mix_BTD == v[:, :, 0]).all()
    assert empty.weights_BTR.shape == (2, 5, 1)


def test_the_partial_sum_is_one_more_source():
    v, w, g = inputs(R=4)
    c = jnp.asarray(np.random.default_rng(1).normal(size=v[:, :, 0].shape), v.dtype)

    def joined(v, w, g):
        return attention_residual(v, w, g)

    def apart(v, w, g):
        return attention_residual(v[:, :, :3], w, g, partial_BTD=v[:, :, 3])

    for field in (0, 1):
        assert rel_error(apart(v, w, g)[field], joined(v, w, g)[field]) < 1e-6
    grads = [jax.grad(lambda *a: jnp.sum(f(*a)[0] * c), (0, 1, 2))(v, w, g) for f in (apart, joined)]
    for got, want in zip(*grads, strict=True):
        assert rel_error(got, want) < 3e-6


@pytest.mark.parametrize("with_partial", [False, True])
def test_a_masked_buffer_equals_the_shorter_stack(with_partial):
    v, w, g = inputs(R=6)
    keep = np.array([True, True, False, True, False, False])
    v = v.at[:, :, ~keep].set(1e4)
    extra = {"partial_BTD": v[:, :, 0] + 1} if with_partial else {}
    mask = jnp.append(jnp.asarray(keep), True) if with_partial else jnp.asarray(keep)

    def loss(f):
        def inner(v, w, g):
            out = f(v, w, g)
            return jnp.sum(jnp.sin(out.mix_BTD)), out

        return jax.jit(jax.value_and_grad(inner, (0, 1, 2), has_aux=True))

    # The mask is an argument of the compiled function, not a constant of it.
    masked = jax.jit(lambda v, w, g, m: attention_residual(v, w, g, mask_R=m, **extra))
    (_, got), got_grads = loss(lambda v, w, g: masked(v, w, g, mask))(v, w, g)
    (_, want), want_grads = loss(lambda v, w, g: attention_residual(v[:, :, keep], w, g, **extra))(v, w, g)
    got_weights = np.asarray(got.weights_BTR)
    assert (got_weights[..., ~np.asarray(mask)] == 0).all()
    assert rel_error(got_weights[..., np.asarray(mask)], want.weights_BTR) < 1e-6
    assert rel_error(got.mix_BTD, want.mix_BTD) < 1e-6
    assert (np.asarray(got_grads[0])[:, :, ~keep] == 0).all()
    for a, b in zip(got_grads, want_grads, strict=True):
        assert rel_error(a, b) < 3e-6


def test_inside_a_scan_a_growing_buffer_equals_growing_stacks():
    R, (v, w, g) = 4, inputs(R=4)

    def scanned(v):
        def body(carry, r):
            buffer, x = carry
            buffer = jax.lax.dynamic_update_index_in_dim(buffer, x, r, 2)
            mix = attention_residual(buffer, w, g, mask_R=jnp.arange(R) <= r).mix_BTD
            return (buffer, x + jnp.tanh(mix)), None

        (_, x), _ = jax.lax.scan(body, (jnp.zeros_like(v), v[:, :, 0]), jnp.arange(R))
        return jnp.sum(x**2)

    def unrolled(v):
        x, stack = v[:, :, 0], []
        for _ in range(R):
            stack.append(x)
            x = x + jnp.tanh(attention_residual(jnp.stack(stack, 2), w, g).mix_BTD)
        return jnp.sum(x**2)

    (a, da), (b, db) = (jax.jit(jax.value_and_grad(f))(v) for f in (scanned, unrolled))
    assert rel_error(a, b) < 1e-6 and rel_error(da, db) < 3e-6


def test_gradients_match_finite_differences():
    with jax.enable_x64(True):
        v, w, g = inputs(dtype=np.float64)
        part = v[:, :, 1] * 0.7 + 0.2
        rng = np.random.default_rng(2)
        c_mix, c_weights = rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 5, 4))
        mask = jnp.array([True, False, True, True])

        def loss(v, w, g, part):
            out = attention_residual(v, w, g, partial_BTD=part, mask_R=mask)
            return jnp.sum(out.mix_BTD * c_mix) + jnp.sum(out.weights_BTR * c_weights)

        def numpy_loss(v, w, g, part):
            mix, weights = reference(np.concatenate([v, part[:, :, None]], 2), w, g, np.asarray(mask))
            return np.sum(mix * c_mix) + np.sum(weights * c_weights)

        args = [np.asarray(x) for x in (v, w, g, part)]
        grads = jax.grad(loss, (0, 1, 2, 3))(v, w, g, part)
        for i, grad in enumerate(grads):
            for _ in range(6):
                step = rng.normal(size=args[i].shape) * 1e-5
                plus, minus = ([*args[:i], args[i] + s * step, *args[i + 1 :]] for s in (1, -1))
                want = (numpy_loss(*plus) - numpy_loss(*minus)) / 2
                assert abs(np.sum(grad * step) - want) < 1e-7 * np.abs(grad * step).sum()


def test_bfloat16_is_mixed_in_float32():
    v, w, g = inputs(R=3, D=64, dtype=jnp.bfloat16)
    got = attention_residual(v, w, g, partial_BTD=v[:, :, 0])
    want = reference(jnp.concatenate([v, v[:, :, :1]], 2), w, g)
    assert got.mix_BTD.dtype == jnp.bfloat16 and got.weights_BTR.dtype == jnp.float32
    assert rel_error(got.weights_BTR, want[1]) < 1e-5
    # Only the last rounding is to bfloat16, so nearly every element is the nearest one.
    nearest = jnp.asarray(want[0], jnp.bfloat16)
    assert np.mean(np.asarray(got.mix_BTD == nearest)) > 0.99
    grads = jax.grad(lambda *a: jnp.sum(attention_residual(*a)[0].astype(jnp.float32)), (0, 1, 2))(v, w, g)
    assert [x.dtype for x in grads] == [jnp.bfloat16] * 3


def test_extreme_sources_stay_finite():
    v, w, g = inputs()
    v = v.at[:, :, 0].set(0).at[:, :, 1].multiply(1e15)
    out, pullback = jax.vjp(lambda *a: attention_residual(*a, partial_BTD=v[:, :, 2]), v, 1e4 * w, g)
    assert rel_error(out.mix_BTD, reference(jnp.concatenate([v, v[:, :, 2:]], 2), 1e4 * w, g)[0]) < 1e-4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((out, pullback(out))))


def forward_and_backward(v, w, g, part, c):
    mix, pullback = jax.vjp(lambda *a: attention_residual(*a[:3], partial_BTD=a[3]).mix_BTD, v, w, g, part)
    return mix, pullback(c)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_backward_keeps_the_arguments_and_scalars(dtype):
    v, w, g = inputs(B=2, T=16, R=4, D=64, dtype=dtype)
    part = v[:, :, 0]
    saved = jax.tree.leaves(jax.vjp(lambda *a: attention_residual(*a[:3], partial_BTD=a[3]), v, w, g, part)[1])
    arguments = sum(x.nbytes for x in (v, part))
    scalars = 2 * 2 * 16 * 5 * 4
    vectors = 4 * 64 * 4
    assert sum(x.nbytes for x in saved) <= arguments + scalars + vectors
    assert all(x.dtype == dtype for x in saved if x.size >= part.size)


def test_float32_needs_no_temporary_of_the_size_of_the_sources():
    v, w, g = inputs(B=2, T=256, R=8, D=64)
    part = v[:, :, 0]
    compiled = jax.jit(forward_and_backward).lower(v, w, g, part, part).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * v.nbytes


def test_on_a_tpu_bfloat16_sources_are_never_widened_in_memory():
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [((2, 1024, 8, 1024), jnp.bfloat16), ((1024,), jnp.float32), ((1024,), jnp.float32)]
    shapes += [((2, 1024, 1024), jnp.bfloat16)] * 2
    arguments = [jax.ShapeDtypeStruct(*x, sharding=sharding) for x in shapes]
    compiled = jax.jit(forward_and_backward).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 1024 * 8 * 1024 * 4 / 10


def test_what_does_not_fit_is_refused():
    v, w, g = inputs(R=2)
    for bad, message in [
        (lambda: attention_residual(v[0], w, g), "sources must be"),
        (lambda: attention_residual(v, w[:-1], g), "query must be"),
        (lambda: attention_residual(v, w, g[:-1]), "gain must be"),
        (lambda: attention_residual(v, w, g, partial_BTD=v), "partial must be"),
        (lambda: attention_residual(v[:, :, :0], w, g), "no source"),
        (lambda: attention_residual(v, w, g, mask_R=jnp.ones(3, bool)), "mask must be"),
        (lambda: attention_residual(v, w, g, mask_R=jnp.ones(2)), "mask must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad()
