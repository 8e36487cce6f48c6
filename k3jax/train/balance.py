"""The router bias between steps: what the balancing rule makes of a step's statistics, layer by layer."""

from collections.abc import Callable
from typing import Any

import jax

from k3jax.config import ModelConfig
from k3jax.models.plan import layer_slots
from k3jax.ops.balancing import sign_bias
from k3jax.ops.quantile_balancing import bias_from_histogram, exact_bias

Tree = dict[str, Any]


def update_bias(config: ModelConfig, router: Tree, stats: Tree) -> Tree:
    """The router biases of the next step.

    Quantile Balancing replaces the bias, the sign rule moves it; with an auxiliary loss or without balancing it
    stays as it is.

    Args:
        config: balancing says which rule.
        router: the biases this step was routed with; leaves "bias", float32 [block, repeat, E].
        stats: of the whole step (all micro-batches and devices), in the same places: integer "load"
            [block, repeat, E], and what the rule needs: integer "histogram" [block, repeat, E, X], or "scores"
            [block, repeat, tokens, E] with "mask" [block, repeat, tokens].
    Returns:
        A tree like `router`.
    Source: spec §6.2-§6.4.
    """
    k = config.num_experts_per_token
    rules: dict[str, Callable] = {
        "quantile": lambda bias_E, s: bias_from_histogram(s["histogram"], bias_E, k),
        "quantile_exact": lambda bias_E, s: exact_bias(s["scores"], bias_E, k, s["mask"]),
        "sign": lambda bias_E, s: sign_bias(s["load"], bias_E, config.balancing_sign_rate),
    }
    if config.balancing not in rules:
        return router
    rule = jax.vmap(jax.vmap(rules[config.balancing]))

    def update(router: Tree, stats: Tree) -> Tree:
        if "bias" in router:
            return {"bias": rule(router["bias"], stats)}
        return {name: update(below, stats[name]) for name, below in router.items()}

    return update(router, stats)


def layer_values(config: ModelConfig, tree: Tree, *path: str) -> dict[int, jax.Array]:
    """One value a layer out of a stacked tree, such as the load: `layer_values(c, metrics["load"], "moe", "load")`.

    Args:
        config: architecture.
        tree: laid out as [stage][run][layer], leaves [block, repeat, ...].
        path: keys below the layer.
    Returns:
        {layer, counted from 1: its part of the leaf}, in order, without the layers that have no such leaf.
    """
    values = {}
    for number, slot in enumerate(layer_slots(config), start=1):
        leaf = tree.get(slot.stage, {}).get(slot.run, {}).get(slot.layer, {})
        for key in path:
            leaf = leaf.get(key, {})
        if not isinstance(leaf, dict):
            values[number] = leaf[slot.block, slot.repeat]
    return values
