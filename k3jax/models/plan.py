"""How a stack of layers folds into scans: the fewest layers to trace, whatever the depth."""

import functools
from typing import NamedTuple

from k3jax.config import ModelConfig
from k3jax.nn.layer_kind import LayerKind


class Run(NamedTuple):
    """`repeats` times the layers `kinds`, one after the other; `first` counts within the block, from 0."""

    kinds: tuple[LayerKind, ...]
    repeats: int
    first: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds) * self.repeats


class Stage(NamedTuple):
    """`repeats` times the same block of runs; `first` is the model's layer it starts with, from 0.

    A block is what one Attention-Residual entry sums up; without block residuals the whole stack is one block.
    """

    runs: tuple[Run, ...]
    repeats: int
    first: int

    @property
    def block_layers(self) -> int:
        return sum(run.num_layers for run in self.runs)


class Slot(NamedTuple):
    """Where a layer's parameters lie: params[stage][run][layer], leading axes [block, repeat]."""

    stage: str
    run: str
    layer: str
    block: int
    repeat: int


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer, in order (spec §1.2)."""
    global_layers = set(config.global_layers)
    return tuple(
        LayerKind("mla" if i + 1 in global_layers else "kda", "dense" if i < config.first_k_dense else "moe")
        for i in range(config.num_layers)
    )


@functools.lru_cache
def plan_layers(config: ModelConfig) -> tuple[Stage, ...]:
    """Groups equal neighbouring blocks into stages, and equal neighbouring groups of layers into runs.

    Args:
        config: architecture.
    Returns:
        Stages in order; for Kimi K3 three of them: the first block, six equal ones, the last.
    """
    kinds = layer_kinds(config)
    size = config.attn_res_block_size if config.attn_res == "block" else len(kinds)
    blocks = [kinds[i : i + size] for i in range(0, len(kinds), size)]
    stages, first = [], 0
    while blocks:
        repeats = next((n for n, block in enumerate(blocks) if block != blocks[0]), len(blocks))
        stages.append(Stage(_runs(blocks[0]), repeats, first))
        first += repeats * len(blocks[0])
        blocks = blocks[repeats:]
    return tuple(stages)


def _runs(kinds: tuple[LayerKind, ...]) -> tuple[Run, ...]:
    """The split into runs that traces the fewest layers; among those, the fewest runs (dynamic programming)."""
    length = len(kinds)
    best: list = [(0, 0, ())] * (length + 1)  # from layer i on: traced layers, number of runs, runs
    for start in reversed(range(length)):
        options = []
        for period in range(1, length - start + 1):
            group, repeats = kinds[start : start + period], 1
            while True:
                traced, count, rest = best[start + period * repeats]
                options.append((traced + period, count + 1, (Run(group, repeats, start), *rest)))
                at = start + period * repeats
                if kinds[at : at + period] != group:
                    break
                repeats += 1
        best[start] = min(options, key=lambda option: option[:2])
    return best[0][2]


def layer_slots(config: ModelConfig) -> tuple[Slot, ...]:
    """Where each layer's parameters lie in the tree, in layer order."""
    slots = []
    for s, stage in enumerate(plan_layers(config)):
        for block in range(stage.repeats):
            for r, run in enumerate(stage.runs):
                for repeat in range(run.repeats):
                    for p in range(len(run.kinds)):
                        slots.append(Slot(f"stage_{s}", f"run_{r}", f"layer_{p}", block, repeat))
    return tuple(slots)
