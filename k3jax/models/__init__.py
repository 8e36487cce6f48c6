"""Models of the Kimi K3 family. Loaded when asked for, so that parameter accounting needs no jax."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from k3jax.models.kimi_k3 import KimiK3, init_variables

__all__ = ["KimiK3", "init_variables"]


def __getattr__(name: str):
    if name in __all__:
        return getattr(importlib.import_module("k3jax.models.kimi_k3"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
