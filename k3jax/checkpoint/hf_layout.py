"""The released checkpoint layout of Kimi Linear and Kimi K3: tensor names, shapes and dtypes against our tree."""

import math
from typing import NamedTuple

import numpy as np

from k3jax.config import ModelConfig
from k3jax.errors import UserError
from k3jax.models.plan import Slot, layer_kinds, layer_slots, plan_layers

K3_PREFIX = "language_model."
# In Kimi K3 files, beside the text model; carried as they are.
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
PACKED, SCALE = "_packed", "_scale"  # what a routed expert's name ends in instead, in mxfp4-pack-quantized
# Our leaves that stay float32 or wider whatever dtype they are loaded in (spec §1.4).
WIDE = ("a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "bias")
A_LOG_MULTIPLE = 128  # Kimi K3 pads A_log with zeros to a multiple of it


class HFTensor(NamedTuple):
    """One tensor of a released checkpoint and its place in our tree.

    Attributes:
        name: in the safetensors files.
        path: collection and keys of our leaf.
        slot: which layer of a stacked leaf; None where the leaf is not stacked.
        expert: which expert of a leaf with an expert axis; None where there is none.
        shape: of our leaf's part, input axes first (k3jax.nn.parameters).
        inputs: how many of shape's axes are input axes; stored they come last. 0: stored in our order.
        stored: the released shape; larger than shape where zeros are appended.
        wide: whether it is float32 or wider in a checkpoint of this layout (spec §1.4).
    """

    name: str
    path: tuple[str, ...]
    slot: Slot | None
    expert: int | None
    shape: tuple[int, ...]
    inputs: int
    stored: tuple[int, ...]
    wide: bool

    @property
    def index(self) -> tuple[int, ...]:
        """Where its part lies in the leaf: the leading axes."""
        if self.slot is None:
            return ()
        at = (self.slot.block, self.slot.repeat)
        return at if self.expert is None else (*at, self.expert)


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
    k3 = prefix == K3_PREFIX

    def tensor(theirs, path, slot, expert, shape, inputs) -> HFTensor:
        stored, wide = _stored_shape(theirs, shape, inputs, k3), _is_wide(path[-1], k3)
        return HFTensor(theirs, path, slot, expert, shape, inputs, stored, wide)

    tensors = [
        tensor(f"{prefix}model.embed_tokens.weight", ("params", "embed"), None, None, (W, D), 0),
        tensor(f"{prefix}lm_head.weight", ("params", "head"), None, None, (D, W), 1),
        tensor(f"{prefix}model.norm.weight", ("params", "final_norm"), None, None, (D,), 0),
    ]
    if res:
        for ours, theirs in (("output_res_gain", "output_attn_res_norm"), ("output_res_query", "output_attn_res_proj")):
            tensors.append(tensor(f"{prefix}model.{theirs}.weight", ("params", ours), None, None, (D,), 0))
    for index, (kind, slot) in enumerate(zip(layer_kinds(c), layer_slots(c), strict=True)):
        layer = f"{prefix}model.layers.{index}."
        names = _norms(c, res) + (_kda(c) if kind.mixer == "kda" else _mla(c))
        names += _mlp("mlp", ("mlp",), c.intermediate_size, D) if kind.ffn == "dense" else _moe(c)
        for theirs, keys, shape, inputs in names:
            collection = "router" if keys[-1] == "bias" else "params"
            path = (collection, slot.stage, slot.run, slot.layer, *keys)
            tensors.append(tensor(layer + theirs, path, slot, None, shape, inputs))
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
                    tensors.append(tensor(name, path, slot, expert, shape, 1))
    return tensors


def leaf_shapes(config: ModelConfig, tensors: list[HFTensor]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The shapes of our leaves, which stack layers and experts.

    Args:
        config: architecture.
        tensors: of that architecture, from `hf_tensors`.
    Returns:
        {path: shape}, in the order of the tensors.
    """
    stages = plan_layers(config)
    shapes = {}
    for tensor in tensors:
        lead: tuple[int, ...] = ()
        if tensor.slot is not None:
            stage = stages[int(tensor.slot.stage.removeprefix("stage_"))]
            lead = stage.repeats, stage.runs[int(tensor.slot.run.removeprefix("run_"))].repeats
        lead += () if tensor.expert is None else (config.num_experts,)
        shapes[tensor.path] = lead + tensor.shape
    return shapes


def _stored_shape(name: str, shape: tuple[int, ...], inputs: int, k3: bool) -> tuple[int, ...]:
    if inputs:
        return math.prod(shape[inputs:]), math.prod(shape[:inputs])
    if name.endswith("A_log"):
        return (-(-shape[0] // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,) if k3 else (1, 1, shape[0], 1)
    if name.endswith("conv1d.weight"):
        return math.prod(shape[:-1]), 1, shape[-1]
    if name.endswith("res_proj.weight"):
        return 1, *shape
    return (math.prod(shape),) if name.endswith("dt_bias") else shape


def _is_wide(leaf: str, k3: bool) -> bool:
    """Kimi Linear stores convolutions and output norms in bfloat16."""
    return leaf in (WIDE if k3 else ("a_log", "dt_bias", "bias"))


Names = list[tuple[str, tuple[str, ...], tuple[int, ...], int]]  # released name, our keys, our shape, its input axes


def _norms(c: ModelConfig, res: bool) -> Names:
    D = (c.hidden_size,)
    names: Names = [
        ("input_layernorm.weight", ("mixer_norm",), D, 0),
        ("post_attention_layernorm.weight", ("ffn_norm",), D, 0),
    ]
    if res:
        names += [
            ("self_attention_res_norm.weight", ("mixer_res_gain",), D, 0),
            ("self_attention_res_proj.weight", ("mixer_res_query",), D, 0),
            ("mlp_res_norm.weight", ("ffn_res_gain",), D, 0),
            ("mlp_res_proj.weight", ("ffn_res_query",), D, 0),
        ]
    return names


def _kda(c: ModelConfig) -> Names:
    D, H, J, K, V = c.hidden_size, c.kda_num_heads, c.num_value_heads, c.kda_key_dim, c.kda_value_dim
    names: Names = []
    for x, heads, channels in (("q", H, K), ("k", H, K), ("v", J, V)):
        names.append((f"{x}_proj.weight", (f"{x}_proj",), (D, heads, channels), 1))
        names.append((f"{x}_conv1d.weight", (f"{x}_conv",), (heads, channels, c.kda_conv_size), 0))
    names += [
        ("f_a_proj.weight", ("decay_down",), (D, K), 1),
        ("f_b_proj.weight", ("decay_up",), (K, J, K), 1),
        ("dt_bias", ("dt_bias",), (J, K), 0),
        ("A_log", ("a_log",), (J,), 0),
        ("b_proj.weight", ("beta_proj",), (D, J), 1),
        ("o_norm.weight", ("o_norm",), (V,), 0),
        ("o_proj.weight", ("o_proj",), (J, V, D), 2),
    ]
    if c.kda_output_gate == "full_rank":
        names.append(("g_proj.weight", ("gate_proj",), (D, J, V), 1))
    else:
        names.append(("g_a_proj.weight", ("gate_down",), (D, V), 1))
        names.append(("g_b_proj.weight", ("gate_up",), (V, J, V), 1))
    return [(f"self_attn.{theirs}", ("kda", *keys), shape, inputs) for theirs, keys, shape, inputs in names]


def _mla(c: ModelConfig) -> Names:
    D, H, L, P = c.hidden_size, c.mla_num_heads, c.kv_lora_rank, c.qk_rope_head_dim
    K, V, R = c.qk_nope_head_dim, c.v_head_dim, c.q_lora_rank
    if R is None:
        names: Names = [("q_proj.weight", ("q_proj",), (D, H, K + P), 1)]
    else:
        names = [
            ("q_a_proj.weight", ("q_down",), (D, R), 1),
            ("q_a_layernorm.weight", ("q_norm",), (R,), 0),
            ("q_b_proj.weight", ("q_up",), (R, H, K + P), 1),
        ]
    names += [
        ("kv_a_proj_with_mqa.weight", ("kv_down",), (D, L + P), 1),
        ("kv_a_layernorm.weight", ("kv_norm",), (L,), 0),
        ("kv_b_proj.weight", ("kv_up",), (L, H, K + V), 1),
        ("o_proj.weight", ("o_proj",), (H, V, D), 2),
    ]
    if c.mla_output_gate == "full_rank":
        names.append(("g_proj.weight", ("gate_proj",), (D, H, V), 1))
    return [(f"self_attn.{theirs}", ("mla", *keys), shape, inputs) for theirs, keys, shape, inputs in names]


def _mlp(theirs: str, ours: tuple[str, ...], F: int, D: int) -> Names:
    return [
        (f"{theirs}.gate_proj.weight", (*ours, "gate"), (D, F), 1),
        (f"{theirs}.up_proj.weight", (*ours, "up"), (D, F), 1),
        (f"{theirs}.down_proj.weight", (*ours, "down"), (F, D), 1),
    ]


def _moe(c: ModelConfig) -> Names:
    D, E, L = c.hidden_size, c.num_experts, c.moe_latent_size or c.hidden_size
    names: Names = [
        ("gate.weight", ("moe", "router"), (D, E), 1),
        ("gate.e_score_correction_bias", ("moe", "bias"), (E,), 0),
    ]
    if c.moe_latent_size is not None:
        names += [
            ("routed_expert_down_proj.weight", ("moe", "latent_down"), (D, L), 1),
            ("routed_expert_up_proj.weight", ("moe", "latent_up"), (L, D), 1),
        ]
    if c.moe_routed_norm:
        names.append(("routed_expert_norm.weight", ("moe", "routed_norm"), (L,), 0))
    if c.num_shared_experts > 0:
        names += _mlp("shared_experts", ("moe", "shared"), c.num_shared_experts * c.moe_intermediate_size, D)
    return [(f"block_sparse_moe.{theirs}", keys, shape, inputs) for theirs, keys, shape, inputs in names]


def to_ours(tensor: HFTensor, stored: np.ndarray) -> np.ndarray:
    """A released tensor as the part of our leaf it stands for.

    Args:
        tensor: what it is.
        stored: the released array.
    Returns:
        An array of tensor.shape and stored's dtype; a view where it can be one.
    Raises:
        UserError: the size is not what the configuration says, or what follows the values is not zero.
    """
    if tensor.inputs:
        if stored.size != math.prod(tensor.shape):
            raise UserError(f"{tensor.name}: shape {list(stored.shape)} does not fit {list(tensor.shape)} of the model")
        split = stored.reshape(tensor.shape[tensor.inputs :] + tensor.shape[: tensor.inputs])
        outputs = len(tensor.shape) - tensor.inputs
        return split.transpose([*range(outputs, split.ndim), *range(outputs)])
    size = math.prod(tensor.shape)
    flat = stored.reshape(-1)
    if flat.size < size or np.any(flat[size:] != 0):
        raise UserError(f"{tensor.name}: expected {size} values, then zeros; got shape {list(stored.shape)}")
    return flat[:size].reshape(tensor.shape)


def outputs_first(tensor: HFTensor, part: np.ndarray) -> np.ndarray:
    """A part of our leaf with its axes in stored order: a view, whose axes are yet to be merged.

    Args:
        tensor: what it is.
        part: an array of tensor.shape, or of another size along its first output axis.
    """
    return part.transpose([*range(tensor.inputs, part.ndim), *range(tensor.inputs)])
