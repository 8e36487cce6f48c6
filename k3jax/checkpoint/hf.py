"""Released checkpoints (Hugging Face folders) of Kimi Linear and Kimi K3 as our configuration and variables."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from k3jax.checkpoint.hf_layout import K3_PREFIX, HFTensor, hf_tensors, model_config, to_ours
from k3jax.config import ModelConfig
from k3jax.errors import UserError
from k3jax.models.plan import plan_layers

# These stay float32 or wider whatever dtype is asked for (spec §1.4).
_WIDE = ("a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "bias")


def load(path: str | pathlib.Path, dtype: Any = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a folder with config.json and safetensors files.

    Args:
        path: the folder.
        dtype: of parameters and compute; None keeps each tensor's stored dtype and computes in config.json's.
            Decay rates and their biases, convolutions, KDA's output norms and router biases stay float32 or wider.
    Returns:
        (config, variables) for `KimiK3(config).apply(variables, ...)`.
    Raises:
        FileNotFoundError: no config.json or no safetensors file.
        UserError: another model, a config.json without a needed key, or tensors that are missing, unknown or of
            another shape.
        ValueError: float64 without jax.enable_x64.
    Source: spec §10, §1.4.
    """
    folder = pathlib.Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; expected a folder of a released checkpoint")
    values = json.loads((folder / "config.json").read_text())
    config = model_config(values)
    compute = jnp.dtype(dtype if dtype is not None else values.get("dtype", "bfloat16"))
    config = dataclasses.replace(config, dtype=compute.name)
    files = _tensor_files(folder)
    expected = hf_tensors(config, K3_PREFIX if values["model_type"] == "kimi_k3" else "")
    missing = sorted({t.name for t in expected} - set(files))
    unknown = sorted(set(files) - {t.name for t in expected})
    if missing or unknown:
        raise UserError(f"{folder}: missing tensors {missing[:5]}, unknown tensors {unknown[:5]}")

    blocks = {f"stage_{i}": stage for i, stage in enumerate(plan_layers(config))}
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for tensor, stored in _read(expected, files):
        part = to_ours(tensor, stored)
        if dtype is not None:
            wide = tensor.path[-1] in _WIDE
            part = part.astype(np.promote_types(compute, np.float32) if wide else compute)
        if tensor.slot is None:
            leaves[tensor.path] = part
            continue
        lead = (blocks[tensor.slot.stage].repeats, _repeats(blocks[tensor.slot.stage], tensor.slot.run))
        if tensor.expert is not None:
            lead = (*lead, config.num_experts)
        leaf = leaves.setdefault(tensor.path, np.empty(lead + part.shape, part.dtype))
        at = (tensor.slot.block, tensor.slot.repeat)
        leaf[at if tensor.expert is None else (*at, tensor.expert)] = part
    variables: dict[str, Any] = {}
    for keys, leaf in leaves.items():
        node = variables
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = _place(leaf, "/".join(keys))
    return config, variables


def _read(tensors: list[HFTensor], files: dict[str, pathlib.Path]) -> Iterator[tuple[HFTensor, np.ndarray]]:
    """Each tensor with its stored array; every file is open once, until the last is read."""
    with contextlib.ExitStack() as stack:
        handles = {file: stack.enter_context(safe_open(file, "np")) for file in sorted(set(files.values()))}
        for tensor in tensors:
            yield tensor, handles[files[tensor.name]].get_tensor(tensor.name)


def _place(leaf: np.ndarray, name: str) -> jax.Array:
    """The array on the default device, and not a narrower one."""
    placed = jax.device_put(leaf)
    if placed.dtype != leaf.dtype:
        raise ValueError(f"{name}: {leaf.dtype} would become {placed.dtype}; enable x64: jax.enable_x64(True)")
    return placed


def _repeats(stage, run: str) -> int:
    return stage.runs[int(run.removeprefix("run_"))].repeats


def _tensor_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Which file holds each tensor."""
    files = {}
    shards = sorted(folder.glob("model-*-of-*.safetensors")) or sorted(folder.glob("model.safetensors"))
    for file in shards:
        with safe_open(file, "np") as handle:
            files |= dict.fromkeys(handle.keys(), file)
    if not files:
        raise FileNotFoundError(f"{folder}: no model.safetensors and no model-*-of-*.safetensors")
    return files
