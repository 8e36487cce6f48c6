"""Initial values: the same bits on every mesh, different ones everywhere else, and the distributions of spec §1.5."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import ModelConfig
from k3jax.nn.initial import initial_leaf, parameter

CONFIG = ModelConfig(init_std=0.02)
SOFTPLUS = dataclasses.replace(CONFIG, kda_decay="softplus")
LAYER = ("stage_0", "run_0", "layer_0")


def leaf(name, shape, seed=0, config=CONFIG, layer=LAYER, sharding=None):
    return np.asarray(initial_leaf(config, seed, (*layer, name), shape, sharding))


def by_jax(name, shape, config=CONFIG):
    """The draw of a module's own initialisation."""

    class Module(nn.Module):
        config: ModelConfig

        @nn.compact
        def __call__(self):
            return parameter(self, name, shape)

    params = Module(config).init(jax.random.key(0))["params"]
    assert list(params) == [name] and params[name].dtype == np.float32
    return np.asarray(params[name])


def by_numpy(name, shape, config=CONFIG):
    return leaf(name, (1, 1, *shape), config=config)[0, 0]


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("q_proj", (8, 2, 16, 2, 8), ("d",)),  # blocks
        ("q_proj", (1, 8, 16, 2, 8), (None, "d")),  # repeats
        ("q_proj", (2, 1, 16, 2, 8), (None, None, "d")),  # rows of a matrix
        ("q_proj", (2, 1, 16, 2, 8), (None, None, None, None, "d")),
        ("expert_up", (2, 1, 8, 6, 4), (None, None, "d")),  # experts
        ("expert_up", (2, 1, 3, 8, 4), (None, None, None, "d")),
        ("dt_bias", (1, 2, 8, 4), (None, None, "d")),
        ("embed", (16, 8), ("d",)),
        ("head", (8, 16), (None, "d")),
    ],
)
def test_bits_do_not_depend_on_the_mesh(name, shape, axes):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    want = initial_leaf(CONFIG, 3, (*LAYER, name), shape)
    got = initial_leaf(CONFIG, 3, (*LAYER, name), shape, NamedSharding(mesh, PartitionSpec(*axes)))
    assert len(want.sharding.device_set) == 1 and len(got.sharding.device_set) == 8
    assert got.addressable_shards[0].data.size == got.size // 8
    assert want.dtype == got.dtype == np.float32 and want.shape == got.shape == shape
    np.testing.assert_array_equal(got, want)


def test_bits_are_a_seed_s_for_good():
    np.testing.assert_array_equal(leaf("q_proj", (1, 1, 4, 2, 3), seed=5), leaf("q_proj", (1, 1, 4, 2, 3), seed=5))


def test_seeds_paths_layers_and_experts_differ():
    shape = (2, 2, 3, 8, 8)  # block, repeat, expert, matrix
    layers = [LAYER, ("stage_1", *LAYER[1:]), (LAYER[0], "run_1", LAYER[2]), (*LAYER[:2], "layer_1")]
    drawn = [leaf("expert_up", shape, layer=layer) for layer in layers]
    drawn += [leaf("expert_up", shape, seed=1), leaf("expert_gate", shape)]
    matrices = np.concatenate([x.reshape(-1, 64) for x in drawn])
    correlation = np.corrcoef(matrices)
    np.fill_diagonal(correlation, 0)
    assert len(matrices) == 6 * 12 and np.abs(correlation).max() < 0.7  # 5.6 standard deviations


def test_a_longer_stack_begins_with_the_shorter_one():
    """A layer's values follow from its own place alone."""
    np.testing.assert_array_equal(leaf("q_proj", (4, 3, 4, 2, 3))[:2, :2], leaf("q_proj", (2, 2, 4, 2, 3)))


def moments(x, mean, std):
    """Mean and standard deviation within five standard errors of a normal sample, which is the widest here."""
    x = np.asarray(x, np.float64)
    assert abs(x.mean() - mean) < 5 * std / np.sqrt(x.size)
    assert abs(x.std() / std - 1) < 5 / np.sqrt(2 * x.size)


@pytest.mark.parametrize("draw", [by_numpy, by_jax])
def test_distributions(draw):
    for name, shape in (("q_proj", (40, 5, 20)), ("expert_up", (5, 40, 20)), ("router", (80, 50))):
        x = draw(name, shape)
        moments(x, 0, 0.02)
        assert np.abs(x).max() > 3 * 0.02  # not cut off
        moments(draw(name, shape, dataclasses.replace(CONFIG, init_std=0.5)), 0, 0.5)

    taps = draw("q_conv", (20, 50, 4))
    assert 0.49 < np.abs(taps).max() <= 0.5  # 1 / sqrt(4 inputs)
    moments(taps, 0, 0.5 / np.sqrt(3))
    assert 0.99 / np.sqrt(2) < np.abs(draw("v_conv", (20, 50, 2))).max() <= 1 / np.sqrt(2)

    dt = np.log1p(np.exp(draw("dt_bias", (40, 100)).astype(np.float64)))  # the softplus that undoes it
    assert 0.999e-3 < dt.min() < 1.02e-3 and 0.098 < dt.max() < 0.1001
    moments(np.log10(dt), -2, 2 / np.sqrt(12))  # log-uniform

    rate = np.exp(draw("a_log", (4000,), SOFTPLUS).astype(np.float64))
    assert 1 <= rate.min() < 1.02 and 15.98 < rate.max() <= 16.0001
    moments(rate, 8.5, 15 / np.sqrt(12))
    assert np.all(draw("a_log", (6,)) == 0)  # the bounded gate starts with slope 1

    for name in ("mixer_norm", "o_norm", "final_norm", "mixer_res_gain"):
        assert np.all(draw(name, (6,)) == 1)
    for name in ("mixer_res_query", "ffn_res_query", "output_res_query"):
        assert np.all(draw(name, (6,)) == 0)


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("q_proj", (40, 5, 20), CONFIG),
        ("expert_down", (5, 40, 20), CONFIG),
        ("k_conv", (20, 50, 4), CONFIG),
        ("dt_bias", (40, 100), CONFIG),
        ("a_log", (4000,), SOFTPLUS),
    ],
)
def test_both_draws_have_one_distribution(name, shape, config):
    """Kolmogorov and Smirnov's distance of 4000 draws each stays below its value at 1e-4 ; seeds are fixed."""
    a, b = np.sort(by_numpy(name, shape, config), axis=None), np.sort(by_jax(name, shape, config), axis=None)
    everything = np.concatenate([a, b])
    share = [np.searchsorted(x, everything, side="right") / x.size for x in (a, b)]
    assert np.abs(share[0] - share[1]).max() < 2.23 * np.sqrt(2 / a.size)
