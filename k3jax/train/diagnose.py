"""Where a step that was not finite went bad. Nothing here runs, or compiles, before that has happened."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from k3jax.config import Config
from k3jax.data import Batch
from k3jax.models import KimiK3
from k3jax.models.kimi_k3 import compute_dtype
from k3jax.models.plan import Slot, layer_kinds, layer_slots
from k3jax.train.mesh import DATA_AXIS, make_mesh, shard_batch
from k3jax.train.state import TrainState
from k3jax.train.step import measure, objective, on_rows, split_rows

Tree = dict[str, Any]
Counts = dict[tuple[str, ...], Any]  # path -> how many times bad, stack axes kept


def explain_nonfinite(config: Config, state: TrainState, batch: Batch) -> str:
    """Runs a skipped step again and names the place where it first went bad.

    Args:
        config: a whole run.
        state: after the skipped step, which left its parameters as they were. If finite steps have followed it, the
            parameters have moved, and what is named is what the batch does to the moved ones.
        batch: the step's batch, global arrays or one process's numpy rows.
    Returns:
        One line: the first output that is not finite, embedding to loss, and a parameter that holds NaN or infinity if
        one does; if all outputs are finite, the deepest layer (the last one: gradients flow from it) whose gradient is
        not.
    """
    sharding = state.step.sharding
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else make_mesh(config.mesh)
    if not isinstance(batch.tokens_BT, jax.Array):
        batch = shard_batch(batch, mesh)
    forward, backward, held = jax.device_get(_compiled(config, mesh)(state.params, state.router, batch))
    return describe(config, forward, backward, held)


def describe(config: Config, forward: Counts, backward: Counts, held: Counts) -> str:
    """Puts counts of non-finite places into words.

    Args:
        config: a whole run.
        forward: of outputs: ("embedding",), (stage, run, layer, "mixer_finite" or "ffn_finite"), ("final_norm",),
            ("loss",).
        backward: of gradients, by parameter.
        held: of variables, by collection and name.
    Returns:
        One line.
    """
    slots, kinds = layer_slots(config.model), layer_kinds(config.model)
    names = [f"layer {i} ({kind.mixer.upper()})" for i, kind in enumerate(kinds, start=1)]

    def within(counts: Counts, slot: Slot) -> list[str]:
        """The bad leaves of one layer, the feed-forward before the mixer, as the gradient meets them."""
        prefix = (slot.stage, slot.run, slot.layer)
        bad = [p[3:] for p, x in counts.items() if p[:3] == prefix and np.any(x[slot.block, slot.repeat])]
        return ["/".join(p) for p in sorted(bad, key=lambda p: (p[0] in ("kda", "mla") or p[0][:5] == "mixer", p))]

    def poisoned() -> str | None:
        for collection, noun in (("params", "parameter"), ("router", "router bias")):
            own = {p[1:]: x for p, x in held.items() if p[0] == collection}
            for i, slot in enumerate(slots):
                for leaf in within(own, slot)[:1]:
                    path = "/".join((slot.stage, slot.run, slot.layer, leaf))
                    return f"{noun} {path} of layer {i + 1} holds NaN or infinity"
            for path in (p for p, x in own.items() if len(p) == 1 and np.any(x)):
                return f"{noun} {path[0]} holds NaN or infinity"
        return None

    def bad_output() -> str | None:
        if forward["embedding",]:
            return "embedding: output is not finite"
        for name, slot in zip(names, slots, strict=True):
            for leaf, noun in (("mixer_finite", "mixer"), ("ffn_finite", "feed-forward")):
                if forward[slot.stage, slot.run, slot.layer, leaf][slot.block, slot.repeat]:
                    return f"{name}: output of the {noun} is not finite"
        for place, noun in (("final_norm", "final norm: output"), ("loss", "head: loss")):
            if forward[place,]:
                return f"{noun} is not finite"
        return None

    def bad_gradient() -> str | None:
        for path in (("head",), ("final_norm",), ("output_res_gain",), ("output_res_query",)):
            if np.any(backward.get(path, 0)):
                return f"gradient of {path[0]} is not finite"
        for name, slot in reversed(list(zip(names, slots, strict=True))):
            leaves = within(backward, slot)
            if leaves:
                more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
                return f"gradient of {name} is not finite: {leaves[0]}{more}"
        return "gradient of embed is not finite" if np.any(backward["embed",]) else None

    output, parameter = bad_output(), poisoned()
    if output is None:
        gradient = bad_gradient() or "gradients too, taken one micro-batch at a time: their sum or norm overflows"
        output = f"all outputs are finite; {gradient}"
    return output if parameter is None else f"{output}; {parameter}"


@functools.lru_cache(maxsize=1)
def _compiled(config: Config, mesh: jax.sharding.Mesh) -> Callable[[Tree, Tree, Batch], tuple[Counts, Counts, Counts]]:
    return jax.jit(on_rows(functools.partial(_look, config), mesh))


def _look(config: Config, params: Tree, router: Tree, batch: Batch) -> tuple[Counts, Counts, Counts]:
    """Counts, over micro-batches and devices, what `describe` wants to know; inside a map over the data axis."""
    scale = measure(batch)

    def one(rows: Batch) -> tuple[Counts, Counts]:
        grads, (tally, _) = jax.grad(functools.partial(objective, config, scale), has_aux=True)(params, router, rows)
        _, outputs = KimiK3(config.model).apply(
            {"params": params, "router": router}, rows.tokens_BT, rows.segment_ids_BT,
            output="hidden", mutable=["intermediates"],
        )  # fmt: skip
        recorded = flatten_dict(outputs["intermediates"])
        embedded_BTD = jnp.take(params["embed"], rows.tokens_BT, axis=0).astype(compute_dtype(config.model))
        forward = {p: (~x).astype(jnp.int32) for p, x in recorded.items() if p[-1] in ("mixer_finite", "ffn_finite")}
        last = {"embedding": embedded_BTD, "final_norm": recorded["final_norm_out",], "loss": tally.loss.nats}
        return forward | _count_bad({(name,): x for name, x in last.items()}), _count_bad(flatten_dict(grads))

    counts = jax.lax.map(one, split_rows(batch, config.train.num_microbatches))
    forward, backward = jax.lax.psum(jax.tree.map(lambda x: jnp.sum(x, axis=0), counts), DATA_AXIS)
    return forward, backward, _count_bad(flatten_dict({"params": params, "router": router}))


def _count_bad(leaves: Counts) -> Counts:
    """1 where anything in an array is not finite; layers' leaves keep their axes [block, repeat]."""

    def bad(path: tuple[str, ...], x: jax.Array) -> jax.Array:
        stacked = any(key.startswith("stage_") for key in path)
        return jnp.any(~jnp.isfinite(x), axis=tuple(range(2 if stacked else 0, x.ndim))).astype(jnp.int32)

    return {path: bad(path, x) for path, x in leaves.items()}
