"""The bias update on given statistics: each rule by hand or against its op, and exact pooling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.models import plan
from k3jax.ops.quantile_balancing import exact_bias, histogram
from k3jax.train.balance import layer_values, update_bias
from tests.train.tiny import K3_SHAPE, PLAIN, equal_bits, make_config, mesh_of

BLOCKS, REPEATS, TOKENS, E, K, BINS = 2, 3, 64, 8, 2, 1000


@pytest.fixture(scope="module")
def scores():
    """[block, repeat, token, expert], some experts liked more."""
    logits = np.random.default_rng(0).standard_normal((BLOCKS, REPEATS, TOKENS, E)) + np.linspace(-1, 1, E)
    return jnp.asarray(1 / (1 + np.exp(-logits)), jnp.float32)


@pytest.fixture(scope="module")
def bias():
    return jnp.asarray(0.1 * np.random.default_rng(1).standard_normal((BLOCKS, REPEATS, E)), jnp.float32)


def tree(leaf):
    return {"stage_0": {"run_1": {"layer_0": {"moe": leaf}}}}


def model(balancing, **changes):
    return make_config({"balancing": balancing} | changes).model


def counts_of(scores, bias):
    count = functools.partial(histogram, k=K, bins=BINS)
    return jax.vmap(jax.vmap(count))(scores, bias)


def test_pooled_histograms_give_the_same_bits_however_the_tokens_are_split(scores, bias):
    update = jax.jit(lambda counts: update_bias(model("quantile"), tree({"bias": bias}), tree({"histogram": counts})))
    whole = counts_of(scores, bias)
    want = update(whole)
    for parts in (2, 7):
        split = sum(counts_of(part, bias) for part in jnp.array_split(scores, parts, axis=2))
        assert equal_bits(split, whole) and equal_bits(update(split), want)

    spec = PartitionSpec(None, None, "data")
    on_devices = jax.shard_map(
        lambda s: jax.lax.psum(counts_of(s, bias), "data"),
        mesh=mesh_of(8), in_specs=spec, out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    pooled = jax.jit(on_devices)(scores)
    assert equal_bits(pooled, whole) and equal_bits(update(pooled), want)


def test_each_layer_gets_the_quantile_of_its_own_scores(scores, bias):
    mask = np.arange(TOKENS) % 3 > 0
    masks = jnp.broadcast_to(mask, (BLOCKS, REPEATS, TOKENS))
    router, stats = tree({"bias": bias}), tree({"scores": scores, "mask": masks})
    new = update_bias(model("quantile_exact"), router, stats)["stage_0"]["run_1"]["layer_0"]["moe"]["bias"]
    for i in range(BLOCKS):
        for j in range(REPEATS):
            want = exact_bias(scores[i, j][mask], bias[i, j], K)
            np.testing.assert_allclose(new[i, j], want, atol=1e-7)


def test_sign_rule_by_hand(bias):
    load = jnp.broadcast_to(jnp.asarray([9, 1, 4, 4, 4, 4, 6, 0], jnp.int32), (BLOCKS, REPEATS, E))  # mean 4
    config = model("sign", balancing_sign_rate=0.25)
    new = update_bias(config, tree({"bias": bias}), tree({"load": load}))["stage_0"]["run_1"]["layer_0"]["moe"]["bias"]
    np.testing.assert_array_equal(new, bias + 0.25 * np.array([-1, 1, 0, 0, 0, 0, -1, 1], np.float32))


@pytest.mark.parametrize("balancing", ["aux_loss", "none"])
def test_other_rules_leave_the_bias(balancing, bias):
    router = tree({"bias": bias})
    assert update_bias(model(balancing), router, tree({"load": jnp.ones((BLOCKS, REPEATS, E), jnp.int32)})) is router


def test_a_model_without_experts_has_nothing_to_update():
    assert update_bias(model("quantile"), {}, {}) == {}


def test_layer_values_follow_the_order_of_layers():
    """Each layer's leaf holds the layer's own number, put there by the plan of the scans."""
    config = make_config({"num_layers": 9, "attn_res_block_size": 4, "kda_per_mla": 3}, base=K3_SHAPE).model
    leaves = {}
    for number, (slot, kind) in enumerate(zip(plan.layer_slots(config), plan.layer_kinds(config), strict=True), 1):
        if kind.ffn == "moe":
            run = leaves.setdefault(slot.stage, {}).setdefault(slot.run, {})
            load = run.setdefault(slot.layer, {"moe": {"load": np.zeros((4, 4, 2), int)}})["moe"]["load"]
            load[slot.block, slot.repeat] = number, -number
    values = layer_values(config, leaves, "moe", "load")
    assert {n: x.tolist() for n, x in values.items()} == {n: [n, -n] for n in range(2, 10)}
    assert layer_values(make_config(base=PLAIN).model, {}, "moe", "load") == {}
