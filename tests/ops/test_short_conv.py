"""The short convolution against a loop over tokens, and its document boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.short_conv import short_conv
from tests.conftest import rel_error


def by_hand(x, taps, ids):
    """A loop that walks back from each token until the document ends."""
    y = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if ids[b, t] == 0:
                continue
            for back in range(taps.shape[-1]):
                if t - back < 0 or any(ids[b, s] != ids[b, t] for s in range(t - back, t)):
                    break
                y[b, t] += x[b, t - back] * taps[..., -1 - back]
    return y


@pytest.mark.parametrize(
    "ids",
    [
        [1] * 12,
        [1, 1, 1, 2, 2, 3, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 1, 1, 1, 2, 1, 2, 0],
        [0] * 12,
    ],
)
@pytest.mark.parametrize("num_taps", [1, 2, 4, 14])
def test_matches_loop(ids, num_taps):
    rng = np.random.default_rng(0)
    x, taps = rng.normal(size=(2, 12, 2, 3)), rng.normal(size=(2, 3, num_taps))
    ids = np.array([ids, [1] * 12])
    with jax.enable_x64(True):
        got = short_conv(jnp.asarray(x), jnp.asarray(taps), jnp.asarray(ids))
    assert rel_error(got, by_hand(x, taps, ids)) < 1e-14


def test_without_ids_is_one_document():
    rng = np.random.default_rng(1)
    x, taps = rng.normal(size=(1, 9, 1, 5)).astype(np.float32), rng.normal(size=(1, 5, 4)).astype(np.float32)
    np.testing.assert_array_equal(short_conv(x, taps), short_conv(x, taps, jnp.ones((1, 9), jnp.int32)))


def test_causal_and_dtype():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 9, 1, 5)), jnp.bfloat16)
    taps = jnp.ones((1, 5, 4))
    y = short_conv(x, taps)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y[:, :5], short_conv(x.at[:, 5:].set(7), taps)[:, :5])
