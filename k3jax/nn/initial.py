"""Initial values of parameters, by leaf name (spec §1.5, §4.5): drawn by jax inside a module, or by numpy for a tree.

Numpy draws each matrix from a key of its own (seed, path, place in the stack), so a tree has the same bits on every
mesh and backend, each host makes only what its devices hold, and nothing is compiled: jax's counter-based generator
costs XLA on a CPU a quarter of a second a parameter.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig
from k3jax.nn.parameters import parameter_spec


def parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Declares a float32 parameter of a module that has a `config`; its initial value follows from its name.

    Args:
        module: a compact Linen module.
        name: a leaf name of k3jax.nn.parameters.
        shape: natural axes, without stack axes.
    Returns:
        The parameter.
    """

    def initialiser(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        def normal(s):
            return jax.random.normal(key, s)

        def uniform(s):
            return jax.random.uniform(key, s)

        return _draw(module.config, name, shape, normal, uniform, jnp).astype(jnp.float32)

    return module.param(name, initialiser, shape)


def _draw(config: ModelConfig, name: str, shape: tuple[int, ...], normal: Callable, uniform: Callable, xp) -> Any:
    """One parameter from standard draws; xp is numpy or jax.numpy."""
    if name.endswith(("_norm", "_gain")):
        return xp.ones(shape)
    if name.endswith("_query") or (name == "a_log" and config.kda_decay == "bounded"):
        return xp.zeros(shape)  # queries: every depth source weighs the same at first
    if name == "a_log":
        return xp.log(1 + 15 * uniform(shape))  # a rate uniform in [1, 16]
    if name == "dt_bias":  # inverse softplus of a time step that is log-uniform in [1e-3, 0.1]
        low, high = math.log(1e-3), math.log(0.1)
        dt = xp.maximum(xp.exp(low + (high - low) * uniform(shape)), 1e-4)
        return dt + xp.log(-xp.expm1(-dt))
    if name.endswith("_conv"):  # a depthwise convolution sees `taps` inputs a channel
        return (2 * uniform(shape) - 1) / math.sqrt(shape[-1])
    return config.init_std * normal(shape)


def initial_leaf(
    config: ModelConfig, seed: int, path: tuple[str, ...], shape: tuple[int, ...], sharding: Any = None
) -> jax.Array:
    """A stacked parameter, float32, the same bits on any mesh.

    Args:
        config: architecture.
        seed: of the whole tree.
        path: keys from the root of the parameter tree to the leaf.
        shape: stack axes first, then the natural ones.
        sharding: where it goes; None = the default device.
    Returns:
        The array; each process draws the matrices that its own devices hold.
    """
    spec = parameter_spec(path, len(shape))
    experts = len(spec.muon.batch) if spec.muon else 0  # experts are drawn one by one, as they are sharded
    lead = len(shape) - len(spec.axes) + experts

    def matrix(index: tuple[int, ...]) -> np.ndarray:
        text = "/".join([str(seed), *path, *map(str, index)])
        key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))

        def normal(s):
            return rng.standard_normal(s, np.float32)

        def uniform(s):
            return rng.random(s, np.float32)

        return _draw(config, path[-1], shape[lead:], normal, uniform, np).astype(np.float32)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(*s.indices(n)) for s, n in zip(index[:lead], shape[:lead], strict=True)]
        out = np.empty((*map(len, ranges), *shape[lead:]), np.float32)
        for at in np.ndindex(out.shape[:lead]):
            out[at] = matrix(tuple(r[i] for r, i in zip(ranges, at, strict=True)))
        return out[(..., *index[lead:])]

    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.make_array_from_callback(shape, sharding, part)
