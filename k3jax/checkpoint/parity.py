"""A checkpoint's model against outputs of another program, layer by layer.

One layer's parameters are in memory at a time. Each layer runs twice: behind our own layers ("running"), and by itself
on what the reference's layers gave ("alone"), so that an error is seen where it arises and not where it ends up.
Routing is discrete: nearly tied experts swap places by rounding alone, and then outputs differ by a lot. Where the
reference tells which experts it visited, a layer also runs by itself with just those ("forced").
"""

import functools
import pathlib
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint.hf_layout import WIDE
from k3jax.checkpoint.source import Path, Source
from k3jax.config import ModelConfig
from k3jax.errors import UserError
from k3jax.models.plan import layer_kinds, layer_slots
from k3jax.nn.layer import DecoderLayer
from k3jax.nn.layer_kind import LayerKind
from k3jax.ops.depth_attention import attention_residual
from k3jax.ops.norms import rms_norm
from k3jax.ops.precision import exact, wide_dtype

Routing = Literal["natural", "forced"]


class Reference(NamedTuple):
    """Another program's outputs. Dimension: N layers.

    Attributes:
        tokens_BT: int32, what it was given.
        logits_BTW: what it made of that; None = not known.
        layers_NBTD: the running sum after each layer (with Attention Residuals it restarts with each block); None =
            not known.
        experts: {layer from 1: int32 [B T, S]}, the experts that each token visited there, in any order.
    """

    tokens_BT: np.ndarray
    logits_BTW: np.ndarray | None
    layers_NBTD: np.ndarray | None
    experts: dict[int, np.ndarray]


class LayerParity(NamedTuple):
    """How far a layer is from the reference. Errors are max |ours - reference| over max |reference|; None = not known.

    Attributes:
        layer, kind: which one, counted from 1.
        running: error behind our own layers.
        alone: error on the reference's inputs.
        forced: the same with the reference's experts.
        agreement: share of expert choices that are the reference's, on the reference's inputs.
        gap: of the tokens that chose others, the largest difference between the last score that was chosen and the
            first that was not: small means nearly tied.
    """

    layer: int
    kind: LayerKind
    running: float | None
    alone: float | None
    forced: float | None
    agreement: float | None
    gap: float | None


def read_reference(file: str | pathlib.Path, config: ModelConfig) -> Reference:
    """Reads outputs from an .npz file: input_ids [B, T], logits [B, T, W], layer_outputs [N, B, T, D], and for routing
    router_layer (a number from 0, or several) with router_topk_indices ([B T, S], or one more axis in front).

    Args:
        file: the .npz file; nothing in it is unpickled.
        config: the architecture they must fit.
    Raises:
        UserError: no such file, no input_ids, or arrays that do not fit.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {n: arrays[n] for n in arrays.files if n in _SHAPES}
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; give an .npz file with input_ids and logits") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file}: cannot be read as .npz ({next(iter(str(error).splitlines()), '')})") from None
    if "input_ids" not in found or not found.keys() & {"logits", "layer_outputs"}:
        raise UserError(f"{file}: needs input_ids, and logits or layer_outputs; it has {', '.join(found) or 'neither'}")
    tokens = found["input_ids"]
    if tokens.ndim != 2 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise UserError(f"{file}: input_ids must be [B, T] below {config.vocab_size}, got shape {list(tokens.shape)}")
    B, T = tokens.shape
    shapes = {"logits": (B, T, config.vocab_size), "layer_outputs": (config.num_layers, B, T, config.hidden_size)}
    for name, shape in shapes.items():
        if name in found and found[name].shape != shape:
            raise UserError(f"{file}: {name} is {list(found[name].shape)}, the model's is {list(shape)}")
    experts = {}
    if "router_topk_indices" in found and "router_layer" in found:
        numbers = np.atleast_1d(found["router_layer"])
        chosen = found["router_topk_indices"].reshape(len(numbers), -1, config.num_experts_per_token)
        kinds = layer_kinds(config)
        for number, ids_TS in zip(numbers.tolist(), chosen, strict=True):
            is_moe = 0 <= number < len(kinds) and kinds[number].ffn == "moe"
            if not is_moe or ids_TS.shape[0] != B * T or ids_TS.min() < 0 or ids_TS.max() >= config.num_experts:
                raise UserError(f"{file}: router_topk_indices of layer {number} (from 0) do not fit the model")
            experts[number + 1] = ids_TS.astype(np.int32)
    return Reference(tokens.astype(np.int32), found.get("logits"), found.get("layer_outputs"), experts)


_SHAPES = ("input_ids", "logits", "layer_outputs", "router_layer", "router_topk_indices")


class Parity:
    """Runs a checkpoint against a reference.

    Args:
        source: an open checkpoint.
        reference: what to compare with.
        dtype: of parameters and compute; float64 needs jax.enable_x64.
        routing: of the running pass. "forced" visits the reference's experts in the layers where they are known.
    Attributes:
        logits_error: of the running pass, once `layers` has been read to its end; None = the reference has none.
        head_error: of final norm and head by themselves, on the reference's last layer; None = not known.
    Raises:
        UserError: no configuration, or Attention Residuals in the full form: released models have none.
    """

    def __init__(self, source: Source, reference: Reference, dtype: str, routing: Routing):
        config = source.config
        if config is None or config.attn_res == "full":
            raise UserError(f"{source.path}: parity needs a configuration, with block Attention Residuals or none")
        self._source, self._reference, self._routing = source, reference, routing
        self._config, self._dtype = config, jnp.dtype(dtype)
        self.logits_error: float | None = None
        self.head_error: float | None = None

    def layers(self) -> Iterator[LayerParity]:
        """Each layer's errors, as soon as it has run.

        Raises:
            UserError: damaged files.
        """
        reference, config = self._reference, self._config
        embed_WD = self._read(("params", "embed"))
        x_BTD = jnp.take(embed_WD, reference.tokens_BT, axis=0).astype(self._dtype)
        del embed_WD
        theirs_NBTD = reference.layers_NBTD
        ours: list[jax.Array] = []
        kinds = layer_kinds(config)
        for i, (kind, slot) in enumerate(zip(kinds, layer_slots(config), strict=True)):
            variables = self._layer(slot)
            known = reference.experts.get(i + 1)
            forced = known if self._routing == "forced" else None
            out_BTD, _ = self._run(kind, variables, self._inputs(x_BTD, ours, i), forced)
            ours.append(out_BTD)
            if theirs_NBTD is None:
                yield LayerParity(i + 1, kind, None, None, None, None, None)
                continue
            want = theirs_NBTD[i]
            there = self._inputs(x_BTD, [jnp.asarray(y, self._dtype) for y in theirs_NBTD[:i]], i)
            alone_BTD, chosen = self._run(kind, variables, there, None)
            forced_error = agreement = gap = None
            if known is not None:
                agreement, gap = _agreement(chosen, known, variables["router"]["moe"]["bias"])
                forced_error = _error(self._run(kind, variables, there, known)[0], want)
            yield LayerParity(i + 1, kind, _error(out_BTD, want), _error(alone_BTD, want), forced_error, agreement, gap)
        self._finish(x_BTD, ours)

    def _finish(self, x_BTD: jax.Array, ours: list[jax.Array]) -> None:
        want = self._reference.logits_BTW
        if want is None:
            return
        head = {name: self._read(("params", name)) for name in ("final_norm", "head")}
        if self._config.attn_res != "none":
            head |= {name: self._read(("params", name)) for name in ("output_res_query", "output_res_gain")}
        self.logits_error = _error(self._logits(head, x_BTD, ours), want)
        if self._reference.layers_NBTD is not None:
            theirs = [jnp.asarray(y, self._dtype) for y in self._reference.layers_NBTD]
            self.head_error = _error(self._logits(head, x_BTD, theirs), want)

    def _logits(self, head: dict[str, jax.Array], x_BTD: jax.Array, outs: list[jax.Array]) -> jax.Array:
        c = self._config
        h_BTD = outs[-1]
        if c.attn_res != "none":
            sources = jnp.stack([x_BTD, *self._blocks(outs), outs[-1]], axis=2)
            if c.num_layers % c.attn_res_block_size == 0:  # the last block is whole: already among the blocks
                sources = sources[:, :, :-1]
            mix = attention_residual(sources, head["output_res_query"], head["output_res_gain"], eps=c.rms_norm_eps)
            h_BTD = mix.mix_BTD
        h_BTD = rms_norm(h_BTD, head["final_norm"], c.rms_norm_eps)
        return jnp.einsum(
            "BTD,DW->BTW", h_BTD, head["head"].astype(self._dtype),
            precision=exact(self._dtype), preferred_element_type=wide_dtype(self._dtype),
        )  # fmt: skip

    def _inputs(self, x_BTD: jax.Array, outs: list[jax.Array], i: int) -> tuple[Any, Any, Any]:
        """(memory_BTRD, partial_BTD, mask_R) of layer i from 0, out of the embedding and the layers before it.

        The memory always has room for every block, and the sum at a block's start is masked zeros: one shape, so that
        layers of a kind are compiled once.
        """
        c = self._config
        if c.attn_res == "none":
            return None, outs[i - 1] if i else x_BTD, None
        size = c.attn_res_block_size
        known = [x_BTD, *self._blocks(outs[:i])]
        room = -(-c.num_layers // size)
        memory_BTRD = jnp.stack(known + [jnp.zeros_like(x_BTD)] * (room - len(known)), axis=2)
        inside = i % size != 0
        mask_R = jnp.asarray([r < len(known) for r in range(room)] + [inside])
        return memory_BTRD, outs[i - 1] if inside else jnp.zeros_like(x_BTD), mask_R

    def _blocks(self, outs: list[jax.Array]) -> list[jax.Array]:
        size = self._config.attn_res_block_size
        return [outs[j] for j in range(size - 1, len(outs), size)]

    def _run(self, kind: LayerKind, variables: dict, inputs: tuple, ids_TS: np.ndarray | None):
        """(the running sum after the layer, its routing or None)."""
        if ids_TS is not None:
            variables = variables | {"forced_routing": {"moe": {"ids_TS": jnp.asarray(ids_TS)}}}
        return _step(self._config, self._dtype, kind)(variables, *inputs)

    def _layer(self, slot) -> dict[str, Any]:
        """The variables of one layer, read and cast."""
        variables: dict[str, Any] = {"params": {}, "router": {}}
        place = (slot.stage, slot.run, slot.layer)
        for path in self._source.leaves:
            if path[0] in variables and path[1:4] == place:
                node = variables[path[0]]
                for key in path[4:-1]:
                    node = node.setdefault(key, {})
                node[path[-1]] = self._read(path, (slot.block, slot.repeat))
        return variables

    def _read(self, path: Path, index: tuple[int, ...] = ()) -> jax.Array:
        dtype = np.promote_types(self._dtype, np.float32) if path[-1] in WIDE else self._dtype
        return jnp.asarray(self._source.read(path, index).astype(dtype))


@functools.lru_cache(maxsize=16)
def _step(config: ModelConfig, dtype: jnp.dtype, kind: LayerKind) -> Callable:
    """A compiled layer: variables and inputs to (running sum after it, its routing or None)."""
    layer = DecoderLayer(config, kind, dtype)

    def run(variables, memory_BTRD, partial_BTD, mask_R):
        out, recorded = layer.apply(variables, memory_BTRD, partial_BTD, mask_R, mutable=["intermediates"])
        return out.mixed_BTD + out.ffn_BTD, recorded["intermediates"].get("moe", {}).get("routing")

    return jax.jit(run)


def _agreement(routing: dict[str, jax.Array], theirs_TS: np.ndarray, bias_E: jax.Array) -> tuple[float, float]:
    """(share of choices that agree, largest gap at the border of tokens that do not)."""
    ours_TS, scores_TE = np.asarray(routing["ids_TS"]), np.asarray(routing["scores_TE"] + bias_E)
    S = theirs_TS.shape[1]
    same_T = (ours_TS[:, :, None] == theirs_TS[:, None, :]).any(2).sum(1)
    ranked_TE = -np.sort(-scores_TE, axis=1)
    gap_T = ranked_TE[:, S - 1] - ranked_TE[:, S] if ranked_TE.shape[1] > S else np.zeros(len(ranked_TE))
    other = same_T < S
    return float(same_T.mean() / S), float(gap_T[other].max()) if other.any() else 0.0


def _error(got: jax.Array, want: np.ndarray) -> float:
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    worst, scale = np.max(np.abs(got - want)), np.max(np.abs(want))  # NaN stays NaN
    return float(worst / scale) if scale else float(worst)
