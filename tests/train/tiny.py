"""A run small enough to compile in seconds, and batches for it."""

import functools

import jax
import numpy as np

from k3jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from k3jax.data import Batch
from k3jax.train.state import make_state
from k3jax.train.step import make_eval_step, make_train_step

T = 16
MODEL = {
    "vocab_size": 64, "num_layers": 4, "hidden_size": 32, "kda_per_mla": 1, "kda_num_heads": 2, "kda_key_dim": 8,
    "kda_value_dim": 8, "mla_num_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "attn_res_block_size": 2, "intermediate_size": 32, "num_experts": 8,
    "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 16, "moe_latent_size": 16,
    "init_std": 0.2, "remat": "none", "dtype": "float32",
}  # fmt: skip
OPTIM = {"name": "adamw", "learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0}


def make_config(model=(), optim=(), batch_size: int = 8, num_microbatches: int = 1) -> Config:
    """The small run, with changes given as dictionaries."""
    return Config(
        ModelConfig(**(MODEL | dict(model))),
        DataConfig(seq_len=T, batch_size=batch_size),
        OptimConfig(**(OPTIM | dict(optim))),
        MeshConfig(),
        TrainConfig(steps=100, num_microbatches=num_microbatches),
    )


def make_batch(rows: int = 8, seed: int = 0) -> Batch:
    """Packed rows of two documents and padding, as uneven as they come: row r has about 2 r targets."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL["vocab_size"], (rows, T + 1), dtype=np.int32)
    position, length = np.arange(T), 2 + (np.arange(rows) * (T - 2)) // max(rows - 1, 1)
    segments = np.where(position < length[:, None], 1 + (position >= length[:, None] // 2), 0).astype(np.int32)
    targets = np.where((segments != 0) & (position < length[:, None] - 1), tokens[:, 1:], -1).astype(np.int32)
    return Batch(np.where(segments != 0, tokens[:, :-1], 0), targets, segments)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch with rows of nothing but padding behind it."""
    fill = (0, -1, 0)
    return Batch(*(np.pad(x, ((0, rows), (0, 0)), constant_values=v) for x, v in zip(batch, fill, strict=True)))


@functools.lru_cache
def mesh_of(devices: int = 1) -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("data",), axis_types=auto, devices=jax.devices()[:devices])


@functools.lru_cache
def train_step(config: Config, devices: int = 1):
    return make_train_step(config, mesh_of(devices))


@functools.lru_cache
def eval_step(config: Config, devices: int = 1):
    return make_eval_step(config, mesh_of(devices))


@functools.lru_cache
def _first_state(config: Config):
    return jax.device_get(make_state(config))


def fresh_state(config: Config, devices: int = 1):
    """The first state, in buffers of its own each time: a step takes them away."""
    mesh = mesh_of(devices)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(np.array(x), sharding), _first_state(config))


def equal_bits(a, b) -> bool:
    """Whether two trees of arrays are the same to the bit, dtypes and structure included."""
    leaves_a, structure_a = jax.tree.flatten(jax.device_get(a))
    leaves_b, structure_b = jax.tree.flatten(jax.device_get(b))
    same = [x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(leaves_a, leaves_b, strict=True)]
    return structure_a == structure_b and all(same)


def worst(a, b) -> float:
    """The largest difference of two trees' leaves, each relative to the leaf's largest value in `b`."""

    def error(x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        return float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(error, a, b)))
