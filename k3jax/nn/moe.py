"""Stable LatentMoE: routed experts in a latent, shared experts at full width."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.nn.initial import parameter
from k3jax.nn.linear import project, record
from k3jax.nn.mlp import MLP, activation
from k3jax.ops import balancing, quantile_balancing
from k3jax.ops.expert_mlp import expert_mlp
from k3jax.ops.norms import rms_norm
from k3jax.ops.router import Routing, route


class LatentMoE(nn.Module):
    """x_BTD -> y_BTD through num_experts_per_token of num_experts experts, and the shared ones (spec §5.1).

    The router bias is state, not a parameter: variable "bias" of collection "router". With
    mutable=["router_stats"] the call also returns what the balancing rule needs to know of these tokens; padding is
    left out of it. A variable "ids_TS" of collection "forced_routing" says which experts to visit.

    Attributes:
        config: architecture.
        dtype: of products; everything in routing is float32 or wider.
    """

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        c = self.config
        B, T, D = x_BTD.shape
        E, F, L = c.num_experts, c.moe_intermediate_size, c.moe_latent_size or c.hidden_size
        bias_E = self.variable("router", "bias", jnp.zeros, (E,), jnp.float32).value

        routing = route(
            x_BTD.reshape(B * T, D), parameter(self, "router", (D, E)), bias_E, c.num_experts_per_token,
            routed_scaling_factor=c.routed_scaling_factor, forced_ids_TS=self.get_variable("forced_routing", "ids_TS"),
        )  # fmt: skip
        self._observe(routing, bias_E, segment_ids_BT)

        z_BTL = x_BTD
        if c.moe_latent_size is not None:
            z_BTL = project("BTD,DL->BTL", x_BTD, parameter(self, "latent_down", (D, L)), self.dtype)
        u_TL = expert_mlp(
            z_BTL.reshape(B * T, L),
            routing.ids_TS,
            routing.weights_TS,
            parameter(self, "expert_gate", (E, L, F)).astype(self.dtype),
            parameter(self, "expert_up", (E, L, F)).astype(self.dtype),
            parameter(self, "expert_down", (E, F, L)).astype(self.dtype),
            functools.partial(activation, c),
        )
        y_BTD = u_TL.reshape(B, T, L)
        if c.moe_routed_norm:
            y_BTD = rms_norm(y_BTD, parameter(self, "routed_norm", (L,)), c.rms_norm_eps)
        if c.moe_latent_size is not None:
            y_BTD = project("BTL,LD->BTD", y_BTD, parameter(self, "latent_up", (L, D)), self.dtype)
        if c.num_shared_experts > 0:
            y_BTD = y_BTD + MLP(c, c.num_shared_experts * F, self.dtype, name="shared")(x_BTD)
        record(self, "routing", routing._asdict())
        return y_BTD

    def _observe(self, routing: Routing, bias_E: jax.Array, segment_ids_BT: jax.Array | None) -> None:
        if self.is_initializing() or not self.is_mutable_collection("router_stats"):
            return
        c = self.config
        mask_T = None if segment_ids_BT is None else segment_ids_BT.reshape(-1) != 0
        scores_TE = jax.lax.stop_gradient(routing.scores_TE)
        stats = {"load": balancing.expert_load(routing.ids_TS, c.num_experts, mask_T)}
        if c.balancing == "quantile":
            stats["histogram"] = quantile_balancing.histogram(
                scores_TE, bias_E, c.num_experts_per_token, c.balancing_bins, mask_T
            )
        elif c.balancing == "quantile_exact":
            stats["scores"] = scores_TE
            stats["mask"] = jnp.ones(scores_TE.shape[:1], bool) if mask_T is None else mask_T
        elif c.balancing == "aux_loss":
            stats["aux_loss"] = balancing.auxiliary_loss(routing.scores_TE, routing.ids_TS, mask_T)
        for name, value in stats.items():
            self.put_variable("router_stats", name, value)
