"""The released checkpoint layout of Kimi Linear and Kimi K3: config.json and tensor names against our tree."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from k3jax.config import ModelConfig
from k3jax.errors import UserError
from k3jax.models.plan import Slot, layer_kinds, layer_slots

K3_PREFIX = "language_model."


class HFTensor(NamedTuple):
    """One tensor of a released checkpoint and its place in our tree.

    Attributes:
        name: in the safetensors files.
        path: collection and keys of our leaf.
        slot: which layer of a stacked leaf; None where the leaf is not stacked.
        expert: which expert of a leaf with an expert axis; None where there is none.
        shape: of our leaf's part, input axis first (k3jax.nn.parameters).
        form: how the two relate; see `to_ours`.
    """

    name: str
    path: tuple[str, ...]
    slot: Slot | None
    expert: int | None
    shape: tuple[int, ...]
    form: str


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


class _Section(dict):
    """A part of config.json; a key that is missing is one line that names it."""

    def __init__(self, values: dict[str, Any], name: str):
        super().__init__(values)
        self.name = name

    def __missing__(self, key: str) -> Any:
        raise UserError(f"config.json: no {self.name}{key}; is it the file of the released checkpoint?")


def hf_tensors(config: ModelConfig, prefix: str) -> list[HFTensor]:
    """Every tensor of a released checkpoint of this architecture, routed experts unquantised.

    Args:
        config: architecture.
        prefix: "language_model." for Kimi K3, "" for Kimi Linear.
    Returns:
        The tensors in layer order.
    Source: spec §10.
    """
    c = config
    D, W = c.hidden_size, c.vocab_size
    res = c.attn_res != "none"
    tensors = [
        HFTensor(f"{prefix}model.embed_tokens.weight", ("params", "embed"), None, None, (W, D), "same"),
        HFTensor(f"{prefix}lm_head.weight", ("params", "head"), None, None, (D, W), "transposed"),
        HFTensor(f"{prefix}model.norm.weight", ("params", "final_norm"), None, None, (D,), "same"),
    ]
    if res:
        for ours, theirs in (("output_res_gain", "output_attn_res_norm"), ("output_res_query", "output_attn_res_proj")):
            tensors.append(HFTensor(f"{prefix}model.{theirs}.weight", ("params", ours), None, None, (D,), "same"))
    for index, (kind, slot) in enumerate(zip(layer_kinds(c), layer_slots(c), strict=True)):
        layer = f"{prefix}model.layers.{index}."
        names = _norms(c, res) + (_kda(c) if kind.mixer == "kda" else _mla(c))
        names += _mlp("mlp", ("mlp",), c.intermediate_size, D) if kind.ffn == "dense" else _moe(c)
        for theirs, keys, shape, form in names:
            collection = "router" if keys[-1] == "bias" else "params"
            path = (collection, slot.stage, slot.run, slot.layer, *keys)
            tensors.append(HFTensor(layer + theirs, path, slot, None, shape, form))
        if kind.ffn == "moe":
            F, L = c.moe_intermediate_size, c.moe_latent_size or D
            for expert in range(c.num_experts):
                for theirs, ours, shape in (
                    ("w1", "expert_gate", (L, F)),
                    ("w3", "expert_up", (L, F)),
                    ("w2", "expert_down", (F, L)),
                ):
                    path = ("params", slot.stage, slot.run, slot.layer, "moe", ours)
                    name = f"{layer}block_sparse_moe.experts.{expert}.{theirs}.weight"
                    tensors.append(HFTensor(name, path, slot, expert, shape, "transposed"))
    return tensors


Names = list[tuple[str, tuple[str, ...], tuple[int, ...], str]]  # released name, our keys, our shape, form


def _norms(c: ModelConfig, res: bool) -> Names:
    D = (c.hidden_size,)
    names: Names = [
        ("input_layernorm.weight", ("mixer_norm",), D, "same"),
        ("post_attention_layernorm.weight", ("ffn_norm",), D, "same"),
    ]
    if res:
        names += [
            ("self_attention_res_norm.weight", ("mixer_res_gain",), D, "same"),
            ("self_attention_res_proj.weight", ("mixer_res_query",), D, "same"),
            ("mlp_res_norm.weight", ("ffn_res_gain",), D, "same"),
            ("mlp_res_proj.weight", ("ffn_res_query",), D, "same"),
        ]
    return names


def _kda(c: ModelConfig) -> Names:
    D, H, J, K, V = c.hidden_size, c.kda_num_heads, c.num_value_heads, c.kda_key_dim, c.kda_value_dim
    names: Names = []
    for x, heads, channels in (("q", H, K), ("k", H, K), ("v", J, V)):
        names.append((f"{x}_proj.weight", (f"{x}_proj",), (D, heads, channels), "transposed"))
        names.append((f"{x}_conv1d.weight", (f"{x}_conv",), (heads, channels, c.kda_conv_size), "same"))
    names += [
        ("f_a_proj.weight", ("decay_down",), (D, K), "transposed"),
        ("f_b_proj.weight", ("decay_up",), (K, J, K), "transposed"),
        ("dt_bias", ("dt_bias",), (J, K), "same"),
        ("A_log", ("a_log",), (J,), "zero_padded"),
        ("b_proj.weight", ("beta_proj",), (D, J), "transposed"),
        ("o_norm.weight", ("o_norm",), (V,), "same"),
        ("o_proj.weight", ("o_proj",), (J, V, D), "transposed"),
    ]
    if c.kda_output_gate == "full_rank":
        names.append(("g_proj.weight", ("gate_proj",), (D, J, V), "transposed"))
    else:
        names.append(("g_a_proj.weight", ("gate_down",), (D, V), "transposed"))
        names.append(("g_b_proj.weight", ("gate_up",), (V, J, V), "transposed"))
    return [(f"self_attn.{theirs}", ("kda", *keys), shape, form) for theirs, keys, shape, form in names]


def _mla(c: ModelConfig) -> Names:
    D, H, L, P = c.hidden_size, c.mla_num_heads, c.kv_lora_rank, c.qk_rope_head_dim
    K, V, R = c.qk_nope_head_dim, c.v_head_dim, c.q_lora_rank
    if R is None:
        names: Names = [("q_proj.weight", ("q_proj",), (D, H, K + P), "transposed")]
    else:
        names = [
            ("q_a_proj.weight", ("q_down",), (D, R), "transposed"),
            ("q_a_layernorm.weight", ("q_norm",), (R,), "same"),
            ("q_b_proj.weight", ("q_up",), (R, H, K + P), "transposed"),
        ]
    names += [
        ("kv_a_proj_with_mqa.weight", ("kv_down",), (D, L + P), "transposed"),
        ("kv_a_layernorm.weight", ("kv_norm",), (L,), "same"),
        ("kv_b_proj.weight", ("kv_up",), (L, H, K + V), "transposed"),
        ("o_proj.weight", ("o_proj",), (H, V, D), "transposed"),
    ]
    if c.mla_output_gate == "full_rank":
        names.append(("g_proj.weight", ("gate_proj",), (D, H, V), "transposed"))
    return [(f"self_attn.{theirs}", ("mla", *keys), shape, form) for theirs, keys, shape, form in names]


def _mlp(theirs: str, ours: tuple[str, ...], F: int, D: int) -> Names:
    return [
        (f"{theirs}.gate_proj.weight", (*ours, "gate"), (D, F), "transposed"),
        (f"{theirs}.up_proj.weight", (*ours, "up"), (D, F), "transposed"),
        (f"{theirs}.down_proj.weight", (*ours, "down"), (F, D), "transposed"),
    ]


def _moe(c: ModelConfig) -> Names:
    D, E, L = c.hidden_size, c.num_experts, c.moe_latent_size or c.hidden_size
    names: Names = [
        ("gate.weight", ("moe", "router"), (D, E), "transposed"),
        ("gate.e_score_correction_bias", ("moe", "bias"), (E,), "same"),
    ]
    if c.moe_latent_size is not None:
        names += [
            ("routed_expert_down_proj.weight", ("moe", "latent_down"), (D, L), "transposed"),
            ("routed_expert_up_proj.weight", ("moe", "latent_up"), (L, D), "transposed"),
        ]
    if c.moe_routed_norm:
        names.append(("routed_expert_norm.weight", ("moe", "routed_norm"), (L,), "same"))
    if c.num_shared_experts > 0:
        names += _mlp("shared_experts", ("moe", "shared"), c.num_shared_experts * c.moe_intermediate_size, D)
    return [(f"block_sparse_moe.{theirs}", keys, shape, form) for theirs, keys, shape, form in names]


def to_ours(tensor: HFTensor, stored: np.ndarray) -> np.ndarray:
    """A released tensor as the part of our leaf it stands for.

    "same": equal but for merged axes; "transposed": [out, in], heads merged into out (or into in, for outputs);
    "zero_padded": one value a head, then zeros up to a multiple of 128.

    Args:
        tensor: what it is.
        stored: the released array.
    Returns:
        An array of tensor.shape and stored's dtype.
    Raises:
        UserError: the size is not what the configuration says, or padding is not zero.
    """
    size = int(np.prod(tensor.shape))
    flat = stored.reshape(-1)
    if tensor.form == "zero_padded":
        if flat.size < size or np.any(flat[size:] != 0):
            raise UserError(f"{tensor.name}: expected {size} values, then zeros; got shape {list(stored.shape)}")
        return flat[:size].reshape(tensor.shape)
    if flat.size != size:
        raise UserError(f"{tensor.name}: shape {list(stored.shape)} does not fit {list(tensor.shape)} of the model")
    if tensor.form == "transposed":
        return stored.T.reshape(tensor.shape)
    return stored.reshape(tensor.shape)
