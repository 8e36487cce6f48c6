"""A run small enough to compile in seconds, and batches for it."""

import functools

import jax
import numpy as np

from k3jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from k3jax.data import Batch
from k3jax.train.state import abstract_state
from k3jax.train.step import make_train_step

T = 16
# Two equal layers of MLA and experts: the least to compile that has everything a step can go wrong with.
PLAIN = {
    "vocab_size": 64, "num_layers": 2, "hidden_size": 32, "kda_per_mla": 0, "mla_num_heads": 2, "q_lora_rank": None,
    "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "attn_res": "none",
    "intermediate_size": 32, "first_k_dense": 0, "num_experts": 8, "num_experts_per_token": 2,
    "num_shared_experts": 1, "moe_intermediate_size": 16, "moe_latent_size": 16, "remat": "none", "dtype": "float32",
}  # fmt: skip
# What Kimi K3 adds: a dense layer, KDA, q-LoRA, depth sources.
K3_SHAPE = PLAIN | {
    "kda_per_mla": 1, "kda_num_heads": 2, "kda_key_dim": 8, "kda_value_dim": 8, "kda_implementation": "recurrent",
    "q_lora_rank": 12, "attn_res": "block", "attn_res_block_size": 1, "first_k_dense": 1,
}  # fmt: skip
# Clipping always acts (the norm is near 2); eps keeps a first step smooth: without it AdamW's is the gradient's sign.
OPTIM = {
    "name": "adamw", "learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0, "clip_norm": 0.5,
    "z_loss": 1e-2, "eps": 1e-2,
}  # fmt: skip


def make_config(model=(), optim=(), batch_size: int = 8, num_microbatches: int = 1, base=PLAIN) -> Config:
    """A small run, with changes given as dictionaries."""
    return Config(
        ModelConfig(**(base | dict(model))),
        DataConfig(seq_len=T, batch_size=batch_size),
        OptimConfig(**(OPTIM | dict(optim))),
        MeshConfig(),
        TrainConfig(steps=100, num_microbatches=num_microbatches),
    )


def make_batch(rows: int = 8, seed: int = 0) -> Batch:
    """Packed rows of two documents and padding, as uneven as they come: row r has about 2 r targets.

    Eight rows hold 65 tokens, so that an expert's share of two in eight is no whole number.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, PLAIN["vocab_size"], (rows, T + 1), dtype=np.int32)
    position, length = np.arange(T), 1 + (np.arange(rows) * (T - 1)) // max(rows - 1, 1)
    segments = np.where(position < length[:, None], 1 + (position >= length[:, None] // 2), 0).astype(np.int32)
    targets = np.where((segments != 0) & (position < length[:, None] - 1), tokens[:, 1:], -1).astype(np.int32)
    return Batch(np.where(segments != 0, tokens[:, :-1], 0), targets, segments)


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch with rows of nothing but padding behind it."""
    fill = (0, -1, 0)
    return Batch(*(np.pad(x, ((0, rows), (0, 0)), constant_values=v) for x, v in zip(batch, fill, strict=True)))


def mesh_of(devices: int = 1) -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("data",), axis_types=auto, devices=jax.devices()[:devices])


def train_step(config: Config, devices: int = 1):
    """One compiled step for each run and number of devices."""
    return _train_step(config, devices)  # by position: the cache would tell a default from the same value given


@functools.lru_cache
def _train_step(config: Config, devices: int):
    return make_train_step(config, mesh_of(devices))


@functools.lru_cache
def state_shapes(config: Config):
    return abstract_state(config, mesh_of())


def fresh_state(config: Config, devices: int = 1):
    """A state before its first step, with random parameters and buffers of its own: a step takes them away."""
    sharding = jax.sharding.NamedSharding(mesh_of(devices), jax.sharding.PartitionSpec())
    rng = np.random.default_rng(1)

    def fill(path, x):
        keys = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        value = np.zeros(x.shape, x.dtype)
        if keys[0] == "params":
            value += 0.2 * rng.standard_normal(x.shape) + (keys[-1].endswith(("norm", "gain")))
        return jax.device_put(value, sharding)

    return jax.tree_util.tree_map_with_path(fill, state_shapes(config))


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
