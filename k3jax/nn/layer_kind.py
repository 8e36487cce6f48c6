"""What a layer is made of. No jax import here, so that tools that only count and place layers start at once."""

from typing import Literal, NamedTuple


class LayerKind(NamedTuple):
    """What a layer is made of; equal kinds have equal parameter trees."""

    mixer: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]
