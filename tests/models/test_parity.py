"""Parity with independent implementations of Kimi Linear and Kimi K3 (tests/fixtures/*_tiny)."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.checkpoint import hf
from k3jax.checkpoint.hf_layout import K3_PREFIX, hf_tensors, to_ours
from k3jax.models import KimiK3
from k3jax.models.plan import layer_kinds, layer_slots
from k3jax.nn.kda import KDA
from k3jax.nn.mla import MLA
from k3jax.nn.mlp import MLP
from k3jax.nn.moe import LatentMoE
from k3jax.ops.depth_attention import attention_residual
from k3jax.ops.losses import next_token_loss
from k3jax.ops.norms import rms_norm
from tests.conftest import FIXTURES, rel_error

MODELS = ["kimi_linear_tiny", "kimi_k3_tiny"]
# The last two compute the same with every layer traced on its own, or recomputed.
RUNS = [("float32", {}), ("float64", {}), ("float64", {"layer_loop": "unroll", "remat": "none"})]


def tolerance(dtype: str, stored, float32: float) -> float:
    """The bound in float32, or in float64 by the dtype the reference was stored in."""
    if dtype == "float32":
        return float32
    return 1e-9 if stored.dtype == np.float64 else 1e-7


class Case:
    """A model loaded in one dtype, its references, and a forward pass with everything recorded."""

    def __init__(self, name: str, dtype: str, changes: dict):
        config, self.variables = hf.load(FIXTURES / name, dtype=dtype)
        self.name, self.dtype = name, dtype
        self.config = dataclasses.replace(config, **changes)
        self.model = KimiK3(self.config)
        self.reference = np.load(FIXTURES / name / "reference.npz")
        self.probes = np.load(FIXTURES / name / "probes.npz")
        self.tokens = np.asarray(self.reference["input_ids"])
        self._apply = jax.jit(lambda v, t, i: self.model.apply(v, t, i, mutable=["intermediates"]))
        self.logits, self.recorded = self.apply(self.tokens, np.ones_like(self.tokens))

    def apply(self, tokens, segment_ids):
        """Logits and recorded intermediates; one program for all tests of a case."""
        logits, recorded = self._apply(self.variables, jnp.asarray(tokens), jnp.asarray(segment_ids))
        return logits, recorded["intermediates"]

    def of_layer(self, tree, layer: int):
        """A layer's part of stacked variables or recordings."""
        slot = layer_slots(self.config)[layer]
        return jax.tree.map(lambda x: x[slot.block, slot.repeat], tree[slot.stage][slot.run][slot.layer])

    def check(self, got, name: str, float32: float, part=..., source=None):
        want = (source or self.reference)[name]
        assert rel_error(got, want[part]) < tolerance(self.dtype, want, float32), name


@functools.cache
def _case(name: str, run: int) -> Case:
    dtype, changes = RUNS[run]
    return Case(name, dtype, changes)


@pytest.fixture(params=[(m, r) for m in MODELS for r in range(len(RUNS))], ids=lambda p: f"{p[0]}-{p[1]}")
def case(request):
    with jax.enable_x64(RUNS[request.param[1]][0] == "float64"):
        yield _case(*request.param)


def test_logits_and_layers(case):
    case.check(case.logits, "logits", 5e-5)
    assert case.logits.dtype == case.dtype
    reference, kinds = case.reference, layer_kinds(case.config)
    for layer in range(case.config.num_layers):
        case.check(case.of_layer(case.recorded, layer)["layer_out"], "layer_outputs", 5e-5, layer)
    for kind in ("kda", "mla"):
        layer = int(reference[f"first_{kind}_layer"])
        assert kinds[layer].mixer == kind
        case.check(case.of_layer(case.recorded, layer)["mixer_out"], f"attn_out_first_{kind}", 5e-5)
    layer = int(reference["router_layer"])
    case.check(case.of_layer(case.recorded, layer)["ffn_out"], "moe_out", 5e-5)


def test_routing(case):
    routing = case.of_layer(case.recorded, int(case.reference["router_layer"]))["moe"]["routing"]
    combine = np.zeros_like(case.reference["router_combine"])
    np.put_along_axis(combine, np.asarray(routing["ids_TS"]), np.asarray(routing["weights_TS"]), axis=1)
    case.check(combine, "router_combine", 5e-5)


def test_depth_mixes(case):
    if case.name != "kimi_k3_tiny":
        pytest.skip("Kimi Linear has no Attention Residuals")
    reference = case.reference
    for layer in range(case.config.num_layers):
        recorded = case.of_layer(case.recorded, layer)
        for ours, theirs in (("mixer_res_weights", "mix_attn"), ("ffn_res_weights", "mix_mlp")):
            count = int(reference[f"{theirs}_sources"][layer])
            if count == 0:  # the first layer reads the embedding alone
                np.testing.assert_array_equal(recorded[ours][..., 0], 1.0)
                continue
            want = reference[theirs]
            # At a block's first layer, scanned with the others, the running sum is a masked last source.
            got = np.asarray(recorded[ours])
            assert np.all(got[..., count:] == 0)
            bound = tolerance(case.dtype, want, 5e-5)
            assert rel_error(got[..., :count], want[layer, ..., :count]) < bound, (layer, ours)
    case.check(case.recorded["output_res_weights"][..., :-1], "mix_output", 5e-5)
    case.check(case.recorded["final_norm_out"], "final_norm_out", 5e-5)


def test_packed_documents(case):
    """Three documents in a row give the logits of each alone; other ids and padding between rows change nothing."""
    bounds = case.reference["packed_boundaries"]
    ids = np.zeros_like(case.tokens)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        ids[:, start:end] = 7 - 3 * i
    logits, _ = case.apply(case.tokens, ids)
    case.check(logits, "packed_logits", 5e-5)


def test_gradients(case):
    tokens = jnp.asarray(case.tokens)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)

    def loss_fn(params):
        hidden = case.model.apply({**case.variables, "params": params}, tokens, output="hidden")
        loss = next_token_loss(hidden, params["head"], targets)
        return loss.nats / loss.count

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(case.variables["params"])
    case.check(loss, "loss", 5e-5)
    tensors = {
        t.name: t for t in hf_tensors(case.config, K3_PREFIX if case.name == "kimi_k3_tiny" else "")
        if t.path[0] == "params"
    }  # fmt: skip

    def grad_of(tensor):
        leaf = functools.reduce(lambda node, key: node[key], tensor.path[1:], grads)
        if tensor.slot is not None:
            leaf = leaf[tensor.slot.block, tensor.slot.repeat]
        return np.asarray(leaf if tensor.expert is None else leaf[tensor.expert])

    norms = dict(zip(case.reference["grad_names"].tolist(), case.reference["grad_norms"], strict=True))
    bound = 2e-4 if case.dtype == "float32" else 1e-9
    largest = max(norms.values())
    for name, tensor in tensors.items():
        norm = np.linalg.norm(grad_of(tensor).astype(np.float64))
        if name not in norms:  # layer 0's mixer reads one source: its query and gain are dead
            assert "layers.0.self_attention_res" in name and norm == 0.0
        elif norms[name] == 0:  # an expert that no token picked
            assert norm == 0.0, name
        else:
            assert abs(norm - norms[name]) < bound * (norms[name] + 1e-3 * largest), name
    checked = 0
    for key in case.reference.files:
        if key.startswith("grad/"):
            tensor = tensors[key.removeprefix("grad/")]
            want = to_ours(tensor, case.reference[key])
            assert rel_error(grad_of(tensor), want) < (2e-4 if case.dtype == "float32" else 1e-7), key
            checked += 1
    assert checked >= 20


def test_greedy(case):
    """Continuing by the arg max of full recomputation picks the reference's tokens."""
    start, steps = int(case.reference["greedy_prompt_len"]), case.reference["greedy_tokens"].shape[1]
    tokens = np.where(np.arange(case.tokens.shape[1]) < start, case.tokens, 0)
    for i in range(steps):
        ids = np.broadcast_to(np.arange(tokens.shape[1]) < start + i, tokens.shape).astype(np.int32)
        logits = case.apply(tokens, ids)[0][:, start + i - 1]
        case.check(logits, "greedy_logits", 1e-4, (slice(None), i))
        tokens[:, start + i] = np.argmax(logits, -1)
    np.testing.assert_array_equal(tokens[:, start : start + steps], case.reference["greedy_tokens"])


def test_probes(case):
    """Sublayers on small and large inputs, where eps, scales and conventions show (the logits hide them)."""
    config, probes, dtype = case.config, case.probes, jnp.dtype(case.dtype)
    x = jnp.asarray(probes["x"], dtype)

    def variables(layer: int, key: str) -> dict:
        found = {"params": case.of_layer(case.variables["params"], layer)[key]}
        if key == "moe":
            found["router"] = case.of_layer(case.variables["router"], layer)[key]
        return found

    def check(got, name):
        case.check(got, name, 1e-5, source=probes)

    layer = {kind: int(probes[f"{kind}_layer"]) for kind in ("kda", "mla", "moe")}
    moe = LatentMoE(config, dtype)
    check(KDA(config, dtype).apply(variables(layer["kda"], "kda"), x), "kda_out")
    check(MLA(config, dtype).apply(variables(layer["mla"], "mla"), x), "mla_out")
    check(moe.apply(variables(layer["moe"], "moe"), x), "moe_out")
    if case.name == "kimi_linear_tiny":
        gain = case.of_layer(case.variables["params"], layer["kda"])["mixer_norm"]
        check(rms_norm(x, gain, config.rms_norm_eps), "input_layernorm_out")
        return
    # The reference computed 3000 * x in float64; the float32 product rounds once more, within the bound.
    large = jnp.asarray(probes["x"].astype(np.float64) * 3000, dtype)
    check(MLP(config, config.intermediate_size, dtype).apply(variables(0, "mlp"), large), "dense_mlp_out_large_input")
    check(moe.apply(variables(layer["moe"], "moe"), large), "moe_out_large_input")
    params = case.of_layer(case.variables["params"], int(probes["mix_layer"]))
    mix = attention_residual(
        jnp.asarray(probes["mix_blocks"], dtype), params["ffn_res_query"], params["ffn_res_gain"], partial_BTD=x
    )
    check(mix.mix_BTD, "mix_out")
