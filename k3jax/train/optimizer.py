"""The optimiser: AdamW, or Muon for matrices and AdamW for the rest, one optax transformation, plain state."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax.nn.parameters import parameter_spec
from k3jax.train.muon import matrix_view, orthogonalise
from k3jax.train.schedules import make_schedule


class OptimizerState(NamedTuple):
    """All the optimiser remembers; every leaf is an array and every key a string.

    Attributes:
        count: int32 scalar, updates applied so far; the schedule's step.
        momentum: a tree like the parameters, float32 or wider: Muon's M, or AdamW's first moment.
        second_moment: the same tree without Muon's parameters: AdamW's second moment, float32 or wider.
    """

    count: jax.Array
    momentum: dict[str, Any]
    second_moment: dict[str, Any]


class ParameterLabel(NamedTuple):
    """What the optimiser does with one parameter.

    Attributes:
        optimizer: which rule updates it.
        weight_decay: whether it decays.
        matrices: how many matrices Muon sees in it, stack axes included; 0 under AdamW.
        matrix: (short side, long side) of each; () under AdamW.
    """

    optimizer: Literal["muon", "adamw"]
    weight_decay: bool
    matrices: int
    matrix: tuple[int, ...]


def parameter_label(optim_config, path: tuple[str, ...], shape: tuple[int, ...]) -> ParameterLabel:
    """What the optimiser does with one parameter.

    Args:
        optim_config: has name ("adamw" or "muon") and muon_blocks.
        path: keys from the root of the parameter tree to the leaf.
        shape: the leaf's shape, stack axes first.

    Returns:
        Its ParameterLabel.

    Raises:
        ValueError: the leaf name is unknown (k3jax.nn.parameters).

    Source: spec §7.2.
    """
    weight_decay = parameter_spec(path, len(shape)).weight_decay
    view = matrix_view(path, shape, optim_config.muon_blocks) if optim_config.name == "muon" else None
    if view is None:
        return ParameterLabel("adamw", weight_decay, 0, ())
    return ParameterLabel("muon", weight_decay, view.count, (view.short, view.long))


def make_optimizer(optim_config, total_steps: int) -> optax.GradientTransformation:
    """Builds the optimiser; its updates are to be added to the parameters (optax.apply_updates).

    Muon: M <- mu M + G, update -lr (NS5(M) 0.2 sqrt(max(rows, columns)) + weight_decay W).
    AdamW: bias-corrected moments m and v, update -lr (m / (sqrt(v) + eps) + weight_decay W).
    The leaf name alone decides which rule takes a parameter and whether it decays (`parameter_label`).
    Gradients are clipped by the train step, not here. Moments and updates are float32 or wider whatever the
    parameters' dtype.

    Args:
        optim_config: has name ("adamw" or "muon"), what make_schedule reads, adam_learning_rate (the peak of
            the AdamW part under Muon; None is learning_rate), weight_decay, beta1, beta2, eps, muon_momentum
            and muon_blocks.
        total_steps: length of the run in optimiser steps, for the schedule.

    Returns:
        An optax.GradientTransformation; its state is an OptimizerState, and update needs params, a nested
        dict.

    Raises:
        ValueError: an unknown name or schedule (here), an unknown leaf name (in init).

    Source: spec §7.1, §7.2.
    """
    c = optim_config
    if c.name not in ("adamw", "muon"):
        raise ValueError(f"OptimConfig.name = {c.name!r}: use 'adamw' or 'muon'")
    learning_rate_at = make_schedule(c, total_steps)
    adam_learning_rate_at = make_schedule(c, total_steps, peak=c.adam_learning_rate if c.name == "muon" else None)

    def is_muon(path, p):
        return parameter_label(c, path, p.shape).optimizer == "muon"

    def init(params):
        params = flatten_dict(params)

        def zeros(path):
            return jnp.zeros(params[path].shape, jnp.promote_types(params[path].dtype, jnp.float32))

        return OptimizerState(
            count=jnp.zeros((), jnp.int32),
            momentum=unflatten_dict({path: zeros(path) for path in params}),
            second_moment=unflatten_dict({path: zeros(path) for path in params if not is_muon(path, params[path])}),
        )

    def update(grads, state, params):
        params, grads = flatten_dict(params), flatten_dict(grads)
        momentum, second_moment = flatten_dict(state.momentum), flatten_dict(state.second_moment)
        count = state.count + 1
        new_momentum, new_second_moment, matrices, direction = {}, {}, {}, {}
        for path, m in momentum.items():
            g = grads[path].astype(m.dtype)
            if is_muon(path, m):
                new_momentum[path] = matrices[path] = c.muon_momentum * m + g
                continue
            m = new_momentum[path] = c.beta1 * m + (1 - c.beta1) * g
            v = new_second_moment[path] = c.beta2 * second_moment[path] + (1 - c.beta2) * jnp.square(g)
            t = count.astype(m.dtype)
            direction[path] = m / (1 - c.beta1**t) / (jnp.sqrt(v / (1 - c.beta2**t)) + c.eps)
        direction |= orthogonalise(matrices, c.muon_blocks)

        updates = {}
        for path, p in params.items():
            step = direction[path]
            if parameter_spec(path, p.ndim).weight_decay:
                step = step + c.weight_decay * p.astype(step.dtype)
            rate_at = learning_rate_at if is_muon(path, p) else adam_learning_rate_at
            updates[path] = -rate_at(state.count).astype(step.dtype) * step
        new_state = OptimizerState(count, unflatten_dict(new_momentum), unflatten_dict(new_second_moment))
        return unflatten_dict(updates), new_state

    return optax.GradientTransformation(init, update)
