"""The Kimi Delta Attention mixer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.nn.initial import parameter
from k3jax.nn.linear import project, record
from k3jax.ops.decay import bounded_decay, softplus_decay
from k3jax.ops.delta_attention import kda
from k3jax.ops.norms import rms_norm
from k3jax.ops.precision import upcast
from k3jax.ops.short_conv import short_conv

L2_NORM_EPS = 1e-6  # under the root of the sum of squares (spec §2.1)


class KDA(nn.Module):
    """x_BTD -> y_BTD through a gated delta-rule state (spec §2.1).

    Attributes:
        config: architecture.
        dtype: of products; decay, beta, state and norms' statistics are float32 or wider.
    """

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
        c = self.config
        D, H, J, K, V = c.hidden_size, c.kda_num_heads, c.num_value_heads, c.kda_key_dim, c.kda_value_dim

        def mixed(name: str, heads: int, channels: int) -> jax.Array:
            y = project("BTD,DHK->BTHK", x_BTD, parameter(self, f"{name}_proj", (D, heads, channels)), self.dtype)
            taps = parameter(self, f"{name}_conv", (heads, channels, c.kda_conv_size))
            return nn.silu(upcast(short_conv(y, taps, segment_ids_BT))).astype(self.dtype)

        q_BTHK, k_BTHK, v_BTJV = mixed("q", H, K), mixed("k", H, K), mixed("v", J, V)

        decay_BTR = project("BTD,DR->BTR", x_BTD, parameter(self, "decay_down", (D, K)), self.dtype)
        z_BTJK = project("BTR,RJK->BTJK", decay_BTR, parameter(self, "decay_up", (K, J, K)), self.dtype)
        z_BTJK = upcast(z_BTJK) + parameter(self, "dt_bias", (J, K))
        a_log_J = parameter(self, "a_log", (J,))
        # Norm and bounded gate are the mixer's to do: its TPU kernels do them without a round trip through memory.
        fused = {"norm_eps": L2_NORM_EPS}
        if c.kda_decay == "bounded":
            gate_BTJK = z_BTJK
            fused |= {"lower_bound": c.kda_decay_lower_bound, "a_log_J": a_log_J}
            record(self, "log_decay", bounded_decay(z_BTJK, a_log_J, c.kda_decay_lower_bound))
        else:
            gate_BTJK = softplus_decay(z_BTJK, a_log_J)
            record(self, "log_decay", gate_BTJK)

        beta_BTJ = nn.sigmoid(upcast(project("BTD,DJ->BTJ", x_BTD, parameter(self, "beta_proj", (D, J)), self.dtype)))
        if c.kda_allow_neg_eigval:
            beta_BTJ = 2 * beta_BTJ

        o_BTJV, _ = kda(
            q_BTHK, k_BTHK, v_BTJV, gate_BTJK, beta_BTJ,
            segment_ids_BT=segment_ids_BT, implementation=c.kda_implementation, **fused,
        )  # fmt: skip

        if c.kda_output_gate == "full_rank":
            gate_BTJV = project("BTD,DJV->BTJV", x_BTD, parameter(self, "gate_proj", (D, J, V)), self.dtype)
        else:
            gate_BTR = project("BTD,DR->BTR", x_BTD, parameter(self, "gate_down", (D, V)), self.dtype)
            gate_BTJV = project("BTR,RJV->BTJV", gate_BTR, parameter(self, "gate_up", (V, J, V)), self.dtype)
        normed_BTJV = rms_norm(o_BTJV, parameter(self, "o_norm", (V,)), c.rms_norm_eps)
        gated_BTJV = upcast(normed_BTJV) * nn.sigmoid(upcast(gate_BTJV))
        return project("BTJV,JVD->BTD", gated_BTJV, parameter(self, "o_proj", (J, V, D)), self.dtype)
