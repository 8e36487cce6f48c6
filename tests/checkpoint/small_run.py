"""A run's directory with checkpoints but without training: random values, written by eight devices in shards."""

import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.checkpoint.manager import Checkpoints
from k3jax.checkpoint.source import Index, Leaf, Path
from k3jax.config import Config, ModelConfig, to_dict
from k3jax.train.state import TrainState, abstract_state
from tests.train.tiny_run import tiny_config

MODEL = {"num_layers": 4, "kda_per_mla": 1, "attn_res_block_size": 2}


def config() -> Config:
    return tiny_config(pathlib.Path("text"), MODEL)


def write_run(path: pathlib.Path, steps: tuple[int, ...] = (4, 8)) -> dict[int, TrainState]:
    """Writes the run; returns each step's state as numpy arrays."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(to_dict(config())))
    states = {}
    with Checkpoints(path / "checkpoints", keep=len(steps)) as checkpoints:
        for step in steps:
            states[step] = state(step)
            checkpoints.save(step, _shard(states[step]), {})
    lines = [{"step": step, "loss": 1.5, "load": {"2": [1, 3, 0, 4], "3": [2] * 4, "4": [2] * 4}} for step in steps]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return states


def state(seed: int) -> TrainState:
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if leaf.dtype == np.int32:
            return np.full(leaf.shape, seed, np.int32)
        return rng.standard_normal(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, _shapes())


@functools.cache
def _shapes() -> TrainState:
    return abstract_state(config(), _mesh())


@functools.cache
def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def _shard(values: TrainState) -> TrainState:
    """Each array over its last axis that eight divides, stack axes aside; else a copy on each device."""

    def put(x):
        spec = [None] * x.ndim
        for axis in reversed(range(2, x.ndim)):
            if x.shape[axis] % 8 == 0:
                spec[axis] = "data"
                break
        return jax.device_put(x, NamedSharding(_mesh(), PartitionSpec(*spec)))

    return jax.tree.map(put, values)


class MemorySource:
    """A `Source` over arrays; remembers how large what was read is."""

    def __init__(self, arrays: dict[Path, np.ndarray], config: ModelConfig | None = None):
        self.path, self.config, self.arrays, self.reads = pathlib.Path("memory"), config, arrays, []
        self.leaves = {path: Leaf(x.shape, x.dtype, x.nbytes) for path, x in arrays.items()}

    def read(self, path: Path, index: Index = ()) -> np.ndarray:
        part = self.arrays[path][index]
        self.reads.append(part.nbytes)
        return part


def flat(tree: Any) -> dict[Path, np.ndarray]:
    """{path: array} of a state, paths as orbax writes them."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        found[tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)] = leaf
    return found
