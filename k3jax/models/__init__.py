"""Models of the Kimi K3 family."""

from k3jax.models.kimi_k3 import KimiK3, init_variables

__all__ = ["KimiK3", "init_variables"]
