"""Released checkpoints (Hugging Face folders) of Kimi Linear and Kimi K3: into variables, onto a mesh, and back."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint.hf_aside import open_aside
from k3jax.checkpoint.hf_config import stored_dtype
from k3jax.checkpoint.hf_export import Experts, export
from k3jax.checkpoint.hf_layout import WIDE
from k3jax.checkpoint.hf_source import open_released
from k3jax.checkpoint.hf_write import SHARD_BYTES, Advance
from k3jax.checkpoint.mxfp4 import ScaleRule
from k3jax.checkpoint.source import Index, Leaf, Path, Source
from k3jax.config import ModelConfig


def load(
    path: str | pathlib.Path, dtype: Any = None, *, sharding: jax.sharding.Sharding | dict[str, Any] | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a folder with config.json and safetensors files.

    Args:
        path: the folder.
        dtype: of parameters and compute; None keeps each tensor's stored dtype and computes in config.json's.
            Decay rates and their biases, convolutions, KDA's output norms and router biases stay float32 or wider.
            Experts in MXFP4 are decoded, exactly also in bfloat16, which is what None means for them.
        sharding: of every leaf, or a tree of shardings in the form of the variables; a process then reads only the
            bytes that its devices hold. None puts everything on the default device.
    Returns:
        (config, variables) for `KimiK3(config).apply(variables, ...)`.
    Raises:
        FolderNotFound (a FileNotFoundError): no config.json or no safetensors file.
        UserError: another model, a config.json without a needed key, damaged files, or tensors that are missing,
            unknown or of another shape or dtype, all listed.
        ValueError: float64 without jax.enable_x64.
    Source: spec §10, §9, §1.4.
    """
    source = open_released(path)
    compute = jnp.dtype(dtype if dtype is not None else stored_dtype(source.folder.values))
    config = dataclasses.replace(source.config, dtype=compute.name)
    return config, load_variables(source, None if dtype is None else compute, sharding)


def load_variables(source: Source, dtype: Any = None, sharding: Any = None) -> dict[str, Any]:
    """Reads the variables of an open checkpoint.

    Args:
        source: an open checkpoint.
        dtype, sharding: as in `load`.
    Returns:
        {"params": ..., "router": ...}.
    Raises:
        UserError: damaged files.
        ValueError: float64 without jax.enable_x64.
    """
    variables: dict[str, Any] = {}
    for keys in source.leaves:
        node, places = variables, sharding
        for key in keys[:-1]:
            node = node.setdefault(key, {})
            places = places[key] if isinstance(places, dict) else places
        places = places[keys[-1]] if isinstance(places, dict) else places
        target = None
        if dtype is not None:
            target = np.promote_types(dtype, np.float32) if keys[-1] in WIDE else dtype
        node[keys[-1]] = load_leaf(source, keys, target, places)
    return variables


def load_leaf(
    source: Source, path: Path, dtype: Any = None, sharding: jax.sharding.Sharding | None = None
) -> jax.Array:
    """Puts one leaf of a checkpoint on devices, reading only what this process's devices hold.

    Args:
        source: an open checkpoint.
        path: one of source.leaves.
        dtype: of the result; None = the leaf's.
        sharding: None = the default device.
    Raises:
        ValueError: a dtype that needs jax.enable_x64.
    """
    leaf = source.leaves[path]
    dtype = leaf.dtype if dtype is None else np.dtype(dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        raise ValueError(f"{'/'.join(path)}: {dtype} would become {narrow}; enable x64: jax.enable_x64(True)")
    if sharding is None:
        return jax.device_put(source.read(path).astype(dtype, copy=False))
    parts: dict[str, np.ndarray] = {}  # devices that hold the same part share one reading of it

    def part(index: Index) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = source.read(path, index).astype(dtype, copy=False)
        return parts[str(index)]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def save(
    path: str | pathlib.Path,
    config: ModelConfig,
    variables: dict[str, Any],
    *,
    dtype: Any = None,
    experts: Experts = "keep",
    scale_rule: ScaleRule = "floor",
    like: str | pathlib.Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = lambda count: None,
) -> None:
    """Writes variables as a folder that vLLM, SGLang and transformers read.

    Args:
        path: the folder; new or empty. It appears when all is in it.
        config: of the model.
        variables: as `load` returns; every array must be readable from this process.
        dtype: of tensors; None keeps each array's own. What the layout has in float32 stays float32 or wider.
        experts: routed experts packed ("mxfp4"), as values ("unpacked"), or as in `like` ("keep"; without it, values).
        scale_rule: of packed blocks, see k3jax.checkpoint.mxfp4. Blocks that the scales stored in `like` represent
            exactly keep those scales.
        like: a released checkpoint that the model came from, or what a run kept of it: its vision tensors, tokeniser
            and other files go along, and its config.json is continued.
        shard_bytes: of tensors in a file.
        advance: is told how many more bytes are written, again and again.
    Raises:
        UserError: a setting that the layout has no word for, leaves that do not fit config, a path that exists,
            values that MXFP4 cannot hold.
        ValueError: an array with parts on other processes; export from a checkpoint instead.
    Source: spec §10, §9.
    """
    export(
        path,
        _Tree(config, variables),
        aside=None if like is None else open_aside(pathlib.Path(like)),
        dtype=dtype,
        experts=experts,
        scale_rule=scale_rule,
        shard_bytes=shard_bytes,
        advance=advance,
    )


class _Tree:
    """Variables in memory as a Source."""

    def __init__(self, config: ModelConfig, variables: dict[str, Any]):
        self.path, self.config = pathlib.Path(), config
        self._arrays: dict[Path, Any] = {}
        for keys, array in jax.tree_util.tree_flatten_with_path(variables)[0]:
            path = tuple(key.key for key in keys)
            if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
                name = "/".join(path)
                raise ValueError(
                    f"{name} has parts on other processes; save a checkpoint and export that: k3 ckpt export"
                )
            self._arrays[path] = array
        self.leaves = {path: Leaf(x.shape, np.dtype(x.dtype), x.nbytes) for path, x in self._arrays.items()}

    def read(self, path: Path, index: Index = ()) -> np.ndarray:
        array = self._arrays[path]
        if isinstance(array, jax.Array) and not _on_host(array):
            return np.asarray(array[index] if index else array)  # nothing but the slice leaves the devices
        return np.asarray(array)[index]


def _on_host(array: jax.Array) -> bool:
    """Whether numpy can look into an array without a copy."""
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"
