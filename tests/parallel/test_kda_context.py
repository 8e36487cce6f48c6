"""KDA with the sequence over eight devices: outputs, states and gradients of one device."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.ops.delta_attention import kda
from k3jax.ops.short_conv import short_conv
from k3jax.parallel.kda_context import context_kda, context_short_conv
from tests.conftest import rel_error
from tests.ops.kda_cases import NAMES, cotangents, random_inputs, recurrence

RANKS, B, T, H, J, K, V = 8, 2, 80, 2, 4, 8, 6
ROWS = P(None, "context")  # [B, T, ...], T over the ranks

# Ten tokens a rank. Row 0: a document over three ranks, one of one token at a rank's end, an id that comes back after
# padding on the next rank's first token, whole ranks of padding, a document that ends the sequence.
# Row 1: padding on ranks 0 and 1, so that the initial state waits for the first document; padding at the end.
IDS = np.zeros((B, T), np.int32)
IDS[0, :25], IDS[0, 25:29], IDS[0, 29], IDS[0, 30:38] = 1, 2, 3, 4
IDS[0, 40:43], IDS[0, 66:], IDS[1, 23:51], IDS[1, 51:68] = 4, 5, 7, 8


@functools.cache
def mesh():
    return jax.make_mesh((RANKS,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))


def on_ranks(check_vma=True, **options):
    """context_kda of whole arrays, with segment ids last."""

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(*[ROWS] * 5, P(), ROWS), out_specs=(ROWS, P()), check_vma=check_vma
    )
    def run(q, k, v, g, beta, state, ids):
        return tuple(
            context_kda(q, k, v, g, beta, axis_name="context", initial_state_BJKV=state, segment_ids_BT=ids, **options)
        )

    return run


def on_one(**options):
    return lambda q, k, v, g, beta, state, ids: tuple(
        kda(q, k, v, g, beta, initial_state_BJKV=state, segment_ids_BT=ids, **options)
    )


def with_gradients(run):
    def objective(x, ids, do, dstate):
        o, state = run(*(x[name] for name in NAMES), ids)
        return (o * do).sum() + (state * dstate).sum(), {"o": o, "state": state}

    def call(*args):
        grads, out = jax.grad(objective, has_aux=True)(*args)
        return out | {f"d{name}": grad for name, grad in grads.items()}

    return jax.jit(call)


@pytest.mark.parametrize("ids", [None, IDS], ids=["one document", "documents across ranks"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_ranks_give_what_one_device_gives(ids, check_vma):
    if ids is None and not check_vma:
        pytest.skip("the check has nothing to do with documents")
    x = random_inputs(3, B, T, H, J, K, V)
    do, dstate = cotangents(x)
    got = with_gradients(on_ranks(check_vma, implementation="chunked", chunk_size=4))(x, ids, do, dstate)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (x, do, dstate))
        want = with_gradients(on_one(implementation="recurrent"))(wide[0], ids, *wide[1:])
    assert got.keys() == want.keys()
    for name in got:
        assert rel_error(got[name], want[name]) < 5e-6, name


def test_a_state_travels_through_every_rank():
    """Weak decay and few keys: the first token and the initial state are still read on the last rank."""
    x = random_inputs(5, B, T, H, J, K, V, gate=-1e-3)
    o, state = jax.jit(on_ranks())(*(x[name] for name in NAMES), None)
    want_o, want_state = recurrence(*(x[name] for name in NAMES))
    assert rel_error(o, want_o) < 5e-6 and rel_error(state, want_state) < 5e-6
    without, _ = recurrence(*(x[name] for name in NAMES[:5]))
    assert rel_error(o[:, -10:], without[:, -10:]) > 1e-2  # the check can fail


def test_later_tokens_leave_earlier_ranks_untouched():
    x = random_inputs(6, B, T, H, J, K, V)
    run = jax.jit(on_ranks())
    before, _ = run(*(x[name] for name in NAMES), IDS)
    changed = {name: a.copy() for name, a in x.items()}
    for name in NAMES[:5]:
        changed[name][:, 43:] *= 0.5
    after, _ = run(*(changed[name] for name in NAMES), IDS)
    assert np.array_equal(before[:, :43], after[:, :43])
    assert not np.array_equal(before[:, 43:], after[:, 43:])


@pytest.mark.parametrize("ids", [None, IDS], ids=["one document", "documents across ranks"])
def test_the_convolution_reaches_into_the_rank_before(ids):
    random = np.random.default_rng(0)
    x, taps = random.standard_normal((B, T, H, K)), random.standard_normal((H, K, 4))
    x, taps, dy = np.float32(x), np.float32(taps), np.float32(random.standard_normal(x.shape))
    on_ranks = jax.shard_map(
        functools.partial(context_short_conv, axis_name="context"),
        mesh=mesh(), in_specs=(ROWS, P(), ROWS), out_specs=ROWS,
    )  # fmt: skip

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(conv, x, taps, dy):
        y, back = jax.vjp(lambda x, taps: conv(x, taps, ids), x, taps)
        return y, *back(dy)

    got, want = (values_and_gradients(conv, x, taps, dy) for conv in (on_ranks, short_conv))
    for i in range(3):
        assert rel_error(got[i], want[i]) < 1e-6


def test_too_few_tokens_for_the_convolution():
    x, taps = np.zeros((1, 2 * RANKS, 1, 1), np.float32), np.zeros((1, 1, 4), np.float32)
    on_ranks = jax.shard_map(
        functools.partial(context_short_conv, axis_name="context"), mesh=mesh(), in_specs=(ROWS, P()), out_specs=ROWS
    )
    with pytest.raises(ValueError, match="2 tokens a rank"):
        on_ranks(x, taps)
