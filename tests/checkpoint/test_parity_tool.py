"""The parity tool on the fixtures: agreement, a layer that was broken, and experts that are nearly tied."""

import dataclasses

import numpy as np
import pytest

from k3jax.checkpoint.open import open_any
from k3jax.checkpoint.parity import Parity, read_reference
from k3jax.errors import UserError
from k3jax.models.plan import layer_slots
from launch.ckpt_parity import judge
from tests.conftest import FIXTURES


class Changed:
    """A checkpoint with one leaf's layer changed as it is read."""

    def __init__(self, name: str, layer: int = 0, leaf: str = "", change=None):
        self.under = open_any(FIXTURES / name)
        self.path, self.leaves = self.under.path, self.under.leaves
        self.config = dataclasses.replace(self.under.config, kda_implementation="recurrent")  # compiles sooner
        self.slot = layer_slots(self.config)[layer - 1] if layer else None
        self.leaf, self.change = leaf, change

    def read(self, path, index=()):
        values = self.under.read(path, index)
        s = self.slot
        if s and path[-1] == self.leaf and path[1:4] == (s.stage, s.run, s.layer) and index == (s.block, s.repeat):
            return self.change(values)
        return values


def compare(source, routing="natural", tolerance=1e-4):
    reference = read_reference(FIXTURES / source.path.name / "reference.npz", source.config)
    parity = Parity(source, reference, "float32", routing)
    layers = list(parity.layers())
    return layers, parity, judge(layers, parity.logits_error, parity.head_error, tolerance)


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "kimi_linear_tiny"])
def test_the_fixtures_agree(name):
    layers, parity, (verdict, departs) = compare(Changed(name))
    assert not departs and verdict.startswith("no layer departs"), verdict
    assert max(layer.alone for layer in layers) < 5e-6 and parity.head_error < 5e-6
    assert max(layer.running for layer in layers) < 5e-5 and parity.logits_error < 5e-5
    (routed,) = [layer for layer in layers if layer.agreement is not None]
    assert routed.agreement == 1.0 and routed.forced < 5e-6


def test_the_layer_that_was_broken_is_named_and_no_other():
    layers, _, (verdict, departs) = compare(Changed("kimi_k3_tiny", 5, "latent_up", lambda x: x * 1.01))
    assert departs and verdict.startswith("first layer that departs: layer 5 (KDA, moe), by its numbers"), verdict
    assert [layer.layer for layer in layers if layer.alone > 1e-4] == [5]
    assert all(layer.running > 1e-4 for layer in layers[4:8])  # behind it, all do: that is why "alone" is told apart


def test_other_experts_are_not_taken_for_wrong_numbers():
    """A bias that swaps experts: natural routing departs by choice, forced routing does not depart at all."""
    source = Changed("kimi_k3_tiny", 2, "bias", lambda x: (x + np.linspace(0, 0.05, len(x))).astype(x.dtype))
    layers, _, (verdict, departs) = compare(source)
    assert departs and "layer 2 (KDA, moe), by its choice of experts" in verdict, verdict
    routed = layers[1]
    assert 0.5 < routed.agreement < 1 and 0 < routed.gap < 0.06 and routed.alone > 1e-2 and routed.forced < 5e-6
    forced, parity, _ = compare(source, "forced")
    assert max(layer.running for layer in forced) < 5e-5 and parity.logits_error < 5e-5


def test_references_that_do_not_fit_are_one_line(tmp_path):
    config = open_any(FIXTURES / "kimi_k3_tiny").config
    tokens, logits = np.zeros((1, 4), np.int32), np.zeros((1, 4, 256))

    def refused(message, **arrays):
        np.savez(tmp_path / "r.npz", **arrays)
        with pytest.raises(UserError, match=message):
            read_reference(tmp_path / "r.npz", config)

    refused("needs input_ids, and logits or layer_outputs; it has logits", logits=logits)
    refused("input_ids must be .* below 256", input_ids=tokens + 256, logits=logits)
    refused(r"logits is \[1, 3, 256\], the model's is \[1, 4, 256\]", input_ids=tokens, logits=logits[:, :3])
    refused(r"layer_outputs is", input_ids=tokens, layer_outputs=logits)
    chosen = np.zeros((4, 2), np.int32)
    refused(
        r"of layer 0 \(from 0\) do not fit", input_ids=tokens, logits=logits, router_layer=0, router_topk_indices=chosen
    )
    refused("cannot be read", input_ids=np.array([{}], object))
    with pytest.raises(UserError, match="no such file"):
        read_reference(tmp_path / "nothing.npz", config)
    (tmp_path / "r.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UserError, match="cannot be read"):
        read_reference(tmp_path / "r.npz", config)
