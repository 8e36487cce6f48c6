"""Chunked cross entropy against a float64 reference, finite differences, and its bound on memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import losses
from k3jax.ops.losses import Loss
from tests.conftest import rel_error

next_token_loss = jax.jit(losses.next_token_loss, static_argnames=("z_loss", "chunk_size"))


def reference(hidden, head, targets, z_loss=0.0):
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    targets = np.asarray(targets)
    valid = targets >= 0
    top = logits.max(-1)
    logsumexp = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    nats = np.where(valid, logsumexp - picked, 0)
    correct = np.sum((logits.argmax(-1) == targets) & valid)
    return Loss(nats.sum(), z_loss * np.sum(valid * logsumexp**2), valid.sum(), correct)


def inputs(B=2, T=13, D=6, W=11, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(2 * rng.normal(size=(B, T, D)), dtype)
    head = jnp.asarray(rng.normal(size=(D, W)), dtype)
    targets = rng.integers(0, W, size=(B, T))
    # Half of the targets are the likeliest token, so that `correct` is neither nothing nor everything.
    likely = (np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)).argmax(-1)
    targets = np.where(rng.random((B, T)) < 0.5, likely, targets)
    targets[0, 3:6], targets[1, -1] = -1, -100
    return hidden, head, jnp.asarray(targets, jnp.int32)


@pytest.mark.parametrize("chunk", [None, 1, 8, 26, 1000])
def test_matches_the_reference_whatever_the_chunk(chunk):
    x = inputs()
    got = next_token_loss(*x, z_loss=0.1, chunk_size=chunk)
    want = reference(*x, z_loss=0.1)
    assert got.nats.dtype == got.z.dtype == jnp.float32 and got.count.dtype == got.correct.dtype == jnp.int32
    assert rel_error(got.nats, want.nats) < 1e-6 and rel_error(got.z, want.z) < 1e-6
    assert got.count == want.count == 22 and got.correct == want.correct
    assert 5 < got.correct < 20


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = inputs(dtype=np.float64)
        got = next_token_loss(*x, z_loss=0.1, chunk_size=8)
        want = reference(*x, z_loss=0.1)
        assert got.nats.dtype == got.z.dtype == jnp.float64
        assert rel_error(got.nats, want.nats) < 1e-14 and rel_error(got.z, want.z) < 1e-14


def test_z_loss_by_hand():
    # Logits 0 and ln 3: log-sum-exp ln 4, cross entropy of token 0 ln 4 and of token 1 ln 4/3.
    hidden, head = jnp.ones((1, 2, 1)), jnp.array([[0.0, np.log(3.0)]])
    got = next_token_loss(hidden, head, jnp.array([[0, 1]]), z_loss=0.5)
    np.testing.assert_allclose(got.nats, np.log(4) + np.log(4 / 3), rtol=1e-6)
    np.testing.assert_allclose(got.z, 0.5 * 2 * np.log(4) ** 2, rtol=1e-6)
    assert (got.count, got.correct) == (2, 1)
    # d z / d logit = z_loss * 2 * lse * p; the head's gradient sums both tokens.
    grad = jax.grad(lambda head: next_token_loss(hidden, head, jnp.array([[0, 1]]), z_loss=0.5).z)(head)
    np.testing.assert_allclose(grad, 2 * 0.5 * 2 * np.log(4) * np.array([[0.25, 0.75]]), rtol=1e-6)
    assert next_token_loss(hidden, head, jnp.array([[0, 1]])).z == 0


def test_a_tie_goes_to_the_first_token():
    got = next_token_loss(jnp.ones((1, 3, 2)), jnp.ones((2, 4)), jnp.array([[0, 1, -1]]))
    assert got.correct == 1


@pytest.mark.parametrize("chunk", [8, None])
def test_gradients_match_finite_differences_for_both_sums_apart(chunk):
    with jax.enable_x64(True):
        hidden, head, targets = inputs(dtype=np.float64)
        rng = np.random.default_rng(1)

        def total(loss):
            return 0.7 * loss.nats - 3.0 * loss.z

        @jax.jit
        def grads(hidden, head):
            f = partial(losses.next_token_loss, z_loss=0.1, chunk_size=chunk)
            return jax.grad(lambda *x: total(f(*x, targets)), (0, 1))(hidden, head)

        got = grads(hidden, head)
        assert (np.asarray(got[0])[np.asarray(targets) < 0] == 0).all()
        x = [np.asarray(hidden), np.asarray(head)]
        for i, grad in enumerate(got):
            for _ in range(6):
                step = 1e-5 * rng.normal(size=x[i].shape)
                plus, minus = ([*x[:i], x[i] + s * step, *x[i + 1 :]] for s in (1, -1))
                want = total(reference(*plus, targets, 0.1)) - total(reference(*minus, targets, 0.1))
                assert abs(np.sum(grad * step) - want / 2) < 1e-7 * np.abs(grad * step).sum()


def test_no_target_at_all_is_zero():
    hidden, head, targets = inputs()

    def loss(hidden, head):
        out = losses.next_token_loss(hidden, head, jnp.full_like(targets, -1), z_loss=0.1, chunk_size=8)
        return out.nats + out.z, out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves((out, grads)))


def test_large_logits_stay_finite():
    hidden, head, targets = inputs()
    got = next_token_loss(1e4 * hidden, head, targets)
    assert rel_error(got.nats, reference(1e4 * hidden, head, targets).nats) < 1e-6


def test_bfloat16_is_summed_in_float32():
    x = inputs(T=200, D=32, W=64, dtype=jnp.bfloat16)
    got, want = next_token_loss(*x), reference(*x)
    assert got.nats.dtype == jnp.float32
    assert rel_error(got.nats, want.nats) < 1e-5
    grad = jax.jit(jax.grad(lambda *x: losses.next_token_loss(*x).nats, (0, 1)))
    for a, b in zip(grad(*x), grad(*(y.astype(jnp.float32) for y in x[:2]), x[2]), strict=True):
        assert a.dtype == jnp.bfloat16
        assert rel_error(a, b) < 1e-2


@pytest.mark.parametrize("chunk", [None, 256])
def test_a_large_vocabulary_needs_a_chunk_of_logits(chunk):
    B, T, D, W = 1, 4096, 64, 163840

    def step(hidden, head, targets):
        def loss(hidden, head):
            out = losses.next_token_loss(hidden, head, targets, z_loss=1e-4, chunk_size=chunk)
            return out.nats + out.z

        return jax.value_and_grad(loss, (0, 1))(hidden, head)

    shapes = (((B, T, D), jnp.float32), ((D, W), jnp.float32), ((B, T), jnp.int32))
    compiled = jax.jit(step).lower(*(jax.ShapeDtypeStruct(*x) for x in shapes)).compile()
    chunk_bytes = 4 * W * (chunk or 2**24 // W)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 3 * chunk_bytes + 3 * 4 * D * W
    assert temporary < 4 * T * W / 4


def test_what_does_not_fit_is_refused():
    hidden, head, targets = inputs()
    for bad, message in [
        (lambda: next_token_loss(hidden[0], head, targets), "hidden must be"),
        (lambda: next_token_loss(hidden, head.T, targets), "hidden must be"),
        (lambda: next_token_loss(hidden, head, targets[:, 1:]), "targets must be"),
        (lambda: next_token_loss(hidden, head, targets.astype(jnp.float32)), "targets must be"),
        (lambda: next_token_loss(hidden, head, targets, chunk_size=0), "chunk_size"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad()
