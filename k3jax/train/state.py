"""All that training carries from step to step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.config import Config
from k3jax.models.kimi_k3 import init_variables, variable_shapes
from k3jax.train.mesh import replicated
from k3jax.train.optimizer import OptimizerState, make_optimizer


class TrainState(NamedTuple):
    """One pytree of arrays; every key in it is a string.

    Attributes:
        step: int32 scalar, steps taken, skipped ones included; the data position follows from it.
        params: master parameters, float32 or wider.
        router: router biases in the layers' places, float32; {} where the model has no experts. No optimiser sees it.
        opt_state: the optimiser's memory, float32 or wider.
        skipped: int32 scalar, steps whose loss or gradient was not finite.
        streak: int32 scalar, how many of the latest steps in a row were so.
    """

    step: jax.Array
    params: dict[str, Any]
    router: dict[str, Any]
    opt_state: OptimizerState
    skipped: jax.Array
    streak: jax.Array

    @property
    def variables(self) -> dict[str, Any]:
        """What `KimiK3.apply` takes."""
        return {"params": self.params, "router": self.router}


def make_state(
    config: Config, mesh: jax.sharding.Mesh | None = None, variables: dict[str, Any] | None = None
) -> TrainState:
    """The state before the first step; equal seeds give equal bits.

    Args:
        config: a whole run; train.seed is the seed of the parameters.
        mesh: every device gets a copy; None leaves all on the default device.
        variables: to begin with, on the mesh; their buffers are freed. None = drawn from the seed.
    Returns:
        TrainState in float32.
    """
    sharding = None if mesh is None else replicated(mesh)
    if variables is None:
        variables = init_variables(config.model, config.train.seed, sharding)
    return jax.jit(functools.partial(_begin, config), donate_argnums=0, out_shardings=sharding)(variables)


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, dtypes and shardings of `make_state`, computing nothing: what a checkpoint is restored into.

    Args:
        config: a whole run.
        mesh: where the state will live.
    Returns:
        TrainState of jax.ShapeDtypeStruct.
    """
    shapes = jax.eval_shape(functools.partial(_begin, config), variable_shapes(config.model))
    sharding = replicated(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def _begin(config: Config, variables: dict[str, Any]) -> TrainState:
    optimizer = make_optimizer(config.optim, config.train.steps)

    def zero() -> jax.Array:  # a buffer each: the step donates them one by one
        return jnp.zeros((), jnp.int32)

    params, router = variables["params"], variables.get("router", {})
    return TrainState(zero(), params, router, optimizer.init(params), zero(), zero())
