"""A Kimi K3 checkpoint in the released form, written without our code: packed experts, vision, three files."""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.conftest import FIXTURES

VISION = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    "vision_tower.encoder.blocks.0.wqkv.weight": (24, 8),
    "mm_projector.proj.0.weight": (16, 16),
}


def k3_tensors() -> dict[str, np.ndarray]:
    """The tensors of the fixture, experts replaced by random codes and scales, with a vision tower's."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, values in load_file(FIXTURES / "kimi_k3_tiny" / "model.safetensors").items():
        if ".experts." in name:
            rows, columns = values.shape
            tensors[f"{name}_packed"] = rng.integers(0, 256, (rows, columns // 2), np.uint8)
            tensors[f"{name}_scale"] = rng.integers(100, 140, (rows, columns // 32), np.uint8)
        else:
            tensors[name] = values
    bfloat16 = tensors["language_model.lm_head.weight"].dtype
    for name, shape in VISION.items():
        tensors[name] = rng.standard_normal(shape, np.float32).astype(bfloat16)
    return tensors


def write_k3(folder: pathlib.Path, tensors: dict[str, np.ndarray] | None = None) -> pathlib.Path:
    """Writes tensors (those of `k3_tensors`) with config.json, index and a tokeniser's file."""
    tensors = k3_tensors() if tensors is None else tensors
    folder.mkdir(parents=True)
    values = json.loads((FIXTURES / "kimi_k3_tiny" / "config.json").read_text())
    values["media_placeholder_token_id"] = 17
    values["vision_config"] = {"patch_size": 2, "vt_hidden_size": 8}
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    values["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-000003.safetensors"
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def all_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every tensor in a folder, by the safetensors library."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same names, shapes, dtypes and bytes."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def assert_same_files(got: pathlib.Path, want: pathlib.Path) -> None:
    """The same files with the same bytes."""
    assert sorted(file.name for file in got.iterdir()) == sorted(file.name for file in want.iterdir())
    for file in want.iterdir():
        assert (got / file.name).read_bytes() == file.read_bytes(), file.name
