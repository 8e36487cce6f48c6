"""MLA's softmax attention against a float64 reference, finite differences, and its invariants."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mla_attention as module
from tests.conftest import rel_error

H, K, P, V = 2, 6, 3, 5
mla_attention = jax.jit(module.mla_attention, static_argnames=("scale", "block_size"))


def reference(q_nope, q_rope, k_nope, k_rope, v, scale, segment_ids=None):
    """Row by row in float64: who may be looked at is walked back token by token."""
    q = np.concatenate([q_nope, q_rope], -1).astype(np.float64)
    B, T, H = q.shape[:3]
    out = np.zeros(np.asarray(v).shape)
    ids = np.ones((B, T), int) if segment_ids is None else np.asarray(segment_ids)
    for b, t, h in np.ndindex(B, T, H):
        keys = []
        for s in range(t, -1, -1):
            if ids[b, s] != ids[b, t] or ids[b, s] == 0:
                break
            key = np.concatenate([k_nope[b, s, h], k_rope[b, s]]).astype(np.float64)
            keys.append((scale * np.dot(q[b, t, h], key), np.asarray(v[b, s, h], np.float64)))
        if keys:
            p = np.exp(np.array([x for x, _ in keys]) - max(x for x, _ in keys))
            out[b, t, h] = (p / p.sum()) @ np.array([x for _, x in keys])
    return out


def inputs(B=2, T=13, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, H, K), (B, T, H, P), (B, T, H, K), (B, T, P), (B, T, H, V))
    return tuple(jnp.asarray(1.5 * rng.normal(size=s), dtype) for s in shapes)


@partial(jax.jit, static_argnames="block_size")
def gradients(*x, block_size):
    def loss(*x):
        return jnp.sum(jnp.sin(mla_attention(*x, scale=0.4, block_size=block_size)))

    return jax.grad(loss, range(5))(*x)


def cut(arrays, *index):
    return tuple(x[index] for x in arrays)


@pytest.mark.parametrize("T, block", [(1, None), (13, None), (13, 4), (13, 1), (12, 4)])
def test_matches_the_reference(T, block):
    # Late rows have many keys, so the scale cannot hide behind a softmax over one.
    x = inputs(T=T)
    got = mla_attention(*x, scale=(K + P) ** -0.5, block_size=block)
    assert got.dtype == jnp.float32
    assert rel_error(got, reference(*x, (K + P) ** -0.5)) < 1e-6


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = inputs(dtype=np.float64)
        ids = np.array([[1] * 5 + [0] * 3 + [2] * 5, [3] * 13])
        got = mla_attention(*x, scale=0.3, block_size=4, segment_ids_BT=jnp.asarray(ids))
        assert got.dtype == jnp.float64
        assert rel_error(got, reference(*x, 0.3, ids)) < 1e-14


def test_the_scale_is_applied_once_to_the_whole_product():
    # Two keys at distance ln 3 from each other after scaling: weights 1/4 and 3/4.
    q_nope, q_rope = jnp.full((1, 2, 1, 1), 2.0), jnp.full((1, 2, 1, 1), 1.0)
    k_nope, k_rope = jnp.zeros((1, 2, 1, 1)), jnp.zeros((1, 2, 1))
    k_nope = k_nope.at[0, 1].set(np.log(3.0))
    k_rope = k_rope.at[0, 1].set(2 * np.log(3.0))
    v = jnp.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    o = mla_attention(q_nope, q_rope, k_nope, k_rope, v, scale=0.25)
    np.testing.assert_allclose(o[0, :, 0, 0], [0, 0.75], rtol=1e-6)


SEGMENTS = {
    "documents": [1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4],
    "padding right": [5, 5, 5, 5, 5, 6, 6, 6, 6, 0, 0, 0, 0],
    "padding left": [0, 0, 0, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6],
    "padding inside, id repeats": [7, 7, 7, 7, 0, 0, 7, 7, 7, 7, 7, 7, 7],
    "id returns": [1, 1, 1, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2],
    "all padding": [0] * 13,
    "all alone": list(range(1, 14)),
}


@pytest.mark.parametrize("block", [3, 16])
def test_documents_and_padding(block):
    ids = jnp.asarray(list(SEGMENTS.values()), jnp.int32)
    x = inputs(B=len(ids))
    got = mla_attention(*x, scale=0.4, segment_ids_BT=ids, block_size=block)
    assert rel_error(got, reference(*x, 0.4, ids)) < 1e-6
    assert (np.asarray(got)[np.asarray(ids) == 0] == 0).all()


def test_padding_gets_and_gives_no_gradient():
    ids = jnp.asarray(list(SEGMENTS.values()), jnp.int32)
    x = inputs(B=len(ids))
    c = jnp.asarray(np.random.default_rng(1).normal(size=x[4].shape), jnp.float32)

    def loss(*x):
        return jnp.sum(c * mla_attention(*x, scale=0.4, segment_ids_BT=ids, block_size=4))

    for grad in jax.jit(jax.grad(loss, range(5)))(*x):
        assert np.isfinite(grad).all()
        assert (np.asarray(grad)[np.asarray(ids) == 0] == 0).all()


def test_packed_equals_alone_forward_and_backward():
    lengths, T = [1, 4, 2, 6, 3], 18
    x = inputs(B=1, T=T)
    ids = np.repeat([1, 2, 0, 2, 3], lengths)
    ids = jnp.asarray(np.append(ids, [0] * (T - ids.size)), jnp.int32)[None]
    c = jnp.asarray(np.random.default_rng(1).normal(size=x[4].shape), jnp.float32)

    @jax.jit
    def run(x, c, ids):
        o, pullback = jax.vjp(lambda *x: mla_attention(*x, scale=0.4, segment_ids_BT=ids, block_size=4), *x)
        return (o, *pullback(c))

    packed, at = run(x, c, ids), 0
    for length in lengths:
        here = (slice(None), slice(at, at + length))
        if ids[0, at] != 0:
            alone = run(cut(x, *here), c[here], None)
            for got, want in zip(cut(packed, *here), alone, strict=True):
                # A document of one token has zero gradient for q and k, up to rounding.
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
        at += length


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_later_tokens_change_nothing_earlier_to_the_bit(dtype):
    cutoff, x = 9, inputs(T=21, dtype=dtype)
    c = jnp.asarray(np.random.default_rng(1).normal(size=x[4].shape), jnp.float32).at[:, cutoff:].set(0)

    @jax.jit
    def run(x):
        o, pullback = jax.vjp(lambda *x: mla_attention(*x, scale=0.4, block_size=4), *x)
        return (o, *pullback(c))

    other = tuple(
        a.at[:, cutoff:].set(20 * b[:, cutoff:]) for a, b in zip(x, inputs(T=21, dtype=dtype, seed=3), strict=True)
    )
    for a, b in zip(run(x), run(other), strict=True):
        assert (np.asarray(a[:, :cutoff]) == np.asarray(b[:, :cutoff])).all()


def test_blocks_in_the_future_are_skipped_not_masked():
    # NaN times a weight of zero would be NaN: these keys must never be touched by the queries before their block.
    x = inputs(T=16)
    x = tuple(a.at[:, 8:].set(np.nan) for a in x)
    assert np.isfinite(mla_attention(*x, scale=0.4, block_size=4)[:, :8]).all()
    assert not np.isfinite(mla_attention(*x, scale=0.4, block_size=16)[:, :8]).all()
    assert np.isfinite(gradients(*x, block_size=4)[0][:, :8]).all()


@pytest.mark.parametrize("block", [4, 16])
def test_gradients_match_finite_differences(block):
    with jax.enable_x64(True):
        x = inputs(dtype=np.float64, T=11)
        ids = np.array([[1] * 6 + [0] * 2 + [1] * 3, [4] * 11])
        rng = np.random.default_rng(2)
        c = rng.normal(size=x[4].shape)

        def loss(*x):
            return jnp.sum(c * mla_attention(*x, scale=0.4, segment_ids_BT=jnp.asarray(ids), block_size=block))

        grads = jax.jit(jax.grad(loss, range(5)))(*x)
        x = [np.asarray(a) for a in x]
        for i, grad in enumerate(grads):
            for _ in range(3):
                step = 1e-5 * rng.normal(size=x[i].shape)
                plus, minus = ([*x[:i], x[i] + s * step, *x[i + 1 :]] for s in (1, -1))
                want = np.sum(c * (reference(*plus, 0.4, ids) - reference(*minus, 0.4, ids))) / 2
                assert abs(np.sum(grad * step) - want) < 1e-7 * np.abs(grad * step).sum()


def test_block_sizes_agree_on_gradients():
    x = inputs(T=13)

    def grads(block):
        return gradients(*x, block_size=block)

    for a, b in zip(grads(5), grads(13), strict=True):
        assert rel_error(a, b) < 3e-6


def test_bfloat16_comes_out_in_float32():
    x = inputs(T=40, dtype=jnp.bfloat16)
    o = mla_attention(*x, scale=0.4, block_size=16)
    assert o.dtype == jnp.float32
    want = reference(*(np.asarray(a, np.float64) for a in x), 0.4)
    assert rel_error(o, want) < 5e-3
    wider = gradients(*(a.astype(jnp.float32) for a in x), block_size=16)
    for got, want in zip(gradients(*x, block_size=16), wider, strict=True):
        assert got.dtype == jnp.bfloat16
        assert rel_error(got, want) < 2e-2


def test_large_scores_stay_finite():
    x = tuple(30 * a for a in inputs(T=20))
    assert rel_error(mla_attention(*x, scale=1.0, block_size=8), reference(*x, 1.0)) < 1e-3
    assert all(np.isfinite(g).all() for g in gradients(*x, block_size=8))


def forward_and_backward(c, *x):
    o, pullback = jax.vjp(lambda *x: mla_attention(*x, scale=0.4, block_size=64), *x)
    return o, pullback(c)


def shapes(T):
    x = [jax.ShapeDtypeStruct((1, T, *s), jnp.float32) for s in ((H, K), (H, P), (H, K), (P,), (H, V))]
    return x[4], *x


def test_memory_grows_with_T_not_with_its_square():
    temporary = [
        jax.jit(forward_and_backward).lower(*shapes(T)).compile().memory_analysis().temp_size_in_bytes
        for T in (1024, 4096)
    ]
    assert temporary[1] < 5 * temporary[0]
    assert temporary[1] < 4096 * 4096 * 4 / 10


def test_the_program_does_not_grow_with_T():
    lines = [len(jax.jit(forward_and_backward).lower(*shapes(T)).as_text().splitlines()) for T in (256, 65536)]
    assert lines[0] == lines[1]


def test_what_does_not_fit_is_refused():
    q_nope, q_rope, k_nope, k_rope, v = inputs()
    for bad, message in [
        (lambda: mla_attention(q_nope[0], q_rope, k_nope, k_rope, v, scale=1.0), "queries must be"),
        (lambda: mla_attention(q_nope, q_rope[:, 1:], k_nope, k_rope, v, scale=1.0), "q_rope must be"),
        (lambda: mla_attention(q_nope, q_rope, k_nope[..., 1:], k_rope, v, scale=1.0), "k_nope must be"),
        (lambda: mla_attention(q_nope, q_rope, k_nope, k_rope[..., 1:], v, scale=1.0), "k_rope must be"),
        (lambda: mla_attention(q_nope, q_rope, k_nope, k_rope, v[:, :, 1:], scale=1.0), "v must be"),
        (
            lambda: mla_attention(
                q_nope, q_rope, k_nope, k_rope, v, scale=1.0, segment_ids_BT=jnp.ones((2, 3), jnp.int32)
            ),
            "segment_ids must be",
        ),
        (lambda: mla_attention(q_nope, q_rope, k_nope, k_rope, v, scale=1.0, block_size=0), "block_size"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad()
