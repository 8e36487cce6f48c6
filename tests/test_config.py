"""The configuration dataclasses: released values, layer lists, checks, and the way to JSON and back."""

import dataclasses
import json
import subprocess
import sys

import pytest

from k3jax.config import (
    SECTIONS,
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    from_dict,
    to_dict,
)
from tests.conftest import FIXTURES

# The released config files (spec §1.1), under our names.
RELEASED = {
    "vocab_size": (163840, 163840),
    "hidden_size": (7168, 2304),
    "num_layers": (93, 27),
    "mla_num_heads": (96, 32),
    "q_lora_rank": (1536, None),
    "kv_lora_rank": (512, 512),
    "qk_nope_head_dim": (128, 128),
    "qk_rope_head_dim": (64, 64),
    "v_head_dim": (128, 128),
    "mla_output_gate": ("full_rank", "none"),
    "kda_num_heads": (96, 32),
    "num_value_heads": (96, 32),
    "kda_key_dim": (128, 128),
    "kda_value_dim": (128, 128),
    "kda_conv_size": (4, 4),
    "kda_output_gate": ("full_rank", "low_rank"),
    "kda_decay": ("bounded", "softplus"),
    "kda_decay_lower_bound": (-5.0, -5.0),
    "intermediate_size": (33792, 9216),
    "first_k_dense": (1, 1),
    "num_experts": (896, 256),
    "num_experts_per_token": (16, 8),
    "num_shared_experts": (2, 1),
    "moe_intermediate_size": (3072, 1024),
    "moe_latent_size": (3584, None),
    "moe_routed_norm": (True, False),
    "routed_scaling_factor": (1.0, 2.446),
    "activation": ("situ", "swiglu"),
    "situ_beta": (4.0, 4.0),
    "situ_linear_beta": (25.0, 25.0),
    "attn_res": ("block", "none"),
    "attn_res_block_size": (12, 12),
    "rms_norm_eps": (1e-5, 1e-5),
    "init_std": (0.02, 0.02),
    "global_layers": ((*range(4, 93, 4), 93), (4, 8, 12, 16, 20, 24, 27)),
}


def default_config(**sections) -> Config:
    return Config(**({name: cls() for name, cls in SECTIONS.items()} | sections))


@pytest.mark.parametrize("field", RELEASED)
def test_presets_hold_the_released_values(field):
    models = ModelConfig.kimi_k3(), ModelConfig.kimi_linear_48b()
    assert tuple(getattr(model, field) for model in models) == RELEASED[field]


def test_every_preset_can_be_changed():
    assert ModelConfig.kimi_k3(num_layers=8).num_layers == 8
    changed = ModelConfig.kimi_linear_48b(num_experts=16)
    assert (changed.num_experts, changed.hidden_size) == (16, 2304)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (4, 8, 10)),
        ({"last_layer": "by_ratio"}, (4, 8)),
        ({"kda_per_mla": 0}, tuple(range(1, 11))),
        ({"kda_per_mla": 1}, (2, 4, 6, 8, 10)),
        ({"kda_per_mla": 7}, (8, 10)),
        ({"kda_per_mla": 20}, (10,)),
        ({"kda_per_mla": 20, "last_layer": "by_ratio"}, ()),
        ({"kda_per_mla": None}, ()),
        ({"mla_layers": (1, 9)}, (1, 9)),
        ({"mla_layers": ()}, ()),
        ({"mla_layers": (2,), "kda_per_mla": None}, (2,)),
    ],
)
def test_global_layers_follow_ratio_or_list(changes, layers):
    assert ModelConfig(num_layers=10, **changes).global_layers == layers


@pytest.mark.parametrize(
    ("cls", "changes", "fragment"),
    [
        (ModelConfig, {"num_layers": 0}, "ModelConfig.num_layers = 0: must be at least 1"),
        (ModelConfig, {"hidden_size": "7168"}, "ModelConfig.hidden_size = '7168': expected an integer"),
        (ModelConfig, {"q_lora_rank": 0}, "q_lora_rank = 0: must be at least 1, or None"),
        (ModelConfig, {"q_lora_rank": 1.5}, "expected an integer or None"),
        (ModelConfig, {"kda_per_mla": -1}, "kda_per_mla = -1"),
        (ModelConfig, {"kda_allow_neg_eigval": 1}, "expected True or False"),
        (ModelConfig, {"kda_decay_lower_bound": 0.0}, "must be negative"),
        (ModelConfig, {"rms_norm_eps": float("nan")}, "expected a finite number"),
        (ModelConfig, {"rms_norm_eps": 10**400}, "expected a finite number"),
        (ModelConfig, {"rms_norm_eps": 0}, "must be positive"),
        (ModelConfig, {"kda_num_value_heads": 97}, "multiple of ModelConfig.kda_num_heads = 96"),
        (ModelConfig, {"num_experts_per_token": 896}, "less than ModelConfig.num_experts = 896 for quantile"),
        (ModelConfig, {"num_experts_per_token": 896, "balancing": "quantile_exact"}, "for quantile balancing"),
        (ModelConfig, {"num_experts_per_token": 897}, "must not exceed ModelConfig.num_experts = 896"),
        (ModelConfig, {"num_experts_per_token": 897, "balancing": "none"}, "must not exceed"),
        (ModelConfig, {"first_k_dense": 94}, "between 0 and ModelConfig.num_layers = 93"),
        (ModelConfig, {"mla_layers": (0,)}, "count from 1"),
        (ModelConfig, {"mla_layers": (1, 1)}, "each layer once"),
        (ModelConfig, {"mla_layers": [1]}, "expected a tuple of integers or None"),
        (ModelConfig, {"dtype": "float16"}, "did you mean 'bfloat16'?"),
        (DataConfig, {"source": "files"}, "DataConfig.paths = ()"),
        (DataConfig, {"paths": ("a",)}, "read only when DataConfig.source"),
        (DataConfig, {"seq_len": 1}, "at least 2"),
        (DataConfig, {"heldout_fraction": 1}, "[0, 1)"),
        (OptimConfig, {"learning_rate": 0}, "must be positive"),
        (OptimConfig, {"clip_norm": -1.0}, "positive, or None"),
        (OptimConfig, {"beta2": 1.0}, "[0, 1)"),
        (OptimConfig, {"schedule": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.6}, "leave room for"),
        (MeshConfig, {"tensor": 0}, "-1 for all that is left"),
        (MeshConfig, {"tensor": -1}, "MeshConfig.data = -1 takes all that is left"),
        (TrainConfig, {"steps": 0}, "TrainConfig.steps = 0: must be at least 1"),
        (TrainConfig, {"seed": -1}, "must not be negative"),
    ],
)
def test_impossible_values_are_refused_with_the_fix(cls, changes, fragment):
    with pytest.raises(ConfigError) as caught:
        cls(**changes)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_edges_that_are_possible():
    ModelConfig(num_layers=1, first_k_dense=1, num_experts=1, num_experts_per_token=1)  # no layer routes
    for balancing in ("sign", "aux_loss", "none"):
        ModelConfig(num_experts=16, num_experts_per_token=16, balancing=balancing)
    ModelConfig(attn_res_block_size=1000)
    ModelConfig(qk_rope_head_dim=0, num_shared_experts=0)
    OptimConfig(learning_rate=1, clip_norm=None, adam_learning_rate=None)
    with pytest.raises(ConfigError, match=r"TrainConfig.num_microbatches = 3: must divide DataConfig.batch_size = 8"):
        default_config(train=TrainConfig(num_microbatches=3))


def test_configurations_are_values():
    assert ModelConfig() == ModelConfig.kimi_k3()
    assert hash(default_config()) == hash(default_config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().num_layers = 3


def test_json_gives_the_configuration_back():
    config = default_config(
        model=ModelConfig(mla_layers=(4, 8), q_lora_rank=None),
        data=DataConfig(source="files", paths=("a", "b")),
        mesh=MeshConfig(data=4),
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict({}) == default_config()


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        ({"model": {"layers": 3}}, "ModelConfig.layers: no such field"),
        ({"modle": {}}, "modle: no such section"),
        ({"train": {"steps": "3"}}, "TrainConfig.steps = '3'"),
    ],
)
def test_json_of_another_shape_is_refused(values, fragment):
    with pytest.raises(ConfigError) as caught:
        from_dict(values)
    assert fragment in str(caught.value)


def test_the_tiny_fixtures_can_be_expressed():
    released = json.loads((FIXTURES / "kimi_k3_tiny" / "config.json").read_text())
    text = released.get("text_config", released)
    listed = tuple(text["linear_attn_config"]["full_attn_layers"])
    model = ModelConfig(num_layers=text["num_hidden_layers"], first_k_dense=text["first_k_dense_replace"])
    assert model.global_layers == listed


def test_importing_the_configuration_imports_no_jax_and_no_gin():
    program = "import sys, k3jax.config; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'gin')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
