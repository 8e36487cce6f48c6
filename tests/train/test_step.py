"""The train step against the same step by hand, and what must not change its numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from k3jax.config import ConfigError
from k3jax.data import Batch
from k3jax.models import KimiK3
from k3jax.train.balance import layer_values
from k3jax.train.metrics import violations
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import make_state
from k3jax.train.step import Scale, make_eval_step, make_train_step, objective
from tests.conftest import rel_error
from tests.train.tiny import (
    K3_SHAPE,
    T,
    equal_bits,
    fresh_state,
    make_batch,
    make_config,
    mesh_of,
    pad_rows,
    state_shapes,
    train_step,
    worst,
)

CONFIG = make_config()
BIN = 2 / CONFIG.model.balancing_bins  # of the first histogram, where all biases are 0
ONE_LAYER = {"num_layers": 1}


def reference_loss(config, params, router, batch):
    """Mean nats from whole logits, and what else the objective has, term by term."""
    logits_BTW, outputs = KimiK3(config.model).apply(
        {"params": params, "router": router}, batch.tokens_BT, batch.segment_ids_BT, mutable=["intermediates"]
    )
    valid_BT = batch.targets_BT >= 0
    chosen_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTW), jnp.maximum(batch.targets_BT, 0)[..., None], -1)
    square_BT = jax.nn.logsumexp(logits_BTW, axis=-1) ** 2
    nats = -jnp.sum(jnp.where(valid_BT, chosen_BT[..., 0], 0)) / jnp.sum(valid_BT)
    z = config.optim.z_loss * jnp.sum(jnp.where(valid_BT, square_BT, 0)) / jnp.sum(valid_BT)
    routing = {path[-1]: x for path, x in flatten_dict(outputs["intermediates"]).items() if "routing" in path}
    return nats, z, routing


@functools.cache
def reference(config):
    """`reference_loss` of the first state and `make_batch(8)`."""
    start, batch = fresh_state(config), make_batch(8)
    return jax.device_get(jax.jit(lambda p, r: reference_loss(config, p, r, batch))(start.params, start.router))


def run(config, batch, devices=1, steps=1):
    state = fresh_state(config, devices)
    for _ in range(steps):
        state, metrics = train_step(config, devices)(state, batch)
    return jax.device_get(state), jax.device_get(metrics)


def put(state):
    """A state made by hand, placed as the step leaves its own."""
    sharding = jax.sharding.NamedSharding(mesh_of(), jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(np.array(x), sharding), state)


def test_a_step_is_the_clipped_gradient_of_the_mean_through_the_optimiser():
    """By hand on four rows; the step sees four more of nothing but padding."""
    batch, config = make_batch(4), CONFIG
    start = fresh_state(config)
    params, router = start.params, start.router

    def objective(params):
        nats, z, _ = reference_loss(config, params, router, batch)
        return nats + z, (nats, z)

    grads, (nats, z) = jax.jit(jax.grad(objective, has_aux=True))(params)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads)))
    assert norm > 2 * config.optim.clip_norm
    clipped = jax.tree.map(lambda g: g * np.float32(config.optim.clip_norm / norm), grads)
    optimizer = make_optimizer(config.optim, config.train.steps)
    updates, opt_state = optimizer.update(clipped, optimizer.init(params), params)

    state, metrics = run(config, pad_rows(batch, 4))
    assert metrics["num_targets"] == np.sum(batch.targets_BT >= 0)
    assert metrics["num_tokens"] == np.sum(batch.segment_ids_BT > 0)
    for got, want in ((metrics["loss"], nats), (metrics["z_loss"], z), (metrics["grad_norm"], norm)):
        assert rel_error(got, want) < 1e-5
    assert metrics["learning_rate"] == np.float32(config.optim.learning_rate)
    assert worst(state.opt_state, opt_state) < 1e-4
    assert worst(state.params, optax.apply_updates(params, updates)) < 1e-5
    assert (state.step, state.skipped, state.streak) == (1, 0, 0)


def test_what_padding_holds_changes_nothing():
    batch = make_batch(8)
    garbage = batch._replace(tokens_BT=np.where(batch.segment_ids_BT == 0, 17, batch.tokens_BT))
    a, b = run(CONFIG, batch), run(CONFIG, garbage)
    assert rel_error(b[1]["loss"], a[1]["loss"]) < 1e-6
    assert equal_bits(a[1]["load"], b[1]["load"]) and equal_bits(a[0].router, b[0].router)
    assert worst(b[0].params, a[0].params) < 1e-6


def test_a_batch_without_targets_moves_nothing_but_decay():
    empty = Batch(*(np.full((8, T), v, np.int32) for v in (0, -1, 0)))
    state, metrics = run(CONFIG, empty)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and not metrics["nonfinite"]
    assert equal_bits(state.router, jax.device_get(fresh_state(CONFIG).router))


def test_uneven_micro_batches_on_four_devices_make_the_same_step():
    """Rows have from 0 to 15 targets, so means of means would differ; what crosses devices crosses once."""
    devices, batch = 4, make_batch(8)
    counts = np.sum(batch.targets_BT >= 0, axis=1)
    assert counts.min() == 0 and counts.max() == 15
    config = make_config(num_microbatches=2)
    step = train_step(config, devices)
    program = step.lower(fresh_state(config, devices), batch).compile()
    sums = [line for line in program.as_text().splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    # Histograms are summed as integers, and nothing is summed over devices inside the loop over micro-batches.
    shape = rf"\w+\[[\d,]*{config.model.num_experts},{config.model.balancing_bins}\]"
    histograms = [kind for line in sums for kind in re.findall(shape, line.split(" all-reduce")[0])]
    assert histograms and all(kind.startswith("s32") for kind in histograms)
    assert not any("while" in line for line in sums), sums

    state, metrics = jax.device_get(program(fresh_state(config, devices), jax.device_put(batch, _rows(devices))))
    want_state, want = run(CONFIG, batch)
    for name in ("loss", "z_loss", "grad_norm", "accuracy"):
        assert rel_error(metrics[name], want[name]) < 1e-5
    assert equal_bits(metrics["load"], want["load"])
    assert worst(state.opt_state, want_state.opt_state) < 1e-4
    assert worst(state.params, want_state.params) < 1e-5
    assert _apart(state.router, want_state.router) < BIN


def _apart(a, b):
    return max(np.max(np.abs(x - y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _rows(devices):
    return jax.sharding.NamedSharding(mesh_of(devices), jax.sharding.PartitionSpec("data"))


def test_kimi_k3_on_eight_devices_with_recomputation_is_one_device_without():
    """Recomputed layers must not be counted twice, whatever the mesh."""
    batch = make_batch(8)
    state, metrics = run(make_config(base=K3_SHAPE), batch)
    eight_state, eight = run(make_config({"remat": "layer"}, base=K3_SHAPE), batch, devices=8)
    for name in ("loss", "z_loss", "grad_norm", "accuracy"):
        assert rel_error(eight[name], metrics[name]) < 1e-5
    assert worst(eight_state.opt_state, state.opt_state) < 1e-4
    assert equal_bits(eight["load"], metrics["load"])
    for load_E in layer_values(CONFIG.model, metrics["load"], "moe", "load").values():
        assert np.sum(load_E) == metrics["num_tokens"] * CONFIG.model.num_experts_per_token
    assert all(np.max(np.abs(bias)) > BIN for bias in jax.tree.leaves(state.router))
    assert _apart(eight_state.router, state.router) < BIN


def test_the_bias_serves_from_the_next_step_on():
    """A step routes with the bias it was given: its load is that of top-k under the old bias, not the new one."""
    state, batch = fresh_state(CONFIG), make_batch(8)
    old_E = np.linspace(-0.3, 0.3, CONFIG.model.num_experts, dtype=np.float32)
    state = put(state._replace(router=jax.tree.map(lambda bias: bias + old_E, state.router)))
    after, metrics = jax.device_get(train_step(CONFIG)(state, batch))
    new_E = layer_values(CONFIG.model, after.router, "moe", "bias")[1]
    load_E = layer_values(CONFIG.model, metrics["load"], "moe", "load")[1]
    scores_TE = reference(CONFIG)[2]["scores_TE"][0, 0][batch.segment_ids_BT.reshape(-1) > 0]
    assert np.array_equal(load_E, _load(scores_TE + old_E))
    before, after_update = violations([load_E.tolist(), _load(scores_TE + new_E).tolist()])
    assert before > 1 and after_update < 0.5
    assert abs(np.mean(new_E)) < 1e-6


def _load(biased_TE):
    k = CONFIG.model.num_experts_per_token
    return np.bincount(np.argsort(-biased_TE, axis=1, kind="stable")[:, :k].ravel(), minlength=biased_TE.shape[1])


def test_a_skewed_router_is_balanced_in_a_few_steps():
    state, ones = fresh_state(CONFIG), np.ones((8, T), np.int32)
    tokens = np.random.default_rng(0).integers(0, 64, (8, T + 1), dtype=np.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones)
    skew = np.zeros((1, 2, 32, 8), np.float32)
    state.params["embed"] += 1
    skew[..., :3] = 0.05  # x has a mean now, and three experts like it
    state.params["stage_0"]["run_0"]["layer_0"]["moe"]["router"] += skew
    state, worst_layer = put(state), []
    for _ in range(6):
        state, metrics = train_step(CONFIG)(state, batch)
        loads = layer_values(CONFIG.model, metrics["load"], "moe", "load").values()
        worst_layer.append(max(violations([load_E.tolist() for load_E in loads])))
    assert worst_layer[0] > 2.5 and worst_layer[-1] < 1, worst_layer


def test_exact_quantile_is_what_the_histogram_approximates():
    """On two devices with two micro-batches each, from every token's scores."""
    exact = make_config({"balancing": "quantile_exact"}, num_microbatches=2)
    state, metrics = run(exact, make_batch(8), devices=2)
    want, want_metrics = run(CONFIG, make_batch(8))
    assert rel_error(metrics["grad_norm"], want_metrics["grad_norm"]) < 1e-5
    assert all(np.max(np.abs(bias)) > 10 * BIN for bias in jax.tree.leaves(state.router))
    assert 0 < _apart(state.router, want.router) < 2 * BIN  # one for the quantile, one for the mean


def test_auxiliary_loss_is_in_the_gradient_and_the_bias_rests():
    """Two micro-batches on two devices: each has its own f and P, over the rows that both devices hold of it."""
    weight, parts = 0.5, 2
    config = make_config({"balancing": "aux_loss", "balancing_aux_weight": weight} | ONE_LAYER, num_microbatches=parts)
    batch, start = make_batch(8), fresh_state(config)
    E, k = config.model.num_experts, config.model.num_experts_per_token
    member = np.array([0, 0, 1, 1, 0, 0, 1, 1])  # each device halves its four rows

    def objective(params):
        nats, z, routing = reference_loss(config, params, start.router, batch)
        scores_RTE = routing["scores_TE"].reshape(8, T, E)
        sent_RTE = jnp.sum(jax.nn.one_hot(routing["ids_TS"].reshape(8, T, k), E), axis=2)
        aux = 0
        for part in range(parts):
            real_RT = (member[:, None] == part) & (batch.segment_ids_BT > 0)
            f_E = jnp.sum(sent_RTE * real_RT[..., None], axis=(0, 1)) / (k * np.sum(real_RT))
            share_RTE = scores_RTE / jnp.sum(scores_RTE, axis=-1, keepdims=True)
            p_E = jnp.sum(share_RTE * real_RT[..., None], axis=(0, 1)) / np.sum(real_RT)
            aux += np.sum(real_RT) / np.sum(batch.segment_ids_BT > 0) * E * jnp.sum(jax.lax.stop_gradient(f_E) * p_E)
        return nats + z + weight * aux, aux

    grads, aux = jax.jit(jax.grad(objective, has_aux=True))(start.params)
    state, metrics = run(config, batch, devices=2)
    assert rel_error(metrics["aux_loss"], aux) < 1e-5
    assert rel_error(metrics["grad_norm"], optax.global_norm(grads)) < 1e-5
    factor = (1 - config.optim.beta1) * config.optim.clip_norm / float(optax.global_norm(grads))
    assert worst(state.opt_state.momentum, jax.tree.map(lambda g: g * factor, grads)) < 1e-4
    assert equal_bits(state.router, jax.device_get(start.router))


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    step, batch = train_step(CONFIG), make_batch(8)
    good, _ = step(fresh_state(CONFIG), batch)
    good = jax.device_get(good)
    poisoned = jax.device_get(good)
    poisoned.params["head"] = np.array(poisoned.params["head"])
    poisoned.params["head"][3, 5] = np.nan
    state = put(poisoned)
    for streak in (1, 2):
        state, metrics = step(state, batch)
        assert metrics["nonfinite"]
        after = jax.device_get(state)
        assert equal_bits(after[1:4], poisoned[1:4])  # parameters, router bias, optimiser and its count
        assert (after.step, after.skipped, after.streak) == (1 + streak, streak, streak)
    healed = put(state._replace(params=good.params))
    state, metrics = step(healed, batch)
    assert not metrics["nonfinite"] and (state.step, state.skipped, state.streak) == (4, 2, 0)
    assert state.opt_state.count == 2
    # And a skipped step leaves no trace: the next one is the one that would have been.
    want, _ = step(put(good), batch)
    assert equal_bits(state[1:4], want[1:4])


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too():
    """exp(a_log) overflows inside a sigmoid that saturates: the decay is finite, its derivative is 0 * infinity."""
    config = make_config(base=K3_SHAPE)
    state = fresh_state(config)
    state.params["stage_0"]["run_0"]["layer_0"]["kda"]["a_log"] += 100
    want = jax.device_get(state)
    state, metrics = train_step(config)(put(state), make_batch(8))
    assert metrics["nonfinite"] and np.isfinite(metrics["loss"])
    assert equal_bits(state[1:4], want[1:4])


def test_the_state_passed_in_is_given_away():
    state = fresh_state(CONFIG)
    buffers = jax.tree.leaves(state)
    train_step(CONFIG)(state, make_batch(8))
    assert all(x.is_deleted() for x in buffers)


def test_evaluation_sums_nats_and_changes_nothing():
    batch, state = make_batch(8), fresh_state(CONFIG)
    before = jax.device_get(state)
    sums = make_eval_step(CONFIG, mesh_of(4))(jax.device_get(state.variables), pad_rows(batch, 4))
    nats, _, _ = reference(CONFIG)
    count = np.sum(batch.targets_BT >= 0)
    assert sums["count"] == count and 0 <= sums["correct"] <= count
    assert rel_error(sums["nats"], nats * count) < 1e-5
    assert equal_bits(before, state)


def test_bfloat16_products_leave_the_state_in_float32_and_the_bias_outside_the_optimiser():
    config = make_config({"dtype": "bfloat16"})
    shapes = state_shapes(config)
    state, metrics = jax.eval_shape(train_step(config), shapes, make_batch(8))
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, shapes)
    floats = [x.dtype for x in jax.tree.leaves((state, metrics)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and set(floats) == {jnp.dtype("float32")}
    assert len(jax.tree.leaves(state.router)) == 1
    for tree in (state.params, state.opt_state.momentum, state.opt_state.second_moment):
        assert not any("bias" in path for path in flatten_dict(tree))


def test_bfloat16_loss_is_that_of_the_model_s_own_logits():
    """The head is rounded as in `KimiK3`, for training and evaluation; its float32 master gets the gradient."""
    config = make_config({"dtype": "bfloat16"} | ONE_LAYER)
    start, batch = fresh_state(config), make_batch(8)
    nats, z, _ = jax.jit(lambda p, r: reference_loss(config, p, r, batch))(start.params, start.router)
    scale = Scale(np.sum(batch.targets_BT >= 0, dtype=np.int32), np.sum(batch.segment_ids_BT != 0, dtype=np.int32))
    compute = jax.jit(jax.value_and_grad(functools.partial(objective, config, scale), has_aux=True))
    (value, _), grads = compute(start.params, start.router, batch)
    assert rel_error(value, (nats + z) * scale.targets) < 2e-6
    sums = make_eval_step(config, mesh_of())(start.variables, batch)
    assert rel_error(sums["nats"], nats * scale.targets) < 2e-6
    assert grads["head"].dtype == jnp.float32 and np.all(np.any(np.asarray(grads["head"]) != 0, axis=0))
    flipped = start._replace(params=start.params | {"head": np.asarray(start.params["head"].astype(jnp.bfloat16))})
    rounded = make_eval_step(config, mesh_of())(jax.device_get(flipped.variables), batch)
    assert rel_error(rounded["nats"], sums["nats"]) == 0  # the master's low bits are no part of a product


@pytest.mark.parametrize("balancing", ["quantile", "quantile_exact", "sign", "aux_loss", "none"])
def test_every_balancing_rule_traces_over_scanned_and_recomputed_layers(balancing):
    config = make_config({"balancing": balancing, "remat": "layer"}, num_microbatches=2)
    shapes = state_shapes(config)
    state, metrics = jax.eval_shape(train_step(config, 2), shapes, make_batch(8))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    assert [x.shape for x in jax.tree.leaves(metrics["load"])] == [(1, 2, 8)]


def test_equal_seeds_make_equal_states():
    config = make_config({"num_layers": 1, "first_k_dense": 1})
    state = make_state(config, mesh_of(2))
    assert state.router == {} and len(state.step.sharding.device_set) == 2
    assert equal_bits(state, make_state(config))
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"DataConfig.batch_size = 12: .*multiple of 8 .*such as 8 or 16"):
        make_train_step(make_config(batch_size=12, num_microbatches=2), mesh_of(4))
