"""One training step and one evaluation step, each a single compiled function over the mesh.

Devices work on their own rows, manually mapped over the mesh's data axis: tokens of different devices never meet in
the experts' sort, gradients are summed over micro-batches locally, and one sum over devices ends it, of float32
gradients, and of integers for everything the router bias is made of.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from k3jax.config import Config
from k3jax.data import Batch
from k3jax.models import KimiK3
from k3jax.models.kimi_k3 import compute_dtype
from k3jax.ops.losses import Loss, next_token_loss
from k3jax.train.balance import update_bias
from k3jax.train.mesh import DATA_AXIS, check_batch, over_rows, replicated
from k3jax.train.optimizer import make_optimizer
from k3jax.train.schedules import make_schedule
from k3jax.train.state import TrainState

Tree = dict[str, Any]

# Statistics that are not summed but kept token by token, for the exact quantile.
PER_TOKEN = ("scores", "mask")


class Scale(NamedTuple):
    """Counts over the whole step, on all devices: what sums are divided by.

    Attributes:
        targets: int32 scalar, tokens with a next token to predict.
        tokens: int32 scalar, tokens that are not padding.
    """

    targets: jax.Array
    tokens: jax.Array


class Tally(NamedTuple):
    """Sums over tokens; they add over micro-batches and devices.

    Attributes:
        loss: sums of the next-token loss.
        aux: sum over tokens and MoE layers of the auxiliary balancing loss.
        stats: what the routers saw, by path in the tree of layers; integers.
    """

    loss: Loss
    aux: jax.Array
    stats: dict[tuple[str, ...], jax.Array]


def measure(batch: Batch) -> Scale:
    """Counts a step's targets and tokens; inside a map over the data axis."""
    local = jnp.sum(batch.targets_BT >= 0), jnp.sum(batch.segment_ids_BT != 0)
    return Scale(*(jax.lax.psum(x.astype(jnp.int32), DATA_AXIS) for x in local))


def objective(config: Config, scale: Scale, params: Tree, router: Tree, batch: Batch) -> tuple[jax.Array, tuple]:
    """This device's part of a micro-batch's objective, as a sum over its targets.

    Divided by the step's number of targets, the sum over devices and micro-batches is
        mean nats + z_loss * mean squared log-partition + balancing_aux_weight * sum over MoE layers of E sum_j f_j P_j,
    the means over the step's targets; the auxiliary loss, where it is asked for, is that of each micro-batch over all
    devices, weighed by its tokens.

    Args:
        config: a whole run.
        scale: counts of the whole step.
        params: what it is differentiated for.
        router: router biases.
        batch: this device's rows of a micro-batch; inside a map over the data axis.
    Returns:
        The objective in float32 or wider, and (Tally, per-token statistics by path).
    """
    hidden_BTD, outputs = KimiK3(config.model).apply(
        {"params": params, "router": router}, batch.tokens_BT, batch.segment_ids_BT,
        output="hidden", mutable=["router_stats"],
    )  # fmt: skip
    loss = next_token_loss(hidden_BTD, _head(config, params), batch.targets_BT, z_loss=config.optim.z_loss)
    stats = flatten_dict(outputs.get("router_stats", {}))
    aux = jnp.zeros((), loss.nats.dtype)
    for path in [path for path in stats if path[-1] == "aux_loss"]:
        aux += _auxiliary(stats.pop(path))
    # The auxiliary loss is a mean over tokens, everything else a sum over targets.
    per_token = config.model.balancing_aux_weight * scale.targets / jnp.maximum(scale.tokens, 1)
    tokens = {path: stats.pop(path) for path in list(stats) if path[-1] in PER_TOKEN}
    return loss.nats + loss.z + per_token.astype(aux.dtype) * aux, (Tally(loss, aux, stats), tokens)


def _head(config: Config, params: Tree) -> jax.Array:
    """The output head as `KimiK3` itself multiplies by it, in the compute dtype; the gradient is the master's."""
    return params["head"].astype(compute_dtype(config.model))


def _auxiliary(sums) -> jax.Array:
    """Sum over tokens and layers of the auxiliary loss: f_j from all devices, P_j from this one."""
    everywhere = sums._replace(load_E=jax.lax.psum(sums.load_E, DATA_AXIS), tokens=jnp.ones_like(sums.tokens))
    return jnp.sum(jax.vmap(jax.vmap(lambda layer: layer.value()))(everywhere))


def split_rows(batch: Batch, parts: int) -> Batch:
    """[rows, T] to [parts, rows / parts, T]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)


def _gradients(config: Config, params: Tree, router: Tree, batch: Batch) -> tuple[Tree, Tally, Scale, Tree]:
    """Sums over the step on one device of the map: gradient, tally, and statistics as `update_bias` takes them."""
    scale = measure(batch)
    differentiate = jax.grad(functools.partial(objective, config, scale), has_aux=True)
    parts = config.train.num_microbatches
    if parts == 1:
        grads, (tally, tokens) = differentiate(params, router, batch)
    else:
        micro = split_rows(batch, parts)
        shapes = jax.eval_shape(differentiate, params, router, jax.tree.map(lambda x: x[0], micro))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[1][0]))

        def accumulate(carry: tuple, rows: Batch) -> tuple:
            grads, (tally, tokens) = differentiate(params, router, rows)
            return jax.tree.map(jnp.add, carry, (grads, tally)), tokens

        (grads, tally), tokens = jax.lax.scan(accumulate, start, micro)
        # [micro-batch, block, repeat, token, ...] to [block, repeat, all tokens, ...]
        tokens = {path: _join(x) for path, x in tokens.items()}
    grads, tally = jax.lax.psum((grads, tally), DATA_AXIS)
    tokens = {path: jax.lax.all_gather(x, DATA_AXIS, axis=2, tiled=True) for path, x in tokens.items()}
    return grads, tally, scale, unflatten_dict(tally.stats | tokens)


def _join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def make_train_step(
    config: Config, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """Compiles, at its first call, one step of training.

    The gradient is that of the mean over the step's targets, however they are spread over rows, micro-batches and
    devices. It is clipped by its global norm, then the optimiser moves the parameters and the balancing rule replaces
    the router bias, which routes from the next step on. If the loss or the gradient's norm is not finite, only
    `step`, `skipped` and `streak` change.

    Args:
        config: a whole run.
        mesh: from `make_mesh`.
    Returns:
        step(state, batch) -> (state, metrics). The state passed in is donated: its arrays are gone afterwards. The
        batch is global (`shard_batch`), targets -1 where there is none. Metrics are arrays, floats in float32 or wider:
            loss: nats a target.            z_loss: OptimConfig.z_loss times the mean squared log-partition.
            accuracy: share of targets predicted first.
            aux_loss: mean over tokens and MoE layers of E sum_j f_j P_j, 1 when even; 0 if it is not asked for.
            num_targets: int32.             num_tokens: int32, without padding.
            grad_norm: before clipping.     learning_rate: of this step.
            nonfinite: bool, the step was skipped.
            load: tokens sent to each expert, leaves "load" in the layers' places, int32 [block, repeat, E].
    Raises:
        ConfigError: batch_size does not divide among devices and micro-batches.
    Source: spec §6.2, §6.3, §7.1.
    """
    check_batch(config, mesh)
    optimizer = make_optimizer(config.optim, config.train.steps)
    learning_rate_at = make_schedule(config.optim, config.train.steps)
    gradients = on_rows(functools.partial(_gradients, config), mesh)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        grads, tally, scale, stats = gradients(state.params, state.router, batch)
        targets = jnp.maximum(scale.targets, 1)
        loss, norm = tally.loss.nats / targets, optax.global_norm(grads) / targets
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def update(params: Tree, router: Tree, opt_state: Any) -> tuple:
            factor = 1 / targets.astype(norm.dtype)  # of the sum: the mean, then clipped
            if config.optim.clip_norm is not None:
                factor *= config.optim.clip_norm / jnp.maximum(norm, config.optim.clip_norm)
            mean = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
            updates, opt_state = optimizer.update(mean, opt_state, params)
            return optax.apply_updates(params, updates), update_bias(config.model, router, stats), opt_state

        # A branch, not a selection of old or new values: it writes into the donated arrays, where selecting keeps both
        # for a while (on a CPU three times the cost of AdamW).
        old = state.params, state.router, state.opt_state
        params, router, opt_state = jax.lax.cond(finite, update, lambda *old: old, *old)
        bad = (~finite).astype(jnp.int32)
        after = TrainState(state.step + 1, params, router, opt_state, state.skipped + bad, (state.streak + 1) * bad)
        layers = sum(x.shape[0] * x.shape[1] for x in jax.tree.leaves(state.router))
        metrics = {
            "loss": loss,
            "z_loss": tally.loss.z / targets,
            "accuracy": tally.loss.correct / targets.astype(loss.dtype),
            "aux_loss": tally.aux / jnp.maximum(scale.tokens, 1) / max(layers, 1),
            "num_targets": scale.targets,
            "num_tokens": scale.tokens,
            "grad_norm": norm,
            "learning_rate": learning_rate_at(state.opt_state.count),
            "nonfinite": ~finite,
            "load": unflatten_dict({path: x for path, x in tally.stats.items() if path[-1] == "load"}),
        }
        return after, metrics

    whole = replicated(mesh)
    return jax.jit(step, donate_argnums=0, in_shardings=(whole, over_rows(mesh)), out_shardings=whole)


def make_eval_step(config: Config, mesh: jax.sharding.Mesh) -> Callable[[Tree, Batch], dict[str, jax.Array]]:
    """Compiles, at its first call, the loss of one batch; nothing is updated, and no statistics are taken.

    Args:
        config: a whole run.
        mesh: from `make_mesh`.
    Returns:
        evaluate(variables, batch) -> sums over the batch's targets: nats (float32 or wider), count and correct (int32).
        variables are {"params", "router"} (`TrainState.variables`); the batch is global, its rows a multiple of the
        devices.
    """

    def sums(variables: Tree, batch: Batch) -> dict[str, jax.Array]:
        hidden_BTD = KimiK3(config.model).apply(variables, batch.tokens_BT, batch.segment_ids_BT, output="hidden")
        loss = next_token_loss(hidden_BTD, _head(config, variables["params"]), batch.targets_BT)
        return jax.lax.psum({"nats": loss.nats, "count": loss.count, "correct": loss.correct}, DATA_AXIS)

    def evaluate(variables: Tree, batch: Batch) -> dict[str, jax.Array]:
        return on_rows(sums, mesh)(variables, batch)

    whole = replicated(mesh)
    return jax.jit(evaluate, in_shardings=(whole, over_rows(mesh)), out_shardings=whole)


def on_rows(f: Callable, mesh: jax.sharding.Mesh) -> Callable:
    """Maps `f` over the devices: its last argument, a batch, by rows, all others whole; results are whole."""

    def mapped(*args: Any) -> Any:
        rows, whole = PartitionSpec(DATA_AXIS), PartitionSpec()
        specs = (*([whole] * (len(args) - 1)), rows)
        # Without the check, gradients stay local until the one sum that is written out.
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)(*args)

    return mapped
