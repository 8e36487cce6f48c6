"""What a trained model does inside: where each sublayer reads over depth, and how fast KDA forgets.

One forward pass over held-out text. All that leaves the devices is a mean or a count.
"""

import functools
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import Config, ModelConfig
from k3jax.data import Batch
from k3jax.models import KimiK3
from k3jax.train.balance import layer_values

Tree = dict[str, Any]

FILE = "diagnostics.npz"
MAX_TOKENS = 16384  # of the batch that are read
MAX_DECAYS = 2**28  # among them: every layer's decays are on the devices at once

# Half-life ln 2 / -g in tokens: ten bins a decade, and one to either side for what is shorter or longer.
HALF_LIFE_EDGES_X = np.concatenate([[0.0], np.logspace(-2, 6, 81), [np.inf]])


class Diagnostics(NamedTuple):
    """Means and counts over the tokens that were read, padding left out.

    Dimensions: Q consumers, R sources, N KDA layers, J value heads, X bins.

    Attributes:
        tokens: how many tokens were read.
        consumers: names of the sublayers that mix over depth, in order: mixer and feed-forward of every layer, then
            the output; empty without Attention Residuals.
        sources: names of what they read. Block form: the embedding, the sum of each block, the running sum of the
            block that the consumer is in. Full form: the embedding and every sublayer.
        weights_QR: float32, mean weight; NaN where the source does not exist for the consumer, else a row sums to 1.
        kda_layers: numbers of the KDA layers, from 1.
        decay_counts_NJX: int64, tokens times channels whose half-life is in each bin.
        half_life_edges_Y: float64, the X + 1 edges of the bins in tokens; the first is 0, the last infinite.
    """

    tokens: int
    consumers: tuple[str, ...]
    sources: tuple[str, ...]
    weights_QR: np.ndarray
    kda_layers: tuple[int, ...]
    decay_counts_NJX: np.ndarray
    half_life_edges_Y: np.ndarray


class Part(NamedTuple):
    """The upper left corner of a batch: its first rows, and the first tokens of each."""

    rows: int
    tokens: int


def collect_diagnostics(config: Config, variables: Tree, batch: Batch) -> Diagnostics:
    """Runs the model once and reduces what it recorded, on the devices.

    Args:
        config: a whole run.
        variables: of the model, {"params": ..., "router": ...}.
        batch: held-out rows, of which the first ones are read (`part_to_read`). On several processes numpy arrays,
            the same on each.
    Returns:
        Diagnostics, as numpy arrays.
    Source: spec §2.2, §4.2.
    """
    model = config.model
    part = part_to_read(model, batch.tokens_BT.shape[1])
    tokens_BT, segment_ids_BT = (x[: part.rows, : part.tokens] for x in (batch.tokens_BT, batch.segment_ids_BT))
    reduced, count = jax.device_get(_reduced_pass(model)(variables, tokens_BT, segment_ids_BT))
    sources, consumers = _sources(model), _consumers(model)
    weights_QR = np.full((len(consumers), len(sources)), np.nan, np.float32)
    if consumers:
        for kind, first in (("mixer", 0), ("ffn", 1)):
            for layer, row_R in layer_values(model, reduced, f"{kind}_res_weights").items():
                _place(model, weights_QR[2 * (layer - 1) + first], row_R, layer, kind)
        weights_QR[-1, : len(reduced["output_res_weights"]) - 1] = reduced["output_res_weights"][:-1]
    at_least = layer_values(model, reduced, "kda", "log_decay")
    counts_NJX = np.zeros((0, model.num_value_heads, len(HALF_LIFE_EDGES_X) - 1), np.int64)
    if at_least:
        at_least_NJX = np.stack(list(at_least.values())).astype(np.int64)
        everything = np.full_like(at_least_NJX[..., :1], int(count) * model.kda_key_dim)
        counts_NJX = -np.diff(np.concatenate([everything, at_least_NJX], axis=-1), append=0, axis=-1)
    return Diagnostics(
        int(count), consumers, sources, weights_QR, tuple(at_least), counts_NJX, HALF_LIFE_EDGES_X.copy()
    )


def part_to_read(model: ModelConfig, seq_len: int) -> Part:
    """How much of a batch is read: `MAX_TOKENS` tokens with `MAX_DECAYS` decays in all layers, or less.

    Args:
        model: the architecture.
        seq_len: tokens a row.
    Returns:
        Whole rows, one at least; if the decays of one are too many, the beginning of it.
    """
    kda_layers = model.num_layers - len(model.global_layers)
    most = max(1, MAX_DECAYS // max(1, kda_layers * model.num_value_heads * model.kda_key_dim))
    return Part(max(1, min(MAX_TOKENS, most) // seq_len), min(seq_len, most))


def half_life_quantile(diagnostics: Diagnostics, quantile: float) -> np.ndarray:
    """A quantile of the half-life of each KDA layer's heads, between the histogram's edges by logarithm.

    Args:
        diagnostics: from `collect_diagnostics`.
        quantile: in [0, 1].
    Returns:
        float64 [N, J] in tokens; beyond the outermost finite edges, that edge.
    """
    counts_NJX, edges_Y = diagnostics.decay_counts_NJX, diagnostics.half_life_edges_Y
    log_Y = np.log(np.concatenate([edges_Y[1:2], edges_Y[1:-1], edges_Y[-2:-1]]))
    result_NJ = np.zeros(counts_NJX.shape[:2])
    for index in np.ndindex(*result_NJ.shape):
        cumulative_Y = np.concatenate([[0], np.cumsum(counts_NJX[index])])
        if not cumulative_Y[-1]:
            result_NJ[index] = np.nan
            continue
        target = quantile * cumulative_Y[-1]
        bin_ = min(int(np.searchsorted(cumulative_Y[1:], target)), len(edges_Y) - 2)
        inside = (target - cumulative_Y[bin_]) / max(cumulative_Y[bin_ + 1] - cumulative_Y[bin_], 1)
        result_NJ[index] = math.exp(log_Y[bin_] + inside * (log_Y[bin_ + 1] - log_Y[bin_]))
    return result_NJ


def write_diagnostics(workdir: str | os.PathLike, config: Config, variables: Tree, batch: Batch) -> pathlib.Path:
    """Collects, and keeps the result as `diagnostics.npz` in the run directory.

    Every process must call it; the first one writes.

    Args:
        workdir: the run directory.
        config, variables, batch: as for `collect_diagnostics`.
    Returns:
        The file.
    """
    path = pathlib.Path(workdir) / FILE
    diagnostics = collect_diagnostics(config, variables, batch)
    if jax.process_index() == 0:
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as file:
            # Plain arrays of text, so that reading needs no pickle.
            np.savez_compressed(file, **{name: np.asarray(value) for name, value in diagnostics._asdict().items()})
        os.replace(temporary, path)
    return path


def read_diagnostics(workdir: str | os.PathLike) -> Diagnostics | None:
    """What `write_diagnostics` left in a run directory; None where it left nothing."""
    path = pathlib.Path(workdir) / FILE
    if not path.exists():
        return None
    with np.load(path) as arrays:
        values = {name: arrays[name] for name in Diagnostics._fields}
    values["tokens"] = int(values["tokens"])
    for name in ("consumers", "sources", "kda_layers"):
        values[name] = tuple(values[name].tolist())
    return Diagnostics(**values)


@functools.lru_cache
def _reduced_pass(model: ModelConfig):
    """A compiled pass that gives (the recorded tree, reduced leaf by leaf over tokens; number of tokens)."""
    rates_X = jnp.asarray(math.log(2) / HALF_LIFE_EDGES_X[1:-1], jnp.float32)

    def reduce(path, value, mask_BT):
        name = path[-1].key
        if name == "log_decay":  # [..., B, T, J, K] to [..., J, X]: half-lives of an edge or longer
            mask_BT11 = mask_BT[:, :, None, None]
            axes = (-4, -3, -1)
            counts = jax.lax.map(
                lambda rate: jnp.sum((-value <= rate) & mask_BT11, axis=axes, dtype=jnp.int32), rates_X
            )
            return jnp.moveaxis(counts, 0, -1)
        weights_BT = mask_BT / jnp.maximum(jnp.sum(mask_BT), 1)
        return jnp.einsum("bt,...btr->...r", weights_BT.astype(value.dtype), value, precision="highest")

    def run(variables, tokens_BT, segment_ids_BT):
        _, recorded = KimiK3(model).apply(
            variables, tokens_BT, segment_ids_BT, output="hidden", mutable=["intermediates"]
        )
        mask_BT = segment_ids_BT != 0
        wanted = _keep(recorded["intermediates"])
        reduced = jax.tree_util.tree_map_with_path(lambda path, x: reduce(path, x, mask_BT), wanted)
        return reduced, jnp.sum(mask_BT)

    return jax.jit(run)


def _keep(tree: Tree) -> Tree:
    """The recordings that are looked at, in their places."""
    kept = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            kept[name] = _keep(value)
        elif name == "log_decay" or name.endswith("_res_weights"):
            kept[name] = value
    return kept


def _consumers(model: ModelConfig) -> tuple[str, ...]:
    if model.attn_res == "none":
        return ()
    return (*_sublayers(model), "output")


def _sublayers(model: ModelConfig) -> list[str]:
    return [f"layer {i} {kind}" for i in range(1, model.num_layers + 1) for kind in ("mixer", "feed-forward")]


def _sources(model: ModelConfig) -> tuple[str, ...]:
    if model.attn_res == "none":
        return ()
    if model.attn_res == "full":
        return ("embedding", *_sublayers(model))
    blocks = -(-model.num_layers // model.attn_res_block_size)
    return ("embedding", *(f"block {b}" for b in range(1, blocks + 1)), "running sum")


def _place(model: ModelConfig, target_R: np.ndarray, row_R: np.ndarray, layer: int, kind: str) -> None:
    """Copies a sublayer's recorded weights to their sources.

    The memory is filled oldest first, so unused places come after the used ones; the last place is that of the
    running sum, which the full form has only between a mixer and its feed-forward: the mixer's own output.
    """
    if model.attn_res == "full":
        used, running = 2 * layer - 1, 2 * layer - 1
    else:
        used, running = 1 + (layer - 1) // model.attn_res_block_size, len(target_R) - 1
    target_R[:used] = row_R[:used]
    starts = model.attn_res == "full" or (layer - 1) % model.attn_res_block_size == 0
    if kind == "ffn" or not starts:
        target_R[running] = row_R[-1]
