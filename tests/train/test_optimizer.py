"""The optimiser against hand loops, its state, and what decays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict

from k3jax.config import ModelConfig, OptimConfig
from k3jax.models import KimiK3
from k3jax.nn.parameters import parameter_spec
from k3jax.train.optimizer import ParameterLabel, make_optimizer, parameter_label
from tests.conftest import rel_error
from tests.train.parameter_tree import LEAVES, get, matrix_slices, random_tree
from tests.train.test_muon import loop_direction

STEPS = 20
MUON = OptimConfig(name="muon", learning_rate=0.02, adam_learning_rate=0.003, warmup_fraction=0.1)
ADAMW = dataclasses.replace(MUON, name="adamw")
SMALL = {  # enough for tests that are not about every leaf
    "embed": (5, 4),
    "final_norm": (4,),
    "body": {"kda": {"q_proj": (2, 4, 2, 3), "a_log": (2, 2)}, "moe": {"expert_up": (2, 3, 4, 5)}},
}


def small_tree(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(dtype), SMALL, is_leaf=lambda x: isinstance(x, tuple)
    )


@functools.cache
def jitted(config):
    optimizer = make_optimizer(config, STEPS)
    return jax.jit(optimizer.init), jax.jit(optimizer.update)


def learning_rate(step, peak):
    """MUON's schedule by hand: two steps of warm-up, then cosine to a tenth at step 19."""
    if step < 2:
        return peak * (step + 1) / 2
    return peak * (0.1 + 0.9 * (1 + np.cos(np.pi * (step - 1) / 18)) / 2)


class HandLoop:
    """Spec §7.2 in numpy, a leaf at a time."""

    def __init__(self, config):
        self.config, self.memory = config, {}

    def update(self, path, g, w, step):
        c, (_, leaf) = self.config, LEAVES[path]
        zero = np.zeros_like(g)
        if c.name == "muon" and leaf.matrices:
            m = self.memory[path] = c.muon_momentum * self.memory.get(path, zero) + g
            o, peak = loop_direction(path, m), c.learning_rate
        else:
            m, v = self.memory.get(path, (zero, zero))
            m, v = self.memory[path] = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g**2
            m, v = m / (1 - c.beta1 ** (step + 1)), v / (1 - c.beta2 ** (step + 1))
            o = m / (np.sqrt(v) + c.eps)
            peak = c.adam_learning_rate if c.name == "muon" else c.learning_rate
        return -learning_rate(step, peak) * (o + (c.weight_decay * w if leaf.weight_decay else 0))


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["muon", "adamw"])
def test_four_steps_on_every_leaf_equal_the_hand_loop(config):
    with jax.enable_x64(True):
        optimizer, hand = make_optimizer(config, STEPS), HandLoop(config)
        update = jax.jit(optimizer.update)
        params = random_tree(dtype=np.float64)
        state = optimizer.init(params)
        for step in range(4):
            grads = random_tree(seed=step + 1, dtype=np.float64)
            updates, state = update(grads, state, params)
            for path in LEAVES:
                want = hand.update(path, get(grads, path), get(params, path), step)
                # The schedule's float32 is all that separates them.
                assert rel_error(get(updates, path), want) < 1e-6, (step, path)
            params = jax.tree.map(lambda p, u: np.asarray(p + u), params, updates)


def test_label_table_is_what_we_wrote_down():
    params = random_tree()
    for path, (_, leaf) in LEAVES.items():
        shape = get(params, path).shape
        label = parameter_label(MUON, path, shape)
        print("/".join(path), shape, label)
        if leaf.matrices:
            matrices = [get(params, path)[index].reshape(as_2d).shape for index, as_2d in matrix_slices(path)]
            want = ParameterLabel("muon", leaf.weight_decay, len(matrices), tuple(sorted(matrices[0])))
        else:
            want = ParameterLabel("adamw", leaf.weight_decay, 0, ())
        assert label == want, path
        assert parameter_label(ADAMW, path, shape) == ParameterLabel("adamw", leaf.weight_decay, 0, ()), path


@pytest.mark.parametrize("preset", [ModelConfig.kimi_k3, ModelConfig.kimi_linear_48b])
def test_the_table_fits_the_models(preset):
    model = KimiK3(preset())
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    sizes = {}
    for path, p in flatten_dict(shapes).items():
        axes = parameter_spec(path, p.ndim).axes
        assert p.ndim - len(axes) in (0, 2), path  # stacked or not, nothing between
        for axis, size in zip(axes, p.shape[p.ndim - len(axes) :], strict=True):
            # An axis name means one size within a module, and the model's width everywhere.
            sizes.setdefault((axis, axis == "embed" or path[:-1]), set()).add(size)
    assert all(len(found) == 1 for found in sizes.values()), sizes


def test_without_gradients_only_listed_leaves_decay():
    init, update = jitted(MUON)
    params = small_tree()
    updates, _ = update(jax.tree.map(np.zeros_like, params), init(params), params)
    rates = {"embed": 0.003 / 2, "body/kda/q_proj": 0.02 / 2, "body/moe/expert_up": 0.02 / 2}
    for path, p in flatten_dict(params).items():
        want = -rates.get("/".join(path), 0) * 0.1 * p
        np.testing.assert_allclose(get(updates, path), want, rtol=1e-5, err_msg=str(path))


def test_zero_gradients_of_some_matrices_only():
    config = dataclasses.replace(MUON, weight_decay=0.0)
    init, update = jitted(config)
    params, grads = small_tree(), small_tree(seed=1)
    grads["body"]["moe"]["expert_up"][1, 2] = 0  # an expert without tokens
    grads["body"]["kda"]["q_proj"][0, :, 1] = 0  # a dead head
    updates, state = update(grads, init(params), params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))
    experts, heads = updates["body"]["moe"]["expert_up"], updates["body"]["kda"]["q_proj"]
    assert (np.asarray(experts[1, 2]) == 0).all() and (np.asarray(heads[0, :, 1]) == 0).all()
    assert (np.abs(experts).sum((2, 3)) > 0).sum() == 5 and (np.abs(heads).sum((1, 3)) > 0).sum() == 3


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["muon", "adamw"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_state_is_plain_and_float32_or_wider(config, dtype):
    init, update = jitted(config)
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), small_tree())
    state = init(params)
    updates, after = update(params, state, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert state.count.dtype == jnp.int32 and after.count == 1
    assert {x.dtype for x in jax.tree.leaves((state.momentum, state.second_moment, updates))} == {jnp.dtype("float32")}
    assert jax.tree.structure(state.momentum) == jax.tree.structure(params) == jax.tree.structure(updates)
    second = {"/".join(path) for path in flatten_dict(state.second_moment)}
    assert second == {"embed", "final_norm", "body/kda/a_log"} | (
        {"body/kda/q_proj", "body/moe/expert_up"} if config is ADAMW else set()
    )
    keys = [key for path, _ in jax.tree_util.tree_leaves_with_path(state) for key in path]
    assert all(isinstance(getattr(key, "key", getattr(key, "name", None)), str) for key in keys)


def test_float64_state_under_x64():
    with jax.enable_x64(True):
        state = make_optimizer(MUON, STEPS).init(small_tree(dtype=np.float64))
        assert {x.dtype for x in jax.tree.leaves((state.momentum, state.second_moment))} == {jnp.dtype("float64")}


def test_state_survives_orbax(tmp_path):
    init, update = jitted(MUON)
    params = small_tree()
    _, state = update(small_tree(seed=1), init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(init, params))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["muon", "adamw"])
def test_a_hundred_tiny_updates_move_every_weight(config):
    # 1e-5 a step against weights of 1: lost in bfloat16, kept in float32 master weights.
    config = dataclasses.replace(
        config, learning_rate=1e-5, adam_learning_rate=1e-5, schedule="constant", warmup_fraction=0.0, weight_decay=0.0
    )
    init, update = jitted(config)
    params = jax.tree.map(np.ones_like, small_tree())
    grads = small_tree(seed=1)
    moved, state = params, init(params)
    for _ in range(100):
        updates, state = update(grads, state, moved)
        moved = optax.apply_updates(moved, updates)
    for path, p in flatten_dict(moved).items():
        distance = np.abs(np.asarray(p, np.float64) - 1)
        assert distance.max() < 3e-3, path
        assert (distance > 1e-6).mean() > 0.95, path


def test_update_compiles_once():
    optimizer = make_optimizer(MUON, STEPS)
    update = jax.jit(optimizer.update)
    params = jax.tree.map(jnp.asarray, small_tree())
    state = optimizer.init(params)
    for step in range(4):
        updates, state = update(jax.tree.map(jnp.asarray, small_tree(seed=step)), state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1


def test_errors_name_field_leaf_and_fix():
    config = dataclasses.replace(MUON)
    object.__setattr__(config, "name", "adam")
    with pytest.raises(ValueError, match=r"OptimConfig.name = 'adam': use 'adamw' or 'muon'"):
        make_optimizer(config, STEPS)
    for config in (MUON, ADAMW):
        with pytest.raises(ValueError, match=r"'body/bias': unknown leaf name 'bias'"):
            make_optimizer(config, STEPS).init({"body": {"bias": jnp.zeros(3)}})
