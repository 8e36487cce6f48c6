"""The assembled model: folding into scans, invariances of packing, padding and causality, and size."""

import collections
import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.models import KimiK3, init_variables
from k3jax.models.kimi_k3 import variable_shapes
from k3jax.models.plan import layer_kinds, layer_slots, plan_layers
from tests.conftest import rel_error

# Ten layers: a first block with the dense layer, two equal blocks that are scanned, a last one of one layer.
TINY = ModelConfig(
    vocab_size=50, num_layers=10, hidden_size=16, kda_per_mla=2, kda_num_heads=2, kda_key_dim=4, kda_value_dim=6,
    mla_num_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6,
    attn_res_block_size=3, intermediate_size=24, num_experts=4, num_experts_per_token=2, num_shared_experts=1,
    moe_intermediate_size=8, moe_latent_size=8, remat="none",
)  # fmt: skip

FORMS = {
    "k3": {},
    "full": {"attn_res": "full"},
    "plain": {"attn_res": "none"},
    "kimi_linear": {
        "attn_res": "none", "kda_decay": "softplus", "kda_output_gate": "low_rank", "mla_output_gate": "none",
        "q_lora_rank": None, "activation": "swiglu", "moe_latent_size": None, "moe_routed_norm": False,
    },
    "grouped_values": {"kda_num_value_heads": 4, "kda_allow_neg_eigval": True, "num_shared_experts": 0},
    "all_kda": {"kda_per_mla": None, "num_layers": 6},
    "all_mla": {"kda_per_mla": 0, "num_layers": 6},
    "dense": {"first_k_dense": 6, "num_layers": 6},
}  # fmt: skip


def build(**changes):
    """A config and variables in which every query, norm and bias matters."""
    config = dataclasses.replace(TINY, **changes)
    variables = init_variables(config, seed=1)
    leaves, treedef = jax.tree.flatten(variables)
    rng = np.random.default_rng(0)
    leaves = [x + 0.1 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return config, jax.tree.unflatten(treedef, leaves)


def tokens_of(T, B=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(1, TINY.vocab_size, size=(B, T)), jnp.int32)


def logits_and_gradient(config, variables, tokens, ids=None):
    def loss(v):
        logits = KimiK3(config).apply(v, tokens, ids)
        return jnp.sum(jnp.sin(logits)), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)
    return logits, grads


@pytest.mark.parametrize("form", ["k3", "full", "plain"])
def test_scan_unroll_and_remat_agree(form):
    config, variables = build(**FORMS[form])
    tokens = tokens_of(19)
    want, want_grads = logits_and_gradient(config, variables, tokens)
    changes = [{"layer_loop": "unroll"}, {"remat": "layer"}, {"remat": "dots"}]
    for change in changes if form == "k3" else changes[:1]:
        got, grads = logits_and_gradient(dataclasses.replace(config, **change), variables, tokens)
        assert rel_error(got, want) < 1e-5, change
        scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want_grads))
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            assert float(jnp.abs(a - b).max()) < 1e-4 * scale, change


def checkpoints_of(jaxpr, scanned=False):
    """Every jax.checkpoint of a program: (whether a scan is around it, whether merging is prevented)."""
    found = []
    for equation in jaxpr.eqns:
        if "prevent_cse" in equation.params:
            found.append((scanned, equation.params["prevent_cse"]))
            continue  # what lies inside is a layer
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += checkpoints_of(inner, scanned or equation.primitive.name == "scan")
    return found


@pytest.mark.parametrize("form", ["k3", "full", "plain"])
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_a_recomputed_layer_outside_of_a_scan_is_kept_apart_from_its_first_run(form, layer_loop):
    config = dataclasses.replace(TINY, remat="layer", layer_loop=layer_loop, **FORMS[form])
    shapes = variable_shapes(config)
    layers = checkpoints_of(jax.make_jaxpr(KimiK3(config).apply)(shapes, tokens_of(4)).jaxpr)
    assert all(prevented == (not scanned) for scanned, prevented in layers), layers
    if layer_loop == "scan":
        assert {scanned for scanned, _ in layers} == {True, False}
    else:
        assert layers == [(False, True)] * config.num_layers


def test_full_form_reads_every_sublayer():
    """The full form against a loop that keeps a list of all sublayer outputs."""
    config, variables = build(attn_res="full", num_layers=5, kda_per_mla=1)
    tokens = tokens_of(9, B=1)
    _, recorded = KimiK3(config).apply(variables, tokens, mutable=["intermediates"])
    sources = [np.asarray(variables["params"]["embed"])[np.asarray(tokens)]]
    for slot in layer_slots(config):
        out = recorded["intermediates"][slot.stage][slot.run][slot.layer]
        params = variables["params"][slot.stage][slot.run][slot.layer]
        at = (slot.block, slot.repeat)
        for ours, produced in (("mixer_res", "mixer_out"), ("ffn_res", "ffn_out")):
            values = np.stack(sources, 2)
            keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * params[f"{ours}_gain"][at]
            scores = keys @ np.asarray(params[f"{ours}_query"][at])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            got = np.asarray(out[f"{ours}_weights"][at])
            got = got[..., got.any((0, 1))]  # places not written yet have no weight
            np.testing.assert_allclose(got, weights, atol=2e-6)
            sources.append(np.asarray(out[produced][at]))


@pytest.mark.parametrize("form", FORMS)
def test_packed_rows_equal_documents_alone(form):
    config, variables = build(**FORMS[form])
    lengths = [1, 7, 2, 11]
    tokens = tokens_of(sum(lengths) + 3, B=1)
    ids = np.concatenate([np.repeat([5, 2, 5, 1], lengths), [0] * 3]).astype(np.int32)[None]
    apply = jax.jit(lambda t, i: KimiK3(config).apply(variables, t, i))
    packed = apply(tokens, jnp.asarray(ids))
    start = 0
    for length in lengths:
        alone = jax.jit(lambda t: KimiK3(config).apply(variables, t))(tokens[:, start : start + length])
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=2e-5)
        start += length


@pytest.mark.parametrize("form", ["k3", "kimi_linear"])
def test_padding_is_inert(form):
    """What stands in padding, and how much of it there is, changes neither logits nor gradients."""
    config, variables = build(**FORMS[form])
    tokens = tokens_of(16)
    ids = jnp.asarray([[0] * 3 + [1] * 9 + [0] * 4, [1] * 16], jnp.int32)

    def value(v, t, i):
        logits = KimiK3(config).apply(v, t, i)
        return jnp.sum(jnp.where((i != 0)[..., None], jnp.sin(logits), 0))

    grad = jax.jit(jax.value_and_grad(value))
    want, want_grads = grad(variables, tokens, ids)
    other = jnp.where(ids == 0, (tokens + 17) % TINY.vocab_size, tokens)
    got, grads = grad(variables, other, ids)
    assert got == want
    jax.tree.map(np.testing.assert_array_equal, grads, want_grads)
    pad = lambda x: jnp.pad(x, ((0, 1), (0, 6)))  # noqa: E731
    got, grads = grad(variables, pad(tokens), pad(ids))
    terms = 25 * TINY.vocab_size  # sines, each rounded to about 1e-7; they cancel, so their sum is no scale
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-7 * terms)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want_grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4 * scale), grads, want_grads)


@pytest.mark.parametrize("form", ["k3", "full", "kimi_linear"])
def test_later_tokens_change_no_earlier_bit(form):
    config, variables = build(**FORMS[form])
    tokens = tokens_of(70)
    apply = jax.jit(lambda t: KimiK3(config).apply(variables, t))
    want = apply(tokens)
    for start in (1, 17, 64, 69):
        changed = tokens.at[:, start:].set((tokens[:, start:] + 11) % TINY.vocab_size)
        np.testing.assert_array_equal(apply(changed)[:, :start], want[:, :start])


def test_new_queries_weigh_all_sources_alike():
    variables = init_variables(TINY)
    _, recorded = KimiK3(TINY).apply(variables, tokens_of(5), mutable=["intermediates"])
    weights = np.asarray(recorded["intermediates"]["output_res_weights"])[..., :-1]  # the embedding and four blocks
    np.testing.assert_allclose(weights, 1 / 5, rtol=1e-6)


def test_initial_values():
    """spec §1.5: decay steps in [1e-3, 0.1], rates 1 for the bounded gate and in [1, 16] for the other."""
    for decay in ("bounded", "softplus"):
        params = init_variables(dataclasses.replace(TINY, kda_decay=decay))["params"]
        leaves = dict(jax.tree_util.tree_leaves_with_path(params))
        named = lambda name: [np.asarray(x) for p, x in leaves.items() if p[-1].key == name]  # noqa: E731
        for bias in named("dt_bias"):
            dt = np.log1p(np.exp(bias))
            assert dt.min() >= 0.99e-3 and dt.max() <= 0.101 and np.ptp(dt) > 0
        for a_log in named("a_log"):
            assert np.all(a_log == 0) if decay == "bounded" else np.all((a_log >= 0) & (a_log <= np.log(16) + 1e-6))
        assert all(np.all(x == 1) for x in named("mixer_norm"))
        assert 0.015 < np.std(np.concatenate([x.ravel() for x in named("q_proj")])) < 0.025


def test_layers_start_different_from_each_other():
    for leaf in jax.tree.leaves(init_variables(TINY)["params"]["stage_1"]):
        if np.std(leaf) > 0:  # not a norm or a query
            assert not np.array_equal(leaf[0], leaf[1])


def test_logits_are_float32_under_bfloat16():
    config, variables = build(**FORMS["dense"])  # no experts: a near tie routed another way is no rounding error
    logits = KimiK3(dataclasses.replace(config, dtype="bfloat16")).apply(variables, tokens_of(8))
    assert logits.dtype == jnp.float32
    exact = KimiK3(config).apply(variables, tokens_of(8))
    assert np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)) < 0.05


def test_shapes_are_checked():
    config, variables = build()
    with pytest.raises(ValueError, match=r"must both be \[B, T\]"):
        KimiK3(config).apply(variables, tokens_of(8), jnp.ones((2, 7), jnp.int32))


def test_plan_of_k3():
    """spec §1.2: eight Attention-Residual blocks, of which six are alike; every layer has a place of its own."""
    config = ModelConfig.kimi_k3()
    stages = plan_layers(config)
    assert [(s.repeats, s.first, s.block_layers) for s in stages] == [(1, 0, 12), (6, 12, 12), (1, 84, 9)]
    kinds, slots = layer_kinds(config), layer_slots(config)
    assert len(kinds) == len(slots) == len(set(slots)) == 93
    for kind, slot in zip(kinds, slots, strict=True):
        stage = stages[int(slot.stage[-1])]
        run = stage.runs[int(slot.run.removeprefix("run_"))]
        assert run.kinds[int(slot.layer.removeprefix("layer_"))] == kind
        assert slot.block < stage.repeats and slot.repeat < run.repeats


@functools.cache
def operations_of_k3(num_layers: int) -> collections.Counter:
    """How often each operation stands in the program of K3's gradient, at full width; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    model = KimiK3(ModelConfig.kimi_k3(dtype="bfloat16", num_layers=num_layers))
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(v, t):
        return jnp.sum(model.apply(v, t, output="hidden").astype(jnp.float32))

    begin = time.process_time()
    program = jax.jit(jax.grad(loss, allow_int=True)).lower(variables, tokens).as_text()
    print(f"{num_layers} layers traced and lowered in {time.process_time() - begin:.1f} s of CPU time")
    return collections.Counter(re.findall(r"stablehlo\.\w+", program))


def test_k3_is_traced_once_for_all_layers_that_repeat():
    # 15 of the 93 layers are traced; all of them would be several times as many products.
    assert 1000 < operations_of_k3(93)["stablehlo.dot_general"] < 3000


@pytest.mark.slow
def test_the_program_does_not_grow_with_depth():
    """Two equal blocks in the middle instead of six: 45 layers are the same program with shorter scans."""
    short, full = (plan_layers(ModelConfig.kimi_k3(num_layers=n)) for n in (45, 93))
    assert [s.repeats for s in short] == [1, 2, 1] and [s.repeats for s in full] == [1, 6, 1]
    assert [s.runs for s in short] == [s.runs for s in full]
    assert operations_of_k3(45) == operations_of_k3(93)
