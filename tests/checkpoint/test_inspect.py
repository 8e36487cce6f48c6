"""What is said about parameters, against numpy on whole arrays and against faults that were planted."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.checkpoint import inspect_model, matrices
from k3jax.checkpoint.inspect_diff import change, compare_structure
from k3jax.checkpoint.inspect_model import depth_queries, experts, gates
from k3jax.checkpoint.inspect_stats import spectral_norms, tensor_stats
from k3jax.checkpoint.matrices import Matrices
from k3jax.checkpoint.source import tensors
from k3jax.config import ModelConfig
from k3jax.errors import UserError
from k3jax.models.plan import layer_slots
from k3jax.ops.decay import bounded_decay, softplus_decay
from tests.checkpoint.small_run import MemorySource, config, flat, state

LAYER = ("params", "stage_0", "run_0", "layer_0")


def stats_of(array, name="gate", **options):
    source = MemorySource({(*LAYER, name): array[None, None]})
    return tensor_stats(source, tensors(source)[0], **options)


@pytest.mark.parametrize("block_bytes", [2**25, 4096])
def test_stats_are_numpys_on_the_whole_whatever_is_read_at_a_time(monkeypatch, block_bytes):
    monkeypatch.setattr(matrices, "BLOCK_BYTES", block_bytes)
    source = MemorySource(flat(state(3)._asdict()), config().model)
    for tensor in tensors(source):
        got = tensor_stats(source, tensor)
        whole = source.arrays[tensor.path][tensor.index].astype(np.float64)
        assert got.size == whole.size and got.dtype == source.arrays[tensor.path].dtype.name
        np.testing.assert_allclose([got.norm, got.absmax], [np.linalg.norm(whole), np.max(np.abs(whole))], rtol=1e-6)
        assert got.nonfinite == got.risky == 0
        if tensor.name.endswith("expert_up"):  # [E, L, F]: the largest of each expert's
            true = max(np.linalg.norm(expert, 2) for expert in whole)
        elif tensor.name.endswith("kda/o_proj"):  # rows [J, V]
            true = np.linalg.norm(whole.reshape(-1, whole.shape[-1]), 2)
        elif tensor.name.endswith("kda/q_proj"):  # columns [H, K]
            true = np.linalg.norm(whole.reshape(whole.shape[0], -1), 2)
        elif tensor.name.endswith(("_norm", "dt_bias", "q_conv", "bias")):
            assert np.isnan(got.spectral)
            continue
        else:
            continue
        assert 0.95 * true < got.spectral <= true * (1 + 1e-6), tensor.name
    assert max(source.reads[1:]) <= max(block_bytes, 257 * 4)


@pytest.mark.parametrize("shape", [(300, 300), (2048, 256), (64, 1500), (3, 7), (1000, 2)])
def test_spectral_norms_are_within_the_stated_tolerance(shape):
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((2, *shape)).astype(np.float32) * 1e-3
    true = np.linalg.norm(plain, 2, axis=(1, 2))
    ratio = spectral_norms(Matrices(plain.shape, lambda: iter([plain])), np.max(np.abs(plain))) / true
    assert np.all(ratio > 0.95) and np.all(ratio < 1 + 1e-5)
    spike = np.outer(*(rng.standard_normal(n) for n in shape))
    spiked = (plain + 1.5 * true.max() * spike / np.linalg.norm(spike)).astype(np.float32)
    true = np.linalg.norm(spiked, 2, axis=(1, 2))
    blocks = Matrices(spiked.shape, lambda: iter(np.array_split(spiked, 3, axis=1)))
    np.testing.assert_allclose(spectral_norms(blocks, np.max(np.abs(spiked))), true, rtol=1e-4)


def test_spectral_norms_of_extreme_sizes():
    for scale in (1e-30, 1e30):
        wide = (np.diag([3.0, 2.0, 1.0]) * scale).astype(np.float32)
        np.testing.assert_allclose(stats_of(wide).spectral, 3 * scale, rtol=1e-4)
    assert stats_of(np.zeros((4, 5), np.float32)).spectral == 0


def test_dead_rows_and_columns_are_counted():
    values = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    values[[3, 7]] = 0
    values[:, 5] *= 1e-6
    found = stats_of(values)
    assert (found.dead_inputs, found.dead_outputs) == (2, 1)
    assert stats_of(values[0], "mixer_norm").dead_outputs == 0  # a vector has no rows to be dead


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_scan_counts_what_is_not_finite_and_what_bfloat16_does_not_survive(dtype):
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(dtype)
    values[0, :3] = [np.nan, np.inf, -np.inf]
    values[1, :2] = [1e20, -1e21]
    found = stats_of(values)
    assert (found.nonfinite, found.infinite_in_bf16, found.risky) == (3, 0, 2)
    assert np.isnan(found.spectral) and found.absmax == np.max(np.abs(values[1, 1])).astype(np.float64)
    if dtype == np.float32:
        largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
        border = largest + 2.0**119  # half a unit in the last place: the first to be rounded to infinity
        values[2, :3] = np.array([largest, np.nextafter(dtype(border), dtype(0)), border])
        assert stats_of(values).infinite_in_bf16 == np.isinf(values[2, :3].astype(ml_dtypes.bfloat16)).sum() == 1


def test_diff_finds_structure_and_measures_change():
    rng = np.random.default_rng(0)
    same, moved = rng.standard_normal((1, 2, 6, 4)), rng.standard_normal((1, 2, 6, 4))
    a = {
        (*LAYER, "gate"): same,
        (*LAYER, "up"): moved,
        ("params", "embed"): np.ones((3, 2)),
        ("params", "a"): np.ones(1),
    }
    b = a | {(*LAYER, "up"): moved.copy(), ("params", "embed"): np.ones((4, 2)), ("params", "b"): np.ones(1)}
    b[*LAYER, "gate"] = same.astype(np.float32).astype(np.float64)
    del b["params", "a"]
    b[*LAYER, "up"][0, 1] *= 1.25
    b[*LAYER, "up"] = b[*LAYER, "up"].astype(np.float32)
    a, b = MemorySource(a), MemorySource(b)
    found = compare_structure(a, b, tensors(a), tensors(b))
    assert (found.only_a, found.only_b) == (["params/a"], ["params/b"])
    assert found.reshaped == [("params/embed", (3, 2), (4, 2))]
    assert [n for n, *_ in found.retyped] == [f"params/stage_0/run_0/layer_0[0,{i}]/up" for i in range(2)]
    changes = {c.name: c for c in (change(a, b, x, y) for x, y in found.common)}
    up = changes["params/stage_0/run_0/layer_0[0,1]/up"]
    np.testing.assert_allclose([up.relative, up.largest], [0.25, 0.25 * np.abs(moved[0, 1]).max()], rtol=1e-6)
    assert up.changed == 24 and changes["params/stage_0/run_0/layer_0[0,0]/gate"].relative < 1e-7


def test_diff_of_zeros_and_of_what_is_not_finite():
    def relative(x, y):
        a, b = (MemorySource({("params", "w"): np.array(v, np.float32)}) for v in (x, y))
        return change(a, b, tensors(a)[0], tensors(b)[0]).relative

    assert relative([0, 0], [0, 0]) == 0 and relative([0, 0], [0, 1]) == np.inf
    assert np.isnan(relative([1, 2], [1, np.nan])) and np.isnan(relative([1, np.inf], [1, np.inf]))


def memory_run(seed=5) -> MemorySource:
    return MemorySource({path: x.copy() for path, x in flat(state(seed)._asdict()).items()}, config().model)


@pytest.mark.parametrize("block_bytes", [2**25, 2048])
def test_dead_and_twin_experts_are_found(monkeypatch, block_bytes):
    monkeypatch.setattr(inspect_model, "BLOCK_BYTES", block_bytes)
    source = memory_run()
    slot = layer_slots(source.config)[2]
    place = ("params", slot.stage, slot.run, slot.layer, "moe")
    noise = np.random.default_rng(0)
    for name in ("expert_gate", "expert_up", "expert_down"):
        layer = source.arrays[*place, name][slot.block, slot.repeat]
        layer[3] = layer[1] + 0.1 * noise.standard_normal(layer[1].shape)
        layer[0] = 0
    found = {layer.layer: layer for layer in experts(source)}
    assert list(found) == [2, 3, 4]
    assert found[3].dead == (0,) and [twin[:2] for twin in found[3].twins] == [(1, 3)]
    assert 0.99 < found[3].twins[0][2] < 1
    assert not (found[2].dead or found[2].twins or found[4].dead or found[4].twins)
    bias = source.arrays["router", slot.stage, slot.run, slot.layer, "moe", "bias"][slot.block, slot.repeat]
    np.testing.assert_array_equal(found[3].bias_E, bias)


@pytest.mark.parametrize("family", ["bounded", "softplus"])
def test_half_lives_are_those_of_the_models_own_gate(family):
    source = memory_run()
    source.config = ModelConfig(**{**vars(source.config), "kda_decay": family})
    slots = layer_slots(source.config)
    found = gates(source)
    assert [g.layer for g in found] == [1, 3]
    for g in found:
        slot = slots[g.layer - 1]
        place = ("params", slot.stage, slot.run, slot.layer, "kda")
        z, a = (jnp.asarray(source.arrays[*place, n][slot.block, slot.repeat]) for n in ("dt_bias", "a_log"))
        decay = bounded_decay(z, a) if family == "bounded" else softplus_decay(z, a)
        np.testing.assert_allclose(g.half_life_JK, np.log(2) / -np.asarray(decay), rtol=1e-5)
    source.arrays[*place, "dt_bias"][...] = -1e4  # nothing decays: forever, not an error
    assert np.all(gates(source)[-1].half_life_JK > 1e300)


def test_depth_queries_come_in_the_order_in_which_they_read():
    source = memory_run()
    found = depth_queries(source)
    assert [c.name for c in found[:3]] == ["layer 1 mixer", "layer 1 feed-forward", "layer 2 mixer"]
    assert len(found) == 9 and found[-1].name == "output"
    product = source.arrays["params", "output_res_query"].astype(float) * source.arrays["params", "output_res_gain"]
    np.testing.assert_array_equal(found[-1].query_D, product)


def test_what_a_model_lacks_is_one_line():
    empty = MemorySource({("params", "embed"): np.ones((2, 2))}, config().model)
    for function, message in ((experts, "no experts"), (gates, "no KDA layers"), (depth_queries, "no Attention Res")):
        with pytest.raises(UserError, match=message):
            function(empty)
    empty.config = None
    with pytest.raises(UserError, match=r"no config.json tells the family"):
        gates(empty)
