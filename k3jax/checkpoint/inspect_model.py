"""What the parameters alone say about a model: its experts, its depth queries, its decays. No jax import here."""

import math
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.matrices import BLOCK_BYTES
from k3jax.checkpoint.source import Source, Tensor, tensors
from k3jax.errors import UserError

SAMPLE_ROWS = 32  # rows of each expert's matrices that are read to tell experts apart
TWIN = 0.9  # cosine of two experts' sampled weights from which on they count as twins
DEAD = 1e-4  # of the median norm: below it an expert's weights count as zero


class LayerExperts(NamedTuple):
    """The experts of one layer. Dimension: E experts.

    Attributes:
        layer: counted from 1.
        bias_E: float32, the router bias.
        router_E: float64, norm of each expert's router vector.
        weight_E: float64, root mean square of each expert's sampled weights.
        dead: experts (from 0) whose sampled weights or router vector are next to zero beside the median.
        twins: (first, second, cosine) of pairs whose sampled weights point the same way.
    """

    layer: int
    bias_E: np.ndarray
    router_E: np.ndarray
    weight_E: np.ndarray
    dead: tuple[int, ...]
    twins: tuple[tuple[int, int, float], ...]


class LayerGates(NamedTuple):
    """The decay of one KDA layer where the input adds nothing. Dimensions: J value heads, K key channels.

    Attributes:
        layer: counted from 1.
        half_life_JK: float64, in tokens: ln 2 / -g of spec §2.2 at z = dt_bias; infinite where nothing decays.
    """

    layer: int
    half_life_JK: np.ndarray


class Consumer(NamedTuple):
    """A sublayer's query over depth.

    Attributes:
        name: such as "layer 3 mixer", or "output".
        query_D: float64, pseudo-query times gain: only their product counts (spec §4.2).
    """

    name: str
    query_D: np.ndarray


def experts(source: Source) -> list[LayerExperts]:
    """Every MoE layer's experts, told apart by a sample of their weights.

    Args:
        source: an open checkpoint.
    Returns:
        In layer order.
    Raises:
        UserError: the model has no experts, or files are damaged.
    Source: spec §5.1, §6.2.
    """
    found = _by_layer(source, "moe")
    if not found:
        raise UserError(f"{source.path}: no experts in this model")
    layers = []
    for layer, leaves in found.items():
        router_DE = _read(source, leaves["router"])
        router_E = np.sqrt(np.einsum("de,de->e", router_DE, router_DE))
        sample_EN = np.concatenate(
            [_sample(source, leaves[name]) for name in ("expert_gate", "expert_up", "expert_down")], axis=1
        )
        norm_E = np.sqrt(np.einsum("en,en->e", sample_EN, sample_EN))
        dead = np.flatnonzero((norm_E <= DEAD * np.median(norm_E)) | (router_E <= DEAD * np.median(router_E)))
        unit_EN = sample_EN / np.maximum(norm_E, 1e-30)[:, None]
        cosine_EE = np.triu(unit_EN @ unit_EN.T, 1)
        pairs = sorted(np.argwhere(cosine_EE > TWIN).tolist(), key=lambda pair: -cosine_EE[tuple(pair)])
        twins = tuple((a, b, float(cosine_EE[a, b])) for a, b in pairs)
        bias_E = _read(source, leaves["bias"]) if "bias" in leaves else np.zeros(len(norm_E))
        weight_E = norm_E / math.sqrt(sample_EN.shape[1])
        layers.append(LayerExperts(layer, bias_E.astype(np.float32), router_E, weight_E, tuple(dead.tolist()), twins))
    return layers


def gates(source: Source) -> list[LayerGates]:
    """The half-life of every channel of every KDA head, where the input adds nothing to the gate.

    Args:
        source: an open checkpoint, with a configuration: it tells the family of the decay.
    Returns:
        In layer order.
    Raises:
        UserError: no configuration, no KDA layer, or damaged files.
    Source: spec §2.2.
    """
    if source.config is None:
        raise UserError(f"{source.path}: no config.json tells the family of the decay; give the run's directory")
    found = _by_layer(source, "kda")
    if not found:
        raise UserError(f"{source.path}: no KDA layers in this model")
    config, layers = source.config, []
    for layer, leaves in found.items():
        z_JK, rate_J1 = _read(source, leaves["dt_bias"]), np.exp(_read(source, leaves["a_log"]))[:, None]
        if config.kda_decay == "bounded":
            decay_JK = config.kda_decay_lower_bound * _sigmoid(rate_J1 * z_JK)
        else:
            decay_JK = -rate_J1 * np.logaddexp(0.0, z_JK)
        with np.errstate(divide="ignore"):
            layers.append(LayerGates(layer, math.log(2) / -decay_JK))
    return layers


def depth_queries(source: Source) -> list[Consumer]:
    """Every sublayer's query over depth, in the order in which they read.

    Args:
        source: an open checkpoint.
    Returns:
        Two a layer, then the output.
    Raises:
        UserError: no Attention Residuals, or damaged files.
    Source: spec §4.2.
    """
    table: dict[int, dict[str, Tensor]] = {}
    for tensor in tensors(source):
        if tensor.path[0] == "params" and tensor.path[-1].endswith(("_res_query", "_res_gain")):
            table.setdefault(tensor.layer, {})[tensor.path[-1]] = tensor
    if not table:
        raise UserError(f"{source.path}: no Attention Residuals in this model")
    consumers = []
    for layer in sorted(table, key=lambda n: n or math.inf):
        for kind in ("mixer", "ffn", "output"):
            if f"{kind}_res_query" in table[layer]:
                query_D = _read(source, table[layer][f"{kind}_res_query"])
                gain_D = _read(source, table[layer][f"{kind}_res_gain"])
                name = f"layer {layer} {'feed-forward' if kind == 'ffn' else kind}" if layer else kind
                consumers.append(Consumer(name, query_D * gain_D))
    return consumers


def _by_layer(source: Source, module: str) -> dict[int, dict[str, Tensor]]:
    """{layer: {leaf name: tensor}} of the parameters and biases of one kind of module."""
    found: dict[int, dict[str, Tensor]] = {}
    for tensor in tensors(source):
        if tensor.path[0] in ("params", "router") and len(tensor.path) > 1 and tensor.path[-2] == module:
            found.setdefault(tensor.layer, {})[tensor.path[-1]] = tensor
    return dict(sorted(found.items()))


def _read(source: Source, tensor: Tensor) -> np.ndarray:
    return source.read(tensor.path, tensor.index).astype(np.float64)


def _sample(source: Source, tensor: Tensor) -> np.ndarray:
    """The first `SAMPLE_ROWS` rows of each expert's matrix, [E, values], float32; some experts at a time."""
    E, rows, columns = tensor.shape
    rows = min(rows, SAMPLE_ROWS)
    together = max(1, BLOCK_BYTES // (rows * columns * source.leaves[tensor.path].dtype.itemsize))
    sample_EN = np.empty((E, rows * columns), np.float32)
    for first in range(0, E, together):
        experts = slice(first, min(first + together, E))
        sample_EN[experts] = source.read(tensor.path, (*tensor.index, experts, slice(0, rows))).reshape(
            -1, rows * columns
        )
    return sample_EN


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))
