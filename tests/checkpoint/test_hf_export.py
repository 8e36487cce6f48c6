"""Released checkpoints on their way back: bytes that must not change, and those that must, and how."""

import dataclasses
import errno
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.checkpoint import hf, mxfp4
from k3jax.checkpoint.hf_aside import ASIDE, keep_aside, open_aside
from k3jax.checkpoint.hf_config import hf_config, layout_of, model_config
from k3jax.checkpoint.hf_export import export
from k3jax.checkpoint.hf_layout import K3_PREFIX, hf_tensors
from k3jax.checkpoint.hf_source import open_released
from k3jax.config import ModelConfig
from k3jax.errors import UserError
from tests.checkpoint.released import (
    VISION,
    all_tensors,
    assert_same_files,
    assert_same_tensors,
    k3_tensors,
    write_k3,
)
from tests.conftest import FIXTURES

EXPERT = ".block_sparse_moe.experts."


@pytest.fixture(scope="module")
def k3(tmp_path_factory) -> pathlib.Path:
    return write_k3(tmp_path_factory.mktemp("hf") / "k3")


def is_packed(name: str) -> bool:
    return name.endswith(("_packed", "_scale"))


def test_unchanged_it_comes_back_byte_for_byte(tmp_path, k3):
    done = []
    export(tmp_path / "out", open_released(k3), advance=done.append)
    assert_same_files(tmp_path / "out", k3)
    assert sum(done) == sum(x.nbytes for x in k3_tensors().values())


def test_through_variables_every_tensor_comes_back(tmp_path, k3):
    """Padding of A_log, dead tensors of layer 0, vision, codes and scales included."""
    config, variables = hf.load(k3)
    hf.save(tmp_path / "out", config, variables, like=k3)
    got = all_tensors(tmp_path / "out")
    assert_same_tensors(got, k3_tensors())
    assert got["language_model.model.layers.0.self_attn.A_log"].shape == (128,)
    assert "language_model.model.layers.0.self_attention_res_proj.weight" in got
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (k3 / "tokenizer.json").read_text()
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    want = json.loads((k3 / "config.json").read_text())
    assert {key: values[key] for key in want if key != "text_config"} == {
        k: v for k, v in want.items() if k != "text_config"
    }
    assert {key: values["text_config"][key] for key in want["text_config"]} == want["text_config"]


@pytest.mark.parametrize("model", ["kimi_linear_tiny", "kimi_k3_tiny"])
def test_without_an_original_the_layout_follows_from_the_model(tmp_path, model):
    config, variables = hf.load(FIXTURES / model)
    hf.save(tmp_path / "out", config, variables, shard_bytes=200_000)
    assert_same_tensors(all_tensors(tmp_path / "out"), load_file(FIXTURES / model / "model.safetensors"))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        assert sum(x.nbytes for x in load_file(file).values()) <= 200_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    again, _ = hf.load(tmp_path / "out")
    assert again == config


def test_unpacked_and_packed_again(tmp_path, k3):
    export(tmp_path / "values", open_released(k3), experts="unpacked")
    values = all_tensors(tmp_path / "values")
    stored = k3_tensors()
    assert_same_tensors(
        {n: x for n, x in values.items() if n in stored}, {n: x for n, x in stored.items() if not is_packed(n)}
    )
    for name, array in values.items():
        if EXPERT in name:
            want = mxfp4.decode(stored[f"{name}_packed"], stored[f"{name}_scale"])
            assert array.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(array.astype(np.float32), want)
    assert "quantization_config" not in (tmp_path / "values" / "config.json").read_text()
    assert set(VISION) < set(values)
    export(tmp_path / "packed", open_released(tmp_path / "values"), experts="mxfp4", scale_rule="ceil")
    packed = all_tensors(tmp_path / "packed")
    assert packed.keys() == stored.keys()
    for name, array in values.items():  # by the rule the scales differ from the stored ones; the values do not
        if EXPERT in name:
            got = mxfp4.decode(packed[f"{name}_packed"], packed[f"{name}_scale"])
            np.testing.assert_array_equal(got, array.astype(np.float32))
    assert "mxfp4-pack-quantized" in (tmp_path / "packed" / "config.json").read_text()


def test_experts_packed_in_some_layers_and_not_in_others(tmp_path):
    stored = k3_tensors()
    plain = [name.removesuffix("_packed") for name in stored if ".layers.4." in name and name.endswith("_packed")]
    for name in plain:
        values = mxfp4.decode(stored.pop(f"{name}_packed"), stored.pop(f"{name}_scale"))
        stored[name] = values.astype(ml_dtypes.bfloat16)
    source = open_released(write_k3(tmp_path / "k3", stored))
    for experts, suffixes in (("mxfp4", ("_packed", "_scale")), ("unpacked", ("",))):
        export(tmp_path / experts, source, experts=experts)
        got = all_tensors(tmp_path / experts)
        kept = {name: x for name, x in stored.items() if name in got}
        assert_same_tensors({name: got[name] for name in kept}, kept)
        assert {name for name in got if name not in kept and name.startswith(tuple(plain))} == (
            {name + suffix for name in plain for suffix in suffixes} - kept.keys()
        )
        again = open_released(tmp_path / experts)
        for path in source.leaves:
            np.testing.assert_array_equal(again.read(path), source.read(path))


def test_changed_blocks_follow_the_rule_and_others_keep_their_bytes(tmp_path, k3):
    config, variables = hf.load(k3, dtype="float32")
    name, changed = _first_expert(variables)
    changed[0, 0, 3, :, 5] = 1.0  # of expert 3, all inputs of output 5: one block
    hf.save(tmp_path / "out", config, variables, like=k3, dtype="bfloat16")
    got, want = all_tensors(tmp_path / "out"), k3_tensors()
    differ = [n for n in want if got[n].tobytes() != want[n].tobytes()]
    assert sorted(differ) == [f"{name}_packed", f"{name}_scale"]
    rows = np.flatnonzero((got[f"{name}_packed"] != want[f"{name}_packed"]).any(1))
    assert rows.tolist() == [5]
    assert got[f"{name}_scale"][5].tolist() == [125] and set(got[f"{name}_packed"][5].tolist()) == {0x66}  # 4 * 2^-2


def _first_expert(variables):
    """The gate matrices of layer 1, as numpy, and the released name of expert 3's."""
    source = variables["params"]["stage_0"]
    for run in source.values():
        for layer in run.values():
            if "moe" in layer:
                layer["moe"]["expert_gate"] = np.array(layer["moe"]["expert_gate"])
                return "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight", layer["moe"]["expert_gate"]
    raise AssertionError("no experts")


def test_float32_masters_export_as_the_layout_stores_them(tmp_path):
    config, variables = hf.load(FIXTURES / "kimi_linear_tiny", dtype="float32")
    hf.save(tmp_path / "out", config, variables, dtype="bfloat16")
    got, want = all_tensors(tmp_path / "out"), all_tensors(FIXTURES / "kimi_linear_tiny")
    assert_same_tensors(got, want)


def test_what_is_kept_aside_gives_the_same_export_as_the_original(tmp_path, k3):
    keep_aside(open_released(k3), tmp_path / ASIDE)
    aside = open_aside(tmp_path / ASIDE)
    assert [stored.name for stored in aside.tensors] and not aside.scales
    config, variables = hf.load(k3)
    hf.save(tmp_path / "out", config, variables, like=tmp_path / ASIDE, experts="unpacked")
    export(tmp_path / "want", open_released(k3), experts="unpacked")
    assert_same_tensors(all_tensors(tmp_path / "out"), all_tensors(tmp_path / "want"))


def test_kimi_k3_as_a_whole():
    """Tensors, parameters and bytes of the release (spec §1.3, §10), vision left out."""
    tensors = hf_tensors(ModelConfig.kimi_k3(), K3_PREFIX)
    experts = [tensor for tensor in tensors if tensor.expert is not None]
    assert 2 * len(experts) == 494_592
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    assert abs(parameters / 2.779484e12 - 1) < 1e-6
    packed = sum(math.prod(tensor.stored) for tensor in experts) * (1 / 2 + 1 / 32)
    assert abs(packed / 1.4465e12 - 1) < 1e-4
    others = sum(math.prod(t.stored) * (4 if t.wide else 2) for t in tensors if t.expert is None)
    assert abs((packed + others + 0.89e9) / 1560.8e9 - 1) < 1e-4


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_linear_48b"])
def test_config_json_both_ways(name):
    config = getattr(ModelConfig, name)()
    layout = layout_of(config)
    assert layout == name.removesuffix("_48b")
    values = hf_config(config, layout=layout, dtype="bfloat16", mxfp4=layout == "kimi_k3")
    assert model_config(json.loads(json.dumps(values))) == config
    uneven = dataclasses.replace(config, mla_layers=(2, 5, 27))
    values = hf_config(uneven, layout=layout, dtype="bfloat16", mxfp4=False)
    assert model_config(values).mla_layers == (2, 5, 27)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kda_value_dim": 64}, "kda_value_dim"),
        ({"kda_num_value_heads": 192}, "kda_num_value_heads"),
        ({"attn_res": "full"}, "attn_res"),
        ({"kda_allow_neg_eigval": True}, "kda_allow_neg_eigval"),
        ({"mla_norm_eps": 1e-5}, "mla_norm_eps"),
    ],
)
def test_a_setting_without_a_word_in_config_json_is_refused(change, field):
    config = ModelConfig.kimi_k3(**change)
    with pytest.raises(UserError, match=f"ModelConfig.{field} = .* cannot be exported"):
        hf_config(config, layout="kimi_k3", dtype="bfloat16", mxfp4=False)


def test_leaves_that_do_not_fit_are_listed_before_anything_is_written(tmp_path):
    config, variables = hf.load(FIXTURES / "kimi_linear_tiny")
    variables["params"]["final_norm"] = variables["params"]["final_norm"][:-1]
    variables["params"]["tail"] = variables["params"].pop("embed")
    with pytest.raises(UserError) as caught:
        hf.save(tmp_path / "out", config, variables)
    assert str(caught.value).splitlines()[1:] == [
        "  params/embed: absent, expected [256, 64]",
        "  params/final_norm: [63], expected [64]",
        "  params/tail: [256, 64], expected nothing",
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path, k3):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="exists already; choose another folder"):
        export(tmp_path / "out", open_released(k3))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("experts", ["keep", "unpacked"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, k3, monkeypatch, experts):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        export(tmp_path / "out", open_released(k3), experts=experts)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_never_taken_for_a_whole_one(tmp_path, k3):
    """Killed when all but the last byte of progress is made."""
    program = f"""
import os, signal
from k3jax.checkpoint.hf_export import export
from k3jax.checkpoint.hf_source import open_released
left = [{sum(x.nbytes for x in k3_tensors().values())} - 1]
def advance(count):
    left[0] -= count
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
export({str(tmp_path / "out")!r}, open_released({str(k3)!r}), advance=advance)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=pathlib.Path(__file__).parents[2])
    assert done.returncode == -9
    assert [file.suffix for file in tmp_path.iterdir()] == [".partial"]
    with pytest.raises(UserError):
        open_released(next(tmp_path.iterdir()))
    export(tmp_path / "out", open_released(k3))
    assert_same_files(tmp_path / "out", k3)


def test_columns_that_do_not_divide_into_blocks(tmp_path):
    config, variables = hf.load(FIXTURES / "kimi_linear_tiny")
    small = dataclasses.replace(config, moe_intermediate_size=24)
    variables = jax.tree_util.tree_map_with_path(lambda path, x: _narrow([key.key for key in path], x), variables)
    with pytest.raises(UserError, match=r"w2\.weight: 24 input columns do not divide into MXFP4 blocks of 32"):
        hf.save(tmp_path / "out", small, variables, experts="mxfp4")


def _narrow(path, x):
    """The first 24 of 32 hidden channels of every expert."""
    name = path[-1].removeprefix("expert_") if "moe" in path else ""
    if name in ("gate", "up"):
        return x[..., :24]
    return x[..., :24, :] if name == "down" else x
