"""The smallest run that has every part: KDA and MLA layers, experts, blocks, text in files."""

import pathlib

from k3jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

MODEL = {
    "vocab_size": 257,
    "num_layers": 2,
    "hidden_size": 32,
    "kda_per_mla": 1,
    "kda_num_heads": 2,
    "kda_key_dim": 16,
    "kda_value_dim": 16,
    "mla_num_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attn_res_block_size": 1,
    "intermediate_size": 64,
    "first_k_dense": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_latent_size": 16,
    "dtype": "float32",
    "kda_implementation": "recurrent",  # half the compile time
}


def write_text(folder: pathlib.Path, documents: int = 30) -> pathlib.Path:
    """Files of repetitive text of various lengths, the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        words = [f"word{(i * 7 + j * j) % 23} {'and' if j % 3 else 'then'}" for j in range(5 + 11 * (i % 7))]
        (folder / f"{i}.txt").write_text(f"document {i}: " + " ".join(words) + ".\n")
    return folder


def tiny_config(text: pathlib.Path, model: dict | None = None, data: dict | None = None, **train) -> Config:
    """A run on the text of `write_text`; keywords are fields of TrainConfig."""
    settings = {"steps": 12, "log_every": 2, "eval_every": 5, "checkpoint_every": 4, "keep_checkpoints": 2}
    data_settings = {"source": "files", "paths": (str(text),), "seq_len": 32, "batch_size": 8, "heldout_fraction": 0.2}
    return Config(
        model=ModelConfig(**(MODEL | (model or {}))),
        data=DataConfig(**(data_settings | (data or {}))),
        optim=OptimConfig(learning_rate=3e-3),
        mesh=MeshConfig(),
        train=TrainConfig(**(settings | train)),
    )


def snapshot(path: pathlib.Path) -> dict:
    """All files below a folder, with contents and times of change: equal when nothing was touched."""
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in path.rglob("*")}
