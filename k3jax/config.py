"""Every setting of a run: frozen dataclasses, the only things a gin file can bind (launch/configure.py).

`ModelConfig()` without arguments is Kimi K3 as released (spec §1.1), so a gin file states only what it
changes. Layer numbers in configurations are 1-based, as in the released config files. No jax import here.
"""

import dataclasses
import typing
from typing import Literal

from k3jax.config_checks import ConfigError, check_types
from k3jax.config_checks import require as _require


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture (spec §1-§6). Defaults are Kimi K3's released values."""

    vocab_size: int = 163840
    num_layers: int = 93
    hidden_size: int = 7168  # D
    init_std: float = 0.02
    rms_norm_eps: float = 1e-5

    # Which layers are global (MLA); the others are KDA. An explicit list wins over the ratio.
    kda_per_mla: int | None = 3  # KDA layers for every MLA layer; 0 = all MLA, None = all KDA
    last_layer: Literal["global", "by_ratio"] = "global"
    mla_layers: tuple[int, ...] | None = None

    kda_num_heads: int = 96  # H
    kda_num_value_heads: int | None = None  # J, a multiple of H; None = H
    kda_key_dim: int = 128  # K
    kda_value_dim: int = 128  # V
    kda_conv_size: int = 4
    kda_decay: Literal["bounded", "softplus"] = "bounded"
    kda_decay_lower_bound: float = -5.0
    kda_output_gate: Literal["full_rank", "low_rank"] = "full_rank"
    kda_allow_neg_eigval: bool = False  # beta in (0, 2) in place of (0, 1)

    mla_num_heads: int = 96
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  # a slot shared by all heads; never rotated
    v_head_dim: int = 128
    mla_output_gate: Literal["full_rank", "none"] = "full_rank"
    mla_norm_eps: float = 1e-6  # of q_a and kv_a norms, whatever rms_norm_eps says (spec §12, conflict 5)

    attn_res: Literal["block", "full", "none"] = "block"
    attn_res_block_size: int = 12  # decoder layers, not sublayers (spec §4.3)

    intermediate_size: int = 33792  # F of dense layers
    first_k_dense: int = 1
    activation: Literal["situ", "swiglu"] = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    num_experts: int = 896  # E
    num_experts_per_token: int = 16  # S
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    moe_latent_size: int | None = 3584  # L; None = experts at full width
    moe_routed_norm: bool = True  # RMSNorm of the experts' weighted sum
    routed_scaling_factor: float = 1.0

    balancing: Literal["quantile", "quantile_exact", "sign", "aux_loss", "none"] = "quantile"
    balancing_bins: int = 1000  # of the quantile histogram (spec §6.3)
    balancing_sign_rate: float = 1e-3
    balancing_aux_weight: float = 1e-3

    # How it is computed; the parameters are the same whatever these say.
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # auto: bfloat16, on CPU float32
    kda_implementation: Literal["auto", "recurrent", "chunked", "pallas"] = "auto"
    layer_loop: Literal["scan", "unroll"] = "scan"  # unroll traces each layer, for debugging
    remat: Literal["none", "layer", "dots"] = "layer"  # see models.kimi_k3.REMAT_POLICIES

    def __post_init__(self):
        check_types(self)
        positive = (
            "vocab_size num_layers hidden_size kda_num_heads kda_key_dim kda_value_dim kda_conv_size "
            "mla_num_heads kv_lora_rank qk_nope_head_dim v_head_dim intermediate_size num_experts "
            "num_experts_per_token moe_intermediate_size attn_res_block_size balancing_bins"
        )
        for field in positive.split():
            _require(getattr(self, field) >= 1, self, field, "must be at least 1")
        for field in ("q_lora_rank", "moe_latent_size"):
            value = getattr(self, field)
            _require(value is None or value >= 1, self, field, "must be at least 1, or None to do without")
        for field in ("qk_rope_head_dim", "num_shared_experts"):
            _require(getattr(self, field) >= 0, self, field, "must not be negative")
        for field in ("rms_norm_eps", "mla_norm_eps", "situ_beta", "situ_linear_beta"):
            _require(getattr(self, field) > 0, self, field, "must be positive")
        for field in ("init_std", "routed_scaling_factor", "balancing_sign_rate", "balancing_aux_weight"):
            _require(getattr(self, field) >= 0, self, field, "must not be negative")
        ratio = self.kda_per_mla
        _require(
            ratio is None or ratio >= 0,
            self,
            "kda_per_mla",
            "must be 0 (all MLA), a ratio, or None (all KDA)",
        )
        inside = self.mla_layers is None or all(1 <= i <= self.num_layers for i in self.mla_layers)
        _require(inside, self, "mla_layers", f"layers count from 1 to ModelConfig.num_layers = {self.num_layers}")
        listed = self.mla_layers or ()
        _require(list(listed) == sorted(set(listed)), self, "mla_layers", "must be ascending, each layer once")
        _require(
            self.num_value_heads % self.kda_num_heads == 0,
            self,
            "kda_num_value_heads",
            f"must be a multiple of ModelConfig.kda_num_heads = {self.kda_num_heads}",
        )
        _require(self.kda_decay_lower_bound < 0, self, "kda_decay_lower_bound", "must be negative (a log decay)")
        _require(
            0 <= self.first_k_dense <= self.num_layers,
            self,
            "first_k_dense",
            f"must lie between 0 and ModelConfig.num_layers = {self.num_layers}",
        )
        if self.first_k_dense < self.num_layers:
            selected, experts = self.num_experts_per_token, f"ModelConfig.num_experts = {self.num_experts}"
            _require(selected <= self.num_experts, self, "num_experts_per_token", f"must not exceed {experts}")
            _require(
                selected < self.num_experts or not self.balancing.startswith("quantile"),
                self,
                "num_experts_per_token",
                f"must be less than {experts} for quantile balancing; "
                'ModelConfig.balancing = "none" allows every expert a token',
            )

    @property
    def num_value_heads(self) -> int:
        """J, the KDA value heads."""
        return self.kda_num_heads if self.kda_num_value_heads is None else self.kda_num_value_heads

    @property
    def global_layers(self) -> tuple[int, ...]:
        """The MLA layers, counted from 1, ascending (spec §1.2)."""
        if self.mla_layers is not None:
            return self.mla_layers
        if self.kda_per_mla is None:
            return ()
        layers = {i for i in range(1, self.num_layers + 1) if i % (self.kda_per_mla + 1) == 0}
        if self.last_layer == "global":
            layers.add(self.num_layers)
        return tuple(sorted(layers))

    @classmethod
    def kimi_k3(cls, **changes) -> "ModelConfig":
        """Kimi K3 as released (spec §1.1, config.json), with `changes` to any field."""
        return cls(**changes)

    @classmethod
    def kimi_linear_48b(cls, **changes) -> "ModelConfig":
        """Kimi-Linear-48B-A3B as released (spec §1.1), with `changes` to any field."""
        return cls(**(KIMI_LINEAR_48B | changes))


# Where Kimi-Linear-48B-A3B differs from Kimi K3.
KIMI_LINEAR_48B = {
    "num_layers": 27,
    "hidden_size": 2304,
    "kda_num_heads": 32,
    "kda_decay": "softplus",
    "kda_output_gate": "low_rank",
    "mla_num_heads": 32,
    "q_lora_rank": None,
    "mla_output_gate": "none",
    "attn_res": "none",
    "intermediate_size": 9216,
    "activation": "swiglu",
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_latent_size": None,
    "moe_routed_norm": False,
    "routed_scaling_factor": 2.446,
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes rows of tokens."""

    source: Literal["python", "files"] = "python"  # python: the standard library's own source and documentation
    paths: tuple[str, ...] = ()  # files, folders or globs, for source = "files"
    text_field: str = "text"  # of JSONL objects and Parquet columns
    tokenizer: str = "bytes"  # or a file written by the `tokenizers` package
    document_token: str | None = None  # the special token that opens a document, for a tokenizer file
    seq_len: int = 4096  # T, tokens a row
    batch_size: int = 8  # B, rows a step over all devices and micro-batches
    heldout_fraction: float = 0.05
    heldout_max_bytes: int = 262144  # of held-out text one evaluation reads
    seed: int = 0  # of the order of documents

    def __post_init__(self):
        check_types(self)
        _require(self.seq_len >= 2, self, "seq_len", "must be at least 2")
        _require(self.batch_size >= 1, self, "batch_size", "must be at least 1")
        _require(self.heldout_max_bytes >= 1, self, "heldout_max_bytes", "must be at least 1")
        _require(0 <= self.heldout_fraction < 1, self, "heldout_fraction", "must lie in [0, 1)")
        _require(self.seed >= 0, self, "seed", "must not be negative")
        has_paths = self.source == "python" or len(self.paths) > 0
        _require(has_paths, self, "paths", 'source = "files" needs at least one file, folder or glob')
        _require(
            self.source == "files" or not self.paths,
            self,
            "paths",
            'are read only when DataConfig.source = "files"',
        )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule (spec §7.1, §7.2)."""

    name: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 1e-3
    adam_learning_rate: float | None = None  # of what Muon leaves to AdamW; None = learning_rate
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_fraction: float = 0.01  # of all steps
    decay_fraction: float = 0.1  # of all steps, for wsd
    final_learning_rate_fraction: float = 0.1  # of learning_rate, at the last step
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_blocks: Literal["per_head", "whole"] = "per_head"  # how Q, K and V projections are orthogonalised
    clip_norm: float | None = 1.0  # of the global gradient norm; None = no clipping
    z_loss: float = 0.0  # times the mean squared log-partition

    def __post_init__(self):
        check_types(self)
        for field in ("learning_rate", "eps"):
            _require(getattr(self, field) > 0, self, field, "must be positive")
        for field in ("adam_learning_rate", "clip_norm"):
            value = getattr(self, field)
            _require(value is None or value > 0, self, field, "must be positive, or None")
        for field in ("weight_decay", "z_loss"):
            _require(getattr(self, field) >= 0, self, field, "must not be negative")
        for field in ("warmup_fraction", "decay_fraction", "final_learning_rate_fraction"):
            _require(0 <= getattr(self, field) <= 1, self, field, "must lie in [0, 1]")
        for field in ("beta1", "beta2", "muon_momentum"):
            _require(0 <= getattr(self, field) < 1, self, field, "must lie in [0, 1)")
        _require(
            self.schedule != "wsd" or self.warmup_fraction + self.decay_fraction <= 1,
            self,
            "decay_fraction",
            f"must leave room for OptimConfig.warmup_fraction = {self.warmup_fraction}",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 = all that the others leave."""

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        check_types(self)
        left_over = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _require(value >= 1 or value == -1, self, field.name, "must be at least 1, or -1 for all that is left")
            left_over += [field.name] if value == -1 else []
            first = left_over[0] if left_over else ""
            _require(len(left_over) <= 1, self, field.name, f"MeshConfig.{first} = -1 takes all that is left")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how often, and what is kept."""

    steps: int = 1000
    seed: int = 0  # of the parameters
    init_from: str | None = None  # a checkpoint to begin with: a run, an imported run, or a Hugging Face folder
    init_tensors: tuple[str, ...] = ("*",)  # patterns of what is taken from it; the rest is drawn as without it
    num_microbatches: int = 1  # a step's batch is split in so many, one after the other
    log_every: int = 10
    eval_every: int = 500
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    max_nonfinite_steps: int = 5  # in a row, before the run stops

    def __post_init__(self):
        check_types(self)
        for field in dataclasses.fields(self):
            if field.type is int and field.name != "seed":
                _require(getattr(self, field.name) >= 1, self, field.name, "must be at least 1")
        _require(self.seed >= 0, self, "seed", "must not be negative")
        _require(self.init_from != "", self, "init_from", "give a folder, or None to begin with random parameters")
        _require(len(self.init_tensors) > 0, self, "init_tensors", 'give at least one pattern, such as ("*",) for all')


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    mesh: MeshConfig
    train: TrainConfig

    def __post_init__(self):
        _require(
            self.data.batch_size % self.train.num_microbatches == 0,
            self.train,
            "num_microbatches",
            f"must divide DataConfig.batch_size = {self.data.batch_size}",
        )


SECTIONS: dict[str, type] = typing.get_type_hints(Config)  # field of Config -> its class


def to_dict(config: Config) -> dict:
    """Plain nested dictionaries and lists, as `config.json` holds them."""
    return dataclasses.asdict(config)


def from_dict(values: dict) -> Config:
    """The inverse of `to_dict`, also after a round trip through JSON (lists become tuples again).

    Raises:
        ConfigError: an unknown section or field, a wrong type, or an impossible value.
    """
    parts = {}
    for section in sorted(set(values) - set(SECTIONS)):
        raise ConfigError(f"{section}: no such section; written by another version of k3jax?")
    for section, cls in SECTIONS.items():
        given = dict(values.get(section, {}))
        for field in sorted(set(given) - {f.name for f in dataclasses.fields(cls)}):
            raise ConfigError(f"{cls.__name__}.{field}: no such field; written by another version of k3jax?")
        parts[section] = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    return Config(**parts)
