"""The Kimi Delta Attention mixer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.nn.linear import conv_taps, dt_bias, log_uniform_a, project, record
from k3jax.ops.decay import bounded_decay, softplus_decay
from k3jax.ops.delta_attention import kda
from k3jax.ops.norms import l2_norm, rms_norm, upcast
from k3jax.ops.short_conv import short_conv


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
        normal = nn.initializers.normal(c.init_std)

        def mixed(name: str, heads: int, channels: int) -> jax.Array:
            y = project("BTD,DHK->BTHK", x_BTD, self.param(f"{name}_proj", normal, (D, heads, channels)), self.dtype)
            taps = self.param(f"{name}_conv", conv_taps, (heads, channels, c.kda_conv_size))
            return nn.silu(upcast(short_conv(y, taps, segment_ids_BT))).astype(self.dtype)

        q_BTHK, k_BTHK, v_BTJV = l2_norm(mixed("q", H, K)), l2_norm(mixed("k", H, K)), mixed("v", J, V)

        decay_BTR = project("BTD,DR->BTR", x_BTD, self.param("decay_down", normal, (D, K)), self.dtype)
        z_BTJK = project("BTR,RJK->BTJK", decay_BTR, self.param("decay_up", normal, (K, J, K)), self.dtype)
        z_BTJK = upcast(z_BTJK) + self.param("dt_bias", dt_bias, (J, K))
        if c.kda_decay == "bounded":
            a_log_J = self.param("a_log", nn.initializers.zeros, (J,))
            g_BTJK = bounded_decay(z_BTJK, a_log_J, c.kda_decay_lower_bound)
        else:
            g_BTJK = softplus_decay(z_BTJK, self.param("a_log", log_uniform_a, (J,)))
        record(self, "log_decay", g_BTJK)

        beta_BTJ = nn.sigmoid(
            upcast(project("BTD,DJ->BTJ", x_BTD, self.param("beta_proj", normal, (D, J)), self.dtype))
        )
        if c.kda_allow_neg_eigval:
            beta_BTJ = 2 * beta_BTJ

        o_BTJV, _ = kda(
            q_BTHK, k_BTHK, v_BTJV, g_BTJK, beta_BTJ,
            segment_ids_BT=segment_ids_BT, implementation=c.kda_implementation,
        )  # fmt: skip

        if c.kda_output_gate == "full_rank":
            gate_BTJV = project("BTD,DJV->BTJV", x_BTD, self.param("gate_proj", normal, (D, J, V)), self.dtype)
        else:
            gate_BTR = project("BTD,DR->BTR", x_BTD, self.param("gate_down", normal, (D, V)), self.dtype)
            gate_BTJV = project("BTR,RJV->BTJV", gate_BTR, self.param("gate_up", normal, (V, J, V)), self.dtype)
        normed_BTJV = rms_norm(o_BTJV, self.param("o_norm", nn.initializers.ones, (V,)), c.rms_norm_eps)
        gated_BTJV = upcast(normed_BTJV) * nn.sigmoid(upcast(gate_BTJV))
        return project("BTJV,JVD->BTD", gated_BTJV, self.param("o_proj", normal, (J, V, D)), self.dtype)
