"""How many parameters and FLOPs a model has, by component: arithmetic on a `ModelConfig`, no arrays.

Letters as in design: D width, H and J heads, K and V head channels, E experts, L latent width, F inner width.
"""

import dataclasses
from typing import NamedTuple

from k3jax.config import ModelConfig

KDA_CHUNK = 64  # C of the FLOP formula (spec §2.4), whatever chunk a kernel really uses


class Component(NamedTuple):
    """One row of the parameter table."""

    name: str
    per_layer: int  # parameters in each place
    active_per_layer: int  # of which one token uses
    layers: int  # places

    @property
    def total(self) -> int:
        return self.per_layer * self.layers

    @property
    def active(self) -> int:
        return self.active_per_layer * self.layers


@dataclasses.dataclass(frozen=True)
class ParameterTable:
    """Parameters by component. `active` is the published count: the head's, not the input embedding's."""

    components: tuple[Component, ...]

    @property
    def total(self) -> int:
        return sum(c.total for c in self.components)

    @property
    def active(self) -> int:
        return sum(c.active for c in self.components)

    @property
    def active_with_embedding(self) -> int:
        """Counting the whole input table too, of which a token reads one row."""
        return self.active + self["token embedding"].total

    @property
    def active_without_head(self) -> int:
        """Counting neither the input table nor the head."""
        return self.active - self["output head"].active

    def __getitem__(self, name: str) -> Component:
        return next(c for c in self.components if c.name == name)


def count_parameters(config: ModelConfig) -> ParameterTable:
    """Counts parameters, and those that one token uses.

    The router's bias, which is state and not trained, is counted with the router as published; the first
    layer's mixer AttnRes pair, which exists and is never read, with the vectors.

    Args:
        config: the architecture.
    Returns:
        Components in the order of the forward pass; one without a place in this model has 0 layers.
    Source: spec §1.3.
    """
    D, L = config.hidden_size, config.moe_latent_size or config.hidden_size
    num_mla, num_dense = len(config.global_layers), config.first_k_dense
    num_moe = config.num_layers - num_dense
    expert = 3 * L * config.moe_intermediate_size
    shared = 3 * D * config.moe_intermediate_size * config.num_shared_experts
    routing = (D + 1) * config.num_experts + _latent_projections(config) + L * config.moe_routed_norm
    vectors = 2 * D if config.attn_res == "none" else 6 * D
    last_vectors = D if config.attn_res == "none" else 3 * D

    def every_token(name: str, count: int, layers: int) -> Component:
        return Component(name, count, count, layers)

    return ParameterTable(
        (
            Component("token embedding", config.vocab_size * D, 0, 1),
            every_token("KDA mixers", _kda_matrices(config) + _kda_vectors(config), config.num_layers - num_mla),
            every_token("MLA mixers", _mla_matrices(config) + _mla_vectors(config), num_mla),
            every_token("dense FFN", 3 * D * config.intermediate_size, num_dense),
            Component("routed experts", config.num_experts * expert, config.num_experts_per_token * expert, num_moe),
            every_token("shared experts", shared, num_moe),
            every_token("router and latent", routing, num_moe),
            every_token("layer norms and AttnRes", vectors, config.num_layers),
            every_token("final norm and AttnRes", last_vectors, 1),
            every_token("output head", config.vocab_size * D, 1),
        )
    )


def flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Model FLOPs of a forward pass, by component, for each token of a row of `seq_len` tokens.

    A product with a matrix costs 2 FLOPs an element of it that the token uses. To these come, a layer,
        MLA attention: heads x seq_len x (nope + rope + value channels), the causal half of
            2 x seq_len x (query-key channels + value channels);
        KDA recurrence: J x (6 K V + 3 C (K + V) / 2 + C^2) with C = 64, which for K = V = dh is the published
            6 T dh^2 + 3 T C dh + T C^2 a head over T tokens.
    The embedding's lookup, convolutions, norms, gates and AttnRes mixes count zero, and so does whatever is
    computed twice (remat) or in vain (padding, masked halves).

    Args:
        config: the architecture.
        seq_len: T, tokens in a row.
    Returns:
        FLOPs a token by component. A training step is `TRAIN_FLOPS_FACTOR` times their sum.
    Source: spec §2.4.
    """
    D, L = config.hidden_size, config.moe_latent_size or config.hidden_size
    J, K, V, C = config.num_value_heads, config.kda_key_dim, config.kda_value_dim, KDA_CHUNK
    num_mla, num_dense = len(config.global_layers), config.first_k_dense
    num_kda, num_moe = config.num_layers - num_mla, config.num_layers - num_dense
    expert = 3 * L * config.moe_intermediate_size
    mla_channels = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return {
        "KDA projections": 2.0 * num_kda * _kda_matrices(config),
        "KDA recurrence": num_kda * J * (6.0 * K * V + 1.5 * C * (K + V) + C * C),
        "MLA projections": 2.0 * num_mla * _mla_matrices(config),
        "MLA attention": 1.0 * num_mla * config.mla_num_heads * seq_len * mla_channels,
        "dense FFN": 2.0 * num_dense * 3 * D * config.intermediate_size,
        "routed experts": 2.0 * num_moe * config.num_experts_per_token * expert,
        "shared experts": 2.0 * num_moe * 3 * D * config.moe_intermediate_size * config.num_shared_experts,
        "router and latent": 2.0 * num_moe * (D * config.num_experts + _latent_projections(config)),
        "output head": 2.0 * D * config.vocab_size,
    }


TRAIN_FLOPS_FACTOR = 3  # forward, and twice that backward


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of a training step for each of its tokens (see `flops_per_token`)."""
    return TRAIN_FLOPS_FACTOR * sum(flops_per_token(config, seq_len).values())


def _kda_matrices(config: ModelConfig) -> int:
    """Elements of the matrices a token is multiplied with in one KDA mixer."""
    D, H, J = config.hidden_size, config.kda_num_heads, config.num_value_heads
    K, V = config.kda_key_dim, config.kda_value_dim
    gate = D * J * V if config.kda_output_gate == "full_rank" else D * V + V * J * V
    decay = D * K + K * J * K
    return 2 * D * H * K + D * J * V + decay + D * J + gate + J * V * D


def _kda_vectors(config: ModelConfig) -> int:
    """Convolution taps, decay scales and biases, output norm."""
    H, J, K, V = config.kda_num_heads, config.num_value_heads, config.kda_key_dim, config.kda_value_dim
    taps = config.kda_conv_size * (2 * H * K + J * V)
    return taps + J + J * K + V


def _mla_matrices(config: ModelConfig) -> int:
    D, heads, L, V = config.hidden_size, config.mla_num_heads, config.kv_lora_rank, config.v_head_dim
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.q_lora_rank
    query_width = heads * (nope + rope)
    query = D * query_width if rank is None else D * rank + rank * query_width
    gate = D * heads * V if config.mla_output_gate == "full_rank" else 0
    return query + D * (L + rope) + L * heads * (nope + V) + gate + heads * V * D


def _mla_vectors(config: ModelConfig) -> int:
    return config.kv_lora_rank + (config.q_lora_rank or 0)


def _latent_projections(config: ModelConfig) -> int:
    return 2 * config.hidden_size * config.moe_latent_size if config.moe_latent_size else 0
