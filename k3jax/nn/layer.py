"""One decoder layer: a token mixer and a channel mixer, each reading a mix of depth."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.nn.attention_residual import depth_mix
from k3jax.nn.initial import parameter
from k3jax.nn.kda import KDA
from k3jax.nn.layer_kind import LayerKind
from k3jax.nn.linear import record
from k3jax.nn.mla import MLA
from k3jax.nn.mlp import MLP
from k3jax.nn.moe import LatentMoE
from k3jax.ops.norms import rms_norm


class LayerOutput(NamedTuple):
    """Attributes:
    mixed_BTD: the mixer's output, with the running sum added where there is one.
    ffn_BTD: the channel mixer's output, added to nothing.
    """

    mixed_BTD: jax.Array
    ffn_BTD: jax.Array


class DecoderLayer(nn.Module):
    """Mixer and feed-forward of one layer (spec §4.2).

    Attributes:
        config: architecture.
        kind: which mixer and which feed-forward.
        dtype: of products and activations.
    """

    config: ModelConfig
    kind: LayerKind
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        memory_BTRD: jax.Array | None,
        partial_BTD: jax.Array | None,
        mask_R: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> LayerOutput:
        """Runs both sublayers.

        Args:
            memory_BTRD: finished depth sources, oldest first; None = an ordinary residual stream.
            partial_BTD: the running sum; None at the start of a block, never None without memory.
            mask_R: which sources the mixer reads, the running sum included if there is one; None = all.
            segment_ids_BT: documents; 0 = padding.
        Returns:
            LayerOutput in the sources' dtype.
        """
        c = self.config
        D, eps = c.hidden_size, c.rms_norm_eps

        h_BTD = partial_BTD
        if memory_BTRD is not None:
            h_BTD = depth_mix(self, "mixer_res", memory_BTRD, partial_BTD, mask_R, eps)
        h_BTD = rms_norm(h_BTD, parameter(self, "mixer_norm", (D,)), eps)
        mixer = (KDA if self.kind.mixer == "kda" else MLA)(c, self.dtype, name=self.kind.mixer)
        mixer_out_BTD = mixer(h_BTD, segment_ids_BT)
        record(self, "mixer_out", mixer_out_BTD)
        record(self, "mixer_finite", jnp.all(jnp.isfinite(mixer_out_BTD)))
        mixed_BTD = mixer_out_BTD if partial_BTD is None else partial_BTD + mixer_out_BTD

        h_BTD = mixed_BTD
        if memory_BTRD is not None:
            if mask_R is not None:  # the running sum counts from here on
                R = memory_BTRD.shape[2]
                mask_R = jnp.append(mask_R[:R], True)
            h_BTD = depth_mix(self, "ffn_res", memory_BTRD, mixed_BTD, mask_R, eps)
        h_BTD = rms_norm(h_BTD, parameter(self, "ffn_norm", (D,)), eps)
        if self.kind.ffn == "dense":
            ffn_BTD = MLP(c, c.intermediate_size, self.dtype, name="mlp")(h_BTD)
        else:
            ffn_BTD = LatentMoE(c, self.dtype, name="moe")(h_BTD, segment_ids_BT)
        record(self, "ffn_out", ffn_BTD)
        record(self, "ffn_finite", jnp.all(jnp.isfinite(ffn_BTD)))
        record(self, "layer_out", mixed_BTD + ffn_BTD)
        return LayerOutput(mixed_BTD, ffn_BTD)
