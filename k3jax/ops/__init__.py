"""Pure functions of arrays: the operations of the Kimi K3 family. Nothing here knows configurations or modules."""

from k3jax.ops import quantile_balancing
from k3jax.ops.decay import bounded_decay, softplus_decay
from k3jax.ops.delta_attention import KDAOutput, kda, kda_step
from k3jax.ops.depth_attention import AttentionResidual, attention_residual
from k3jax.ops.prefill import KDAPrefill, kda_prefill
from k3jax.ops.situ import situ_glu

__all__ = [
    "AttentionResidual",
    "KDAOutput",
    "KDAPrefill",
    "attention_residual",
    "bounded_decay",
    "kda",
    "kda_prefill",
    "kda_step",
    "quantile_balancing",
    "situ_glu",
    "softplus_decay",
]
