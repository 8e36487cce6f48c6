"""States at the blocks of a prompt: those of the prompt's beginnings run alone."""

import functools

import jax
import numpy as np
import pytest

from k3jax.ops.delta_attention import kda, kda_step
from k3jax.ops.prefill import kda_prefill
from tests.conftest import rel_error
from tests.ops.kda_cases import NAMES, random_inputs, recurrence

B, T, H, J, K, V, BLOCK = 3, 29, 1, 2, 8, 6, 8
# Row 0: documents of 1, 15 (ends with a block) and 9 tokens, then padding. Row 1: a document that spans blocks, padding
# at a block's edge, the same id again. Row 2: padding up to the second block, then one document.
IDS = np.zeros((B, T), np.int32)
IDS[0, :1], IDS[0, 1:16], IDS[0, 16:25] = 1, 2, 3
IDS[1, :15], IDS[1, 16:29] = 4, 4
IDS[2, 11:20] = 5


@functools.partial(jax.jit, static_argnames=("block_size", "implementation"))
def prefill(x, ids=None, block_size=BLOCK, implementation="chunked"):
    return kda_prefill(
        *(x[name] for name in NAMES[:5]), initial_state_BJKV=x.get("initial_state"), segment_ids_BT=ids,
        block_size=block_size, chunk_size=4, implementation=implementation,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["one document", "packed"])
def test_states_are_those_of_the_beginnings_alone(ids, implementation):
    x = random_inputs(0, B, T, H, J, K, V)
    got = prefill(x, ids, implementation=implementation)
    assert got.block_states_BNJKV.shape == (B, T // BLOCK, J, K, V)

    @jax.jit
    def alone(x, ids):
        arrays = [x[name] for name in NAMES[:5]]
        return kda(*arrays, initial_state_BJKV=x["initial_state"], segment_ids_BT=ids, implementation="recurrent")

    with jax.enable_x64(True):
        for n in range(T // BLOCK + 1):
            end = min((n + 1) * BLOCK, T)
            # Zeros behind the beginning, which leave the state: one compilation for all of them.
            begins = {k: np.where(np.arange(T).reshape(T, *[1] * (a.ndim - 2)) < end, a, 0.0) if k != "initial_state"
                      else np.float64(a) for k, a in x.items()}  # fmt: skip
            want = alone(begins, None if ids is None else np.where(np.arange(T) < end, ids, 0))
            state = got.final_state_BJKV if end == T else got.block_states_BNJKV[:, n]
            assert rel_error(state, want.final_state_BJKV) < 2e-6, n
        assert rel_error(got.o_BTJV, want.o_BTJV) < 2e-6


def test_a_cached_state_is_the_same_whatever_follows():
    """To the bit: what is stored for a prefix must not depend on the prompt it was first seen in."""
    x = random_inputs(1, B, T, H, J, K, V)
    other = {name: a.copy() for name, a in x.items()}
    for name in NAMES[:5]:
        other[name][:, 16:] *= 0.5
    a, b = prefill(x), prefill(other)
    assert np.array_equal(a.block_states_BNJKV[:, :2], b.block_states_BNJKV[:, :2])
    assert np.array_equal(a.o_BTJV[:, :16], b.o_BTJV[:, :16])
    assert not np.array_equal(a.block_states_BNJKV[:, 2], b.block_states_BNJKV[:, 2])


def test_rows_of_different_lengths_then_decode():
    """Right-padded rows; each goes on from its own last token with kda_step as the recurrence does."""
    x = random_inputs(2, B, T, H, J, K, V)
    lengths = np.array([1, 16, 27])
    ids = (np.arange(T) < lengths[:, None]).astype(np.int32)
    got = prefill(x, ids)
    rows = np.arange(B)
    step = kda_step(*(x[name][rows, lengths] for name in NAMES[:5]), got.final_state_BJKV)
    for b, n in enumerate(lengths):
        arrays = [x[name][b : b + 1, : n + 1] for name in NAMES[:5]]
        o, state = recurrence(*arrays, initial_state=x["initial_state"][b : b + 1])
        assert rel_error(step.o_BJV[b], o[0, -1]) < 2e-6
        assert rel_error(step.state_BJKV[b], state[0]) < 2e-6
        behind = got.block_states_BNJKV[b, -(-int(n) // BLOCK) - 1 :]
        behind = behind[1:] if n % BLOCK else behind
        assert all(np.array_equal(s, got.final_state_BJKV[b]) for s in behind)


def test_gradients_reach_through_block_states():
    x = random_inputs(3, 1, 12, H, J, K, V)
    weight = np.random.default_rng(0).standard_normal((1, 3, J, K, V)).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="implementation")
    def gradients(x, weight, implementation):
        return jax.grad(
            lambda x: (prefill(x, block_size=4, implementation=implementation).block_states_BNJKV * weight).sum()
        )(x)

    got = gradients(x, weight, "chunked")
    with jax.enable_x64(True):
        want = gradients(jax.tree.map(np.float64, x), np.float64(weight), "recurrent")
    for name in ("k", "v", "g", "beta", "initial_state"):
        assert rel_error(got[name], want[name]) < 5e-6, name


@pytest.mark.parametrize("block_size", [T, 64])
def test_a_block_as_long_as_the_prompt_or_longer(block_size):
    x = random_inputs(4, B, T, H, J, K, V)
    got = prefill(x, block_size=block_size)
    assert got.block_states_BNJKV.shape[1] == T // block_size
    assert all(np.array_equal(got.block_states_BNJKV[:, n], got.final_state_BJKV) for n in range(T // block_size))


@pytest.mark.parametrize("block_size", [0, -8, 2.0, None])
def test_an_impossible_block_size(block_size):
    x = random_inputs(5, 1, 3, 1, 1, 2, 2)
    with pytest.raises(ValueError, match="block_size"):
        kda_prefill(*(x[name] for name in NAMES[:5]), block_size=block_size)
