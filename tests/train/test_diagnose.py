"""A poisoned parameter is found, wherever it lies, and named by its layer."""

import jax
import numpy as np
import pytest

from k3jax.models.plan import layer_kinds, layer_slots
from k3jax.train.diagnose import describe, explain_nonfinite
from tests.train.tiny import K3_SHAPE, fresh_state, make_batch, make_config

CONFIG = make_config(base=K3_SHAPE, num_microbatches=2)  # layer 1: KDA, dense; layer 2: MLA, experts
KDA = ("stage_0", "run_0", "layer_0", "kda")
MOE = ("stage_1", "run_0", "layer_0", "moe")


def explain(*path, value=np.nan, at=0):
    """What is said after one element of a parameter, or all of them (at=None), became `value`."""
    state = jax.device_get(fresh_state(CONFIG, 2))
    node = state.params if path[-1] != "bias" else state.router
    for key in path[:-1]:
        node = node[key]
    leaf = np.array(node[path[-1]])
    leaf.flat[slice(None) if at is None else at] = value
    node[path[-1]] = leaf
    state = jax.device_put(state, jax.tree.leaves(fresh_state(CONFIG, 2))[0].sharding)
    return explain_nonfinite(CONFIG, state, make_batch(8))


@pytest.mark.parametrize(
    "path, value, want",
    [
        (("embed",), np.nan, "embedding: output is not finite; parameter embed holds NaN or infinity"),
        ((*KDA, "o_proj"), np.nan, "layer 1 (KDA): output of the mixer is not finite; parameter {} of layer 1 holds"),
        ((*MOE, "expert_down"), np.inf, "layer 2 (MLA): output of the feed-forward is not finite; parameter {} of"),
        (("final_norm",), np.nan, "final norm: output is not finite; parameter final_norm holds NaN or infinity"),
        (("head",), np.inf, "head: loss is not finite; parameter head holds NaN or infinity"),
    ],
)
def test_the_first_bad_output_and_the_bad_parameter_are_named(path, value, want):
    at = None if path[-1] in ("embed", "expert_down") else 0
    line = explain(*path, value=value, at=at)
    assert line.startswith(want.format("/".join(path))) and "\n" not in line


def test_a_bad_gradient_behind_finite_outputs_is_named():
    """exp(a_log) overflows inside a sigmoid that saturates: the decay is finite, its derivative is 0 * infinity."""
    line = explain(*KDA, "a_log", value=100.0, at=None)
    assert line.startswith("all outputs are finite; gradient of layer 1 (KDA) is not finite: kda/"), line


def clean(config):
    """Counts of a run in which nothing is bad."""
    forward = {("embedding",): 0, ("final_norm",): 0, ("loss",): 0}
    backward, held = {("embed",): 0, ("head",): 0}, {("params", "embed"): 0}
    for slot, kind in zip(layer_slots(config.model), layer_kinds(config.model), strict=True):
        place = (slot.stage, slot.run, slot.layer)
        for leaf in ("mixer_finite", "ffn_finite"):
            forward[*place, leaf] = np.zeros((4, 4), int)
        for leaf in ((kind.mixer, "o_proj"), ("ffn_norm",), ("moe" if kind.ffn == "moe" else "mlp", "down")):
            backward[*place, *leaf] = np.zeros((4, 4), int)
            held["params", *place, *leaf] = np.zeros((4, 4), int)
    return forward, backward, held


def test_layers_are_told_apart_inside_scans():
    config = make_config({"num_layers": 9, "attn_res_block_size": 4, "kda_per_mla": 3}, base=K3_SHAPE)
    slots = layer_slots(config.model)
    assert max(slot.repeat for slot in slots) > 0
    for number, (slot, kind) in enumerate(zip(slots, layer_kinds(config.model), strict=True), start=1):
        name, place = f"layer {number} ({kind.mixer.upper()})", (slot.stage, slot.run, slot.layer)
        forward, backward, held = clean(config)
        forward[*place, "ffn_finite"][slot.block, slot.repeat] = 3
        assert describe(config, forward, backward, held) == f"{name}: output of the feed-forward is not finite"
        forward, backward, held = clean(config)
        held["params", *place, "ffn_norm"][slot.block, slot.repeat] = 1
        assert f"of layer {number} holds NaN" in describe(config, forward, backward, held)
        forward, backward, held = clean(config)
        for below in slots[:number]:  # a bad gradient spreads to every layer below
            backward[below.stage, below.run, below.layer, "ffn_norm"][below.block, below.repeat] = 1
        line = f"all outputs are finite; gradient of {name} is not finite: ffn_norm"
        assert describe(config, forward, backward, held) == line
    assert "their sum or norm overflows" in describe(config, *clean(config))
