"""Released checkpoints: what is read where, dtypes, and mistakes in a folder. tests/models/test_parity.py compares
values with independent models, test_hf_export.py covers the way back."""

import json
import os
import pathlib
import shutil
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from k3jax.checkpoint import hf, hf_source, mxfp4
from k3jax.checkpoint.hf_source import open_released
from k3jax.checkpoint.source import tensors
from k3jax.errors import UserError
from tests.checkpoint.released import k3_tensors, write_k3
from tests.conftest import FIXTURES

# spec §1.4, by our leaf names: rates and their bias, convolutions, KDA's output norm, router bias.
FLOAT32 = {"a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "bias"}
EXPERTS = "language_model.model.layers.{}.block_sparse_moe.experts.{}."


@pytest.fixture(scope="module")
def k3(tmp_path_factory) -> pathlib.Path:
    return write_k3(tmp_path_factory.mktemp("hf") / "k3")


def test_bfloat16_leaves_what_must_be_float32():
    config, variables = hf.load(FIXTURES / "kimi_k3_tiny", dtype="bfloat16")
    assert config.dtype == "bfloat16"
    leaves = flatten_dict(variables)
    assert {path[-1] for path, x in leaves.items() if x.dtype == "float32"} == FLOAT32
    assert {str(x.dtype) for x in leaves.values()} == {"float32", "bfloat16"}


def test_float64_needs_x64():
    with pytest.raises(ValueError, match=r"float64 would become float32; enable x64: jax.enable_x64\(True\)"):
        hf.load(FIXTURES / "kimi_k3_tiny", dtype="float64")
    with jax.enable_x64(True):
        _, variables = hf.load(FIXTURES / "kimi_k3_tiny", dtype="float64")
    assert {x.dtype for x in jax.tree.leaves(variables)} == {np.dtype("float64")}


def test_packed_experts_are_decoded_and_the_rest_keeps_its_dtype(k3):
    config, variables = hf.load(k3)
    stored = k3_tensors()
    experts = [tensor for tensor in tensors(open_released(k3)) if tensor.path[-1] == "expert_down"]
    assert len(experts) == config.num_layers - config.first_k_dense
    for tensor in experts:
        leaf = flatten_dict(variables)[tensor.path]
        assert leaf.dtype == "bfloat16"
        for expert in range(config.num_experts):
            name = EXPERTS.format(tensor.layer - 1, expert) + "w2.weight"
            want = mxfp4.decode(stored[f"{name}_packed"], stored[f"{name}_scale"]).T
            np.testing.assert_array_equal(np.asarray(leaf[(*tensor.index, expert)], np.float32), want)
    kept = load_file(FIXTURES / "kimi_k3_tiny" / "model.safetensors")
    np.testing.assert_array_equal(variables["params"]["head"], kept["language_model.lm_head.weight"].T)


def test_slices_are_slices_of_the_whole(k3):
    source = open_released(k3)
    rng = np.random.default_rng(0)
    for path, leaf in source.leaves.items():
        whole = source.read(path)
        assert (whole.shape, whole.dtype) == (leaf.shape, leaf.dtype)
        for _ in range(3):
            index = tuple(
                int(rng.integers(n)) if rng.random() < 0.3 else slice(*sorted(rng.integers(0, n + 1, 2).tolist()))
                for n in leaf.shape[: rng.integers(0, len(leaf.shape) + 1)]
            )
            np.testing.assert_array_equal(source.read(path, index), whole[index], err_msg=f"{path} {index}")


class Count(NamedTuple):
    """Bytes asked of files, by tensor."""

    read: dict[str, int]


@pytest.fixture
def count(monkeypatch) -> Count:
    counted = Count({})
    read = hf_source.read

    def reader(tensor, shape=None, index=()):
        values = read(tensor, shape, index)
        counted.read[tensor.name] = counted.read.get(tensor.name, 0) + values.nbytes
        return values

    monkeypatch.setattr(hf_source, "read", reader)
    return counted


@pytest.mark.parametrize(
    ("leaf", "spec"),
    [
        ("expert_up", (None, None, "a")),  # experts, packed
        ("expert_up", (None, None, None, None, "a")),  # rows, packed
        ("q_proj", (None, None, "b")),  # input columns
        ("q_proj", (None, None, "a", "b")),
        ("a_log", ()),
    ],
)
def test_onto_a_mesh_every_byte_is_read_once(k3, count, leaf, spec):
    """This process holds all eight devices; those that hold the same part share one reading."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    source = open_released(k3)
    path = next(path for path in source.leaves if path[-1] == leaf)
    got = hf.load_leaf(source, path, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    assert sum(count.read.values()) == source.leaves[path].nbytes
    np.testing.assert_array_equal(got, source.read(path))


def test_a_device_reads_its_part_alone(k3, count):
    """What another host would read: the parts of a mesh's devices, asked for one by one."""
    source = open_released(k3)
    path = next(path for path in source.leaves if path[-1] == "expert_up")
    leaf = source.leaves[path]
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "a"))  # one expert a device
    index = sharding.devices_indices_map(leaf.shape)[mesh.devices[5]]
    part = source.read(path, index)
    assert set(count.read) == {name for name in count.read if ".experts.5." in name}
    assert sum(count.read.values()) * 8 == leaf.nbytes
    np.testing.assert_array_equal(part, source.read(path)[index])


def test_load_onto_a_mesh_equals_load(k3):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    _, want = hf.load(k3)
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(*(None,) * (x.ndim - 1), "a" if x.shape[-1] % 8 == 0 else None)),
        want,
    )
    _, got = hf.load(k3, sharding=shardings)
    for (path, x), y in zip(flatten_dict(want).items(), flatten_dict(got).values(), strict=True):
        assert y.sharding == flatten_dict(shardings)[path]
        np.testing.assert_array_equal(x, y, err_msg=str(path))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("kimi_linear_tiny", "hidden_size"),
        ("kimi_linear_tiny", "linear_attn_config.num_heads"),
        ("kimi_k3_tiny", "text_config"),
        ("kimi_k3_tiny", "text_config.hidden_act"),
        ("kimi_k3_tiny", "text_config.linear_attn_config"),
        ("kimi_k3_tiny", "text_config.linear_attn_config.full_attn_layers"),
    ],
)
def test_a_missing_key_is_named(tmp_path, model, path):
    values = json.loads((FIXTURES / model / "config.json").read_text())
    *sections, key = path.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    del inner[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        hf.load(tmp_path)
    assert f"config.json: no {path};" in str(caught.value)


def test_files_that_are_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        hf.load(tmp_path)
    shutil.copy(FIXTURES / "kimi_k3_tiny" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        hf.load(tmp_path)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    stored = k3_tensors()
    layer = "language_model.model.layers."
    del stored[f"{layer}3.self_attn.kv_b_proj.weight"]
    for expert in range(8):
        del stored[f"{layer}4.block_sparse_moe.experts.{expert}.w1.weight_scale"]
    stored[f"{layer}5.self_attn.kq_proj.weight"] = stored.pop(f"{layer}5.self_attn.k_proj.weight")
    stored[f"{layer}6.self_attn.A_log"] = stored[f"{layer}6.self_attn.A_log"] + 1
    stored[f"{layer}7.self_attn.o_proj.weight"] = stored[f"{layer}7.self_attn.o_proj.weight"][:-1]
    bias = f"{layer}8.block_sparse_moe.gate.e_score_correction_bias"
    stored[bias] = stored[bias].astype(stored["language_model.lm_head.weight"].dtype)
    stored["language_model.model.norm.weight"] = stored["language_model.model.norm.weight"].astype(np.int32)
    with pytest.raises(UserError) as caught:
        hf.load(write_k3(tmp_path / "k3", stored))
    lines = str(caught.value).splitlines()
    assert "(15 problems)" in lines[0]
    found = [line.removeprefix("  ") for line in lines[1:]]
    experts = f"{layer}*.block_sparse_moe.experts.*.w1.weight_scale"
    first = f"{layer}4.block_sparse_moe.experts.0.w1.weight"
    for want in [
        f"missing: {layer}3.self_attn.kv_b_proj.weight: [128, 16]",
        f"missing: {experts} (8, first {first}_scale): {first}_packed cannot be read without it",
        f"missing: {layer}5.self_attn.k_proj.weight: [64, 64]; nearest there: {layer}5.self_attn.kq_proj.weight",
        f"unexpected: {layer}5.self_attn.kq_proj.weight: BF16[64, 64]; nearest expected: "
        f"{layer}5.self_attn.k_proj.weight",
        f"not zero after its heads: {layer}6.self_attn.A_log: [128], for 4 heads",
        f"wrong shape: {layer}7.self_attn.o_proj.weight: [63, 64], expected [64, 64]",
        f"wrong dtype: {bias}: BF16, expected F32 or F64",
        "wrong dtype: language_model.model.norm.weight: I32, expected BF16 or F32 or F64",
    ]:
        assert want in found
    assert len(found) == 8


def test_another_quantisation_is_refused(tmp_path, k3):
    shutil.copytree(k3, tmp_path / "k3")
    config = tmp_path / "k3" / "config.json"
    config.write_text((k3 / "config.json").read_text().replace("mxfp4-pack-quantized", "nvfp4-pack-quantized"))
    with pytest.raises(UserError, match="quantization_config: nvfp4-pack-quantized: only"):
        open_released(tmp_path / "k3")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../b.safetensors", "link.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, k3, name):
    folder = tmp_path / "k3"
    shutil.copytree(k3, folder)
    shutil.copy(k3 / "model-00001-of-000003.safetensors", tmp_path / "secret.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        key: name if file.startswith("model-00001") else file for key, file in index["weight_map"].items()
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"not a file of this folder|a link that leaves the folder"):
        open_released(folder)


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path, k3):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    shutil.copytree(k3, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert open_released(snapshot).leaves == open_released(k3).leaves


def test_an_index_that_is_wrong(tmp_path, k3):
    folder = tmp_path / "k3"
    shutil.copytree(k3, folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = "language_model.model.norm.weight"
    there = index["weight_map"][name]
    other = next(x for x in index["weight_map"].values() if x != there)
    file.write_text(json.dumps({"weight_map": index["weight_map"] | {name: other, "lost": other}}))
    with pytest.raises(UserError) as caught:
        open_released(folder)
    assert f"  {name}: {other} in the index, {there} on disk" in str(caught.value).splitlines()
    assert f"  lost: {other} in the index, absent on disk" in str(caught.value).splitlines()
    (folder / there).unlink()
    with pytest.raises(UserError, match=f"{there}: no such file, although the index names it"):
        open_released(folder)
    file.write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not JSON"):
        open_released(folder)


def test_a_truncated_file_names_file_and_offset(tmp_path, k3):
    folder = tmp_path / "k3"
    shutil.copytree(k3, folder)
    file = folder / "model-00002-of-000003.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(UserError, match=rf"{file}: truncated: .* ends at byte {size}, the file at {size - 1}"):
        open_released(folder)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path, k3):
    folder = tmp_path / "k3"
    shutil.copytree(k3, folder)
    source = open_released(folder)
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 20_000)
    with pytest.raises(UserError, match=r"safetensors: truncated: ends at byte \d+, expected \d+"):
        for path in source.leaves:
            source.read(path)
