"""config.json of released checkpoints against our configuration, both ways."""

import copy
import dataclasses
from typing import Any, Literal

from k3jax.config import ModelConfig
from k3jax.errors import UserError

Layout = Literal["kimi_k3", "kimi_linear"]
MXFP4_FORMAT = "mxfp4-pack-quantized"
# What config.json says nothing of: how the model is computed and balanced.
NOT_STORED = {
    "dtype",
    "kda_implementation",
    "layer_loop",
    "remat",
    "balancing",
    "balancing_bins",
    "balancing_sign_rate",
    "balancing_aux_weight",
}


def model_config(values: dict[str, Any]) -> ModelConfig:
    """The architecture that a released config.json describes.

    Args:
        values: the file's content, of a Kimi Linear ("kimi_linear") or Kimi K3 ("kimi_k3") model.
    Returns:
        ModelConfig.
    Raises:
        UserError: another model, a setting that has no counterpart here, or a key that is missing.
    Source: spec §1.1; both text models call themselves kimi_linear, so the top level decides (spec §12, trap 18).
    """
    kind = values.get("model_type")
    if kind not in ("kimi_k3", "kimi_linear"):
        raise UserError(f"config.json: model_type = {kind!r}: expected 'kimi_k3' or 'kimi_linear'")
    text = _Section(_Section(values, "")["text_config"], "text_config.") if kind == "kimi_k3" else _Section(values, "")
    text.update(_from_transformers(text))
    linear = _Section(text["linear_attn_config"], f"{text.name}linear_attn_config.")
    fixed = {
        "mla_use_nope": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
    }
    for name, expected in fixed.items():
        if text.get(name, expected) != expected:
            raise UserError(f"config.json: {name} = {text[name]!r}: only {expected!r} is supported")
    situ = text["hidden_act"] == "situ"
    latent = text.get("routed_expert_hidden_size")
    config = ModelConfig(
        vocab_size=text["vocab_size"],
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        init_std=text.get("initializer_range", 0.02),
        rms_norm_eps=text["rms_norm_eps"],
        mla_layers=tuple(sorted(linear["full_attn_layers"])),
        kda_num_heads=linear["num_heads"],
        kda_key_dim=linear["head_dim"],
        kda_value_dim=linear["head_dim"],
        kda_conv_size=linear["short_conv_kernel_size"],
        kda_decay="softplus" if linear.get("gate_lower_bound") is None else "bounded",
        kda_decay_lower_bound=linear.get("gate_lower_bound") or -5.0,
        kda_output_gate="full_rank" if linear.get("use_full_rank_gate") else "low_rank",
        mla_num_heads=text["num_attention_heads"],
        q_lora_rank=text["q_lora_rank"],
        kv_lora_rank=text["kv_lora_rank"],
        qk_nope_head_dim=text["qk_nope_head_dim"],
        qk_rope_head_dim=text["qk_rope_head_dim"],
        v_head_dim=text["v_head_dim"],
        mla_output_gate="full_rank" if text.get("mla_use_output_gate") else "none",
        attn_res="none" if text.get("attn_res_block_size") is None else "block",
        attn_res_block_size=text.get("attn_res_block_size") or 12,
        intermediate_size=text["intermediate_size"],
        first_k_dense=text["first_k_dense_replace"],
        activation="situ" if situ else "swiglu",
        situ_beta=text.get("activation_situ_beta", 4.0),
        situ_linear_beta=text.get("activation_situ_linear_beta", 25.0),
        num_experts=text["num_experts"],
        num_experts_per_token=text["num_experts_per_token"],
        num_shared_experts=text["num_shared_experts"],
        moe_intermediate_size=text["moe_intermediate_size"],
        moe_latent_size=latent,
        moe_routed_norm=bool(text.get("latent_moe_use_norm")),
        routed_scaling_factor=text["routed_scaling_factor"],
    )
    by_rule = dataclasses.replace(config, mla_layers=None)
    return by_rule if by_rule.global_layers == config.global_layers else config


def _from_transformers(text: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released file where transformers has written its own for a Kimi Linear model; else nothing."""
    if "layer_types" not in text or "linear_attn_config" in text:
        return {}
    layers = dict(enumerate(text["layer_types"], start=1))
    feed_forward = text.get("mlp_layer_types") or []
    dense = feed_forward.count("dense")
    if set(feed_forward[:dense]) - {"dense"}:
        raise UserError(f"config.json: mlp_layer_types = {feed_forward}: only dense layers before all others are read")
    return {
        "linear_attn_config": {
            "full_attn_layers": [i for i, kind in layers.items() if kind == "full_attention"],
            "kda_layers": [i for i, kind in layers.items() if kind != "full_attention"],
            "num_heads": text["linear_num_heads"],
            "head_dim": text["linear_head_dim"],
            "short_conv_kernel_size": text["linear_conv_kernel_dim"],
        },
        "first_k_dense_replace": dense,
    }


_TRANSFORMERS_KEYS = ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")


class _Section(dict):
    """A part of config.json; a key that is missing is one line that names it."""

    def __init__(self, values: dict[str, Any], name: str):
        super().__init__(values)
        self.name = name

    def __missing__(self, key: str) -> Any:
        raise UserError(f"config.json: no {self.name}{key}; is it the file of the released checkpoint?")


def layout_of(config: ModelConfig) -> Layout:
    """Kimi Linear's layout for a model without what Kimi K3 added, else Kimi K3's."""
    added = (
        config.attn_res != "none",
        config.kda_decay == "bounded",
        config.kda_output_gate == "full_rank",
        config.mla_output_gate == "full_rank",
        config.activation == "situ",
        config.moe_latent_size is not None,
        config.q_lora_rank is not None,
    )
    return "kimi_k3" if any(added) else "kimi_linear"


def hf_config(
    config: ModelConfig,
    *,
    layout: Layout,
    dtype: str,
    mxfp4: bool,
    base: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of a config.json that describes an architecture.

    Args:
        config: architecture.
        layout: whose file.
        dtype: of the tensors that need not be float32.
        mxfp4: whether the routed experts are packed.
        base: the content of a file of this layout, whose other keys are kept: vision_config, token ids.
    Returns:
        What `model_config` turns into the same architecture again.
    Raises:
        UserError: a setting that config.json has no word for, or one that base contradicts.
    Source: spec §1.1, §9.
    """
    values = copy.deepcopy(base) if base is not None else {}
    values |= {"model_type": layout, "architectures": values.get("architectures") or _ARCHITECTURES[layout]}
    values |= {"dtype": dtype, "tie_word_embeddings": False}
    values.pop("torch_dtype", None)
    text = values
    if layout == "kimi_k3":
        text = values.setdefault("text_config", {})
        text |= {"model_type": "kimi_linear", "architectures": _ARCHITECTURES["kimi_linear"]}
        text |= {"dtype": dtype, "tie_word_embeddings": False}
    _describe(config, text)
    if base is None:  # or a reader takes the released models' ids, which a small vocabulary does not have
        text |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    quantised = values if "quantization_config" in values else text
    if mxfp4:
        quantised.setdefault("quantization_config", copy.deepcopy(_QUANTISATION))
    else:
        quantised.pop("quantization_config", None)
    written = model_config(values)
    for field in dataclasses.fields(ModelConfig):
        given, found = (getattr(c, field.name) for c in (config, written))
        if field.name in ("kda_per_mla", "last_layer", "mla_layers"):
            given, found = config.global_layers, written.global_layers
        if field.name == "kda_num_value_heads":
            given, found = config.num_value_heads, written.num_value_heads
        if field.name not in NOT_STORED and given != found and not _unused(config, field.name):
            raise UserError(
                f"ModelConfig.{field.name} = {given!r} cannot be exported: config.json of {layout} means {found!r}"
            )
    return values


def stored_dtype(values: dict[str, Any]) -> str:
    """The dtype that a config.json gives its tensors, such as "bfloat16"."""
    text = values.get("text_config") or {}
    return next((x for v in (values, text) for x in (v.get("dtype"), v.get("torch_dtype")) if x), "bfloat16")


def is_mxfp4(values: dict[str, Any]) -> bool:
    """Whether a config.json says that the routed experts are packed.

    Raises:
        UserError: another quantisation.
    Source: spec §9; the format stands in a group, and the section at the top or in text_config.
    """
    text = values.get("text_config") or {}
    found = values.get("quantization_config") or text.get("quantization_config")
    if not found:
        return False
    groups = found.get("config_groups") or {}
    formats = {group.get("format") for group in groups.values()} - {None} or {found.get("format")}
    if found.get("quant_method") != "compressed-tensors" or formats != {MXFP4_FORMAT}:
        shown = ", ".join(sorted(map(str, formats)))
        raise UserError(f"config.json: quantization_config: {shown}: only compressed-tensors {MXFP4_FORMAT} is read")
    return True


def _unused(config: ModelConfig, field: str) -> bool:
    """Whether a setting has no say in this architecture."""
    return {
        "kda_decay_lower_bound": config.kda_decay != "bounded",
        "attn_res_block_size": config.attn_res != "block",
        "situ_beta": config.activation != "situ",
        "situ_linear_beta": config.activation != "situ",
        "moe_routed_norm": config.first_k_dense == config.num_layers,
    }.get(field, False)


def _describe(c: ModelConfig, text: dict[str, Any]) -> None:
    """Writes an architecture into the section of the text model; keys that say "none" are left out, as released."""
    for key in _TRANSFORMERS_KEYS:
        text.pop(key, None)
    layers = range(1, c.num_layers + 1)
    linear = text.setdefault("linear_attn_config", {})
    linear |= {
        "full_attn_layers": list(c.global_layers),
        "kda_layers": [i for i in layers if i not in c.global_layers],
        "num_heads": c.kda_num_heads,
        "head_dim": c.kda_key_dim,
        "short_conv_kernel_size": c.kda_conv_size,
    }
    _set(linear, "use_full_rank_gate", True if c.kda_output_gate == "full_rank" else None)
    _set(linear, "gate_lower_bound", c.kda_decay_lower_bound if c.kda_decay == "bounded" else None)
    text |= {
        "vocab_size": c.vocab_size,
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "initializer_range": c.init_std,
        "rms_norm_eps": c.rms_norm_eps,
        "num_attention_heads": c.mla_num_heads,
        "num_key_value_heads": c.mla_num_heads,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "mla_use_nope": True,
        "intermediate_size": c.intermediate_size,
        "first_k_dense_replace": c.first_k_dense,
        "moe_layer_freq": 1,
        "hidden_act": "situ" if c.activation == "situ" else "silu",
        "num_experts": c.num_experts,
        "num_experts_per_token": c.num_experts_per_token,
        "num_shared_experts": c.num_shared_experts,
        "moe_intermediate_size": c.moe_intermediate_size,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": c.routed_scaling_factor,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    text.setdefault("head_dim", c.qk_nope_head_dim + c.qk_rope_head_dim)  # no layer reads it
    _set(text, "mla_use_output_gate", True if c.mla_output_gate == "full_rank" else None)
    _set(text, "attn_res_block_size", c.attn_res_block_size if c.attn_res == "block" else None)
    _set(text, "activation_situ_beta", c.situ_beta if c.activation == "situ" else None)
    _set(text, "activation_situ_linear_beta", c.situ_linear_beta if c.activation == "situ" else None)
    _set(text, "routed_expert_hidden_size", c.moe_latent_size)
    _set(text, "latent_moe_use_norm", True if c.moe_routed_norm else None)


def _set(section: dict[str, Any], key: str, value: Any) -> None:
    """Sets a key, or removes it where there is nothing to say."""
    section.pop(key, None)
    if value is not None:
        section[key] = value


_ARCHITECTURES = {"kimi_k3": ["KimiK3ForConditionalGeneration"], "kimi_linear": ["KimiLinearForCausalLM"]}
_QUANTISATION = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": MXFP4_FORMAT,
    "config_groups": {
        "group_0": {
            "format": MXFP4_FORMAT,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}
