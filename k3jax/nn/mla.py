"""Gated multi-head latent attention without positions."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.nn.initial import parameter
from k3jax.nn.linear import project
from k3jax.ops.mla_attention import mla_attention
from k3jax.ops.norms import rms_norm
from k3jax.ops.precision import upcast


class MLA(nn.Module):
    """x_BTD -> y_BTD through softmax attention over a latent of kv_lora_rank (spec §3).

    P is the slot that one key shares among all heads; it is called "rope" in released names, and never rotated.

    Attributes:
        config: architecture.
        dtype: of products; softmax statistics and the attention output are float32 or wider.
    """

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        c = self.config
        D, H, L, P = c.hidden_size, c.mla_num_heads, c.kv_lora_rank, c.qk_rope_head_dim
        K, V = c.qk_nope_head_dim, c.v_head_dim

        if c.q_lora_rank is None:
            q_BTHK = project("BTD,DHK->BTHK", x_BTD, parameter(self, "q_proj", (D, H, K + P)), self.dtype)
        else:
            q_BTR = project("BTD,DR->BTR", x_BTD, parameter(self, "q_down", (D, c.q_lora_rank)), self.dtype)
            q_BTR = rms_norm(q_BTR, parameter(self, "q_norm", (c.q_lora_rank,)), c.mla_norm_eps)
            q_up_RHK = parameter(self, "q_up", (c.q_lora_rank, H, K + P))
            q_BTHK = project("BTR,RHK->BTHK", q_BTR, q_up_RHK, self.dtype)

        latent_BTL = project("BTD,DL->BTL", x_BTD, parameter(self, "kv_down", (D, L + P)), self.dtype)
        latent_BTL, k_rope_BTP = latent_BTL[..., :L], latent_BTL[..., L:]
        latent_BTL = rms_norm(latent_BTL, parameter(self, "kv_norm", (L,)), c.mla_norm_eps)
        kv_BTHK = project("BTL,LHK->BTHK", latent_BTL, parameter(self, "kv_up", (L, H, K + V)), self.dtype)

        o_BTHV = mla_attention(
            q_BTHK[..., :K], q_BTHK[..., K:], kv_BTHK[..., :K], k_rope_BTP, kv_BTHK[..., K:],
            scale=(K + P) ** -0.5, segment_ids_BT=segment_ids_BT,
        )  # fmt: skip
        if c.mla_output_gate == "full_rank":
            gate_BTHV = project("BTD,DHV->BTHV", x_BTD, parameter(self, "gate_proj", (D, H, V)), self.dtype)
            o_BTHV = o_BTHV * nn.sigmoid(upcast(gate_BTHV))
        return project("BTHV,HVD->BTD", o_BTHV, parameter(self, "o_proj", (H, V, D)), self.dtype)
