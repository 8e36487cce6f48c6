"""The Kimi K3 family of language models."""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig
from k3jax.models.depth import Depth, append, reserve, source_mask
from k3jax.models.plan import Run, Stage, plan_layers
from k3jax.nn.attention_residual import depth_mix
from k3jax.nn.initial import initial_leaf, parameter
from k3jax.nn.layer import DecoderLayer
from k3jax.nn.layer_kind import LayerKind
from k3jax.nn.linear import record
from k3jax.ops.norms import rms_norm
from k3jax.ops.precision import exact, wide_dtype

Tree = dict[str, Any]

# What the backward pass finds saved. "layer": each layer's input; "dots": also its projections; "none": everything.
REMAT_POLICIES = {
    "layer": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

# Collections that a layer can hand back: balancing statistics, and whatever modules record.
OUTPUT_COLLECTIONS = ("router_stats", "intermediates")


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype of products and activations; "auto" is bfloat16 on accelerators and float32 on a CPU."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


class KimiK3(nn.Module):
    """A decoder of KDA and MLA layers with Attention Residuals and Stable LatentMoE (spec §2-§5).

    Parameters lie as params[stage][run][layer], each leaf with two leading axes [block, repeat]; `plan.layer_slots`
    tells where a layer's are. They do not depend on how the layers are computed (config.layer_loop, config.remat).
    Collection "router" holds the router biases in the same places. Recorded intermediates and balancing statistics
    come back with mutable=["intermediates"] or ["router_stats"], in the same places again.

    Attributes:
        config: architecture.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        output: Literal["logits", "hidden"] = "logits",
    ) -> jax.Array:
        """Runs the decoder.

        Args:
            tokens_BT: integers below config.vocab_size.
            segment_ids_BT: equal neighbours are one document, 0 is padding; None = each row is one document.
            output: "hidden" stops before the head, for losses that never hold all logits.
        Returns:
            logits_BTW in float32 or wider, or the final norm's output [B, T, D] in the compute dtype.
        Raises:
            ValueError: shapes that do not fit.
        """
        c = self.config
        if tokens_BT.ndim != 2 or (segment_ids_BT is not None and segment_ids_BT.shape != tokens_BT.shape):
            shapes = tokens_BT.shape, None if segment_ids_BT is None else segment_ids_BT.shape
            raise ValueError(f"KimiK3: tokens and segment ids must both be [B, T], got {shapes[0]} and {shapes[1]}")
        dtype = compute_dtype(c)
        embed_WD = parameter(self, "embed", (c.vocab_size, c.hidden_size))
        head_DW = parameter(self, "head", (c.hidden_size, c.vocab_size))

        x_BTD = jnp.take(embed_WD, tokens_BT, axis=0).astype(dtype)
        depth = Depth(None, partial_BTD=x_BTD) if c.attn_res == "none" else Depth(x_BTD[:, :, None])
        for index, stage in enumerate(plan_layers(c)):
            depth = self._stage(f"stage_{index}", stage, depth, segment_ids_BT, dtype)
        if depth.memory_BTRD is None:
            x_BTD = depth.partial_BTD
        else:
            x_BTD = depth_mix(self, "output_res", depth.memory_BTRD, None, None, c.rms_norm_eps)
        x_BTD = rms_norm(x_BTD, parameter(self, "final_norm", (c.hidden_size,)), c.rms_norm_eps)
        record(self, "final_norm_out", x_BTD)
        if output == "hidden":
            return x_BTD
        return jnp.einsum(
            "BTD,DW->BTW", x_BTD, head_DW.astype(dtype),
            precision=exact(dtype), preferred_element_type=wide_dtype(dtype),
        )  # fmt: skip

    def _stage(self, name: str, stage: Stage, depth: Depth, segment_ids_BT: jax.Array | None, dtype) -> Depth:
        """Runs a stage's blocks, scanned where there are several; while initialising, declares its variables only."""
        c = self.config
        if self.is_initializing():
            fresh = _init_stage(c, stage, self.make_rng("params"), dtype)
            for collection, tree in fresh.items():
                self.put_variable(collection, name, tree)
            return depth  # values are not needed yet, only variables
        params = self.get_variable("params", name)
        router = self.get_variable("router", name, {})
        collections = tuple(x for x in OUTPUT_COLLECTIONS if self.is_mutable_collection(x))
        runner = _Runner(c, dtype, segment_ids_BT, collections)

        if stage.repeats == 1:
            depth, out = runner.block(stage, _index(params, 0), _index(router, 0), depth)
            outputs = _stack([out])
        else:
            full = reserve(depth, stage.repeats)

            def body(carry, xs):
                new, out = runner.block(stage, *xs, Depth(*carry))
                return (new.memory_BTRD, new.mask_R), out

            (memory_BTRD, _), outputs = _loop(c, body, (full.memory_BTRD, full.mask_R), (params, router))
            depth = Depth(memory_BTRD)
        for collection in collections:
            self.put_variable(collection, name, _pick(outputs, collection))
        return depth


class _Runner:
    """Runs blocks of layers as pure functions of their variables."""

    def __init__(self, config: ModelConfig, dtype, segment_ids_BT: jax.Array | None, collections: tuple[str, ...]):
        self.config, self.dtype, self.collections = config, dtype, collections
        self.segment_ids_BT = segment_ids_BT

    def block(self, stage: Stage, params: Tree, router: Tree, depth: Depth) -> tuple[Depth, Tree]:
        """One block: its layers read the memory as it is at the start, and their sum becomes one more source."""
        outputs = {}
        for r, run in enumerate(stage.runs):
            run_params, run_router = params[f"run_{r}"], router.get(f"run_{r}", {})
            if run.repeats == 1:
                scanned = self.config.layer_loop == "scan" and stage.repeats > 1
                depth, out = self._group(run, _index(run_params, 0), _index(run_router, 0), depth, scanned)
                outputs[f"run_{r}"] = _stack([out])
            else:
                depth, outputs[f"run_{r}"] = self._repeat(run, run_params, run_router, depth)
        if self.config.attn_res == "block":
            depth = append(depth, depth.partial_BTD)._replace(partial_BTD=None)
        return depth, outputs

    def _repeat(self, run: Run, params: Tree, router: Tree, depth: Depth) -> tuple[Depth, Tree]:
        form, scanned = self.config.attn_res, self.config.layer_loop == "scan"
        if form == "full":  # every sublayer is a source: the memory itself is what the scan carries
            full = reserve(depth, 2 * run.num_layers)

            def grow(carry, xs):
                new, out = self._group(run, *xs, Depth(*carry), scanned)
                return (new.memory_BTRD, new.mask_R), out

            (memory_BTRD, _), outs = _loop(self.config, grow, (full.memory_BTRD, full.mask_R), (params, router))
            return Depth(memory_BTRD), outs
        # The memory does not change within a block: closed over, it is saved once for the backward pass.
        partial, started = depth.partial_BTD, depth.started
        if partial is None:
            partial, started = jnp.zeros_like(depth.memory_BTRD[:, :, 0]), jnp.zeros((), bool)

        def body(carry, xs):
            partial_BTD, begun = carry
            here = depth._replace(partial_BTD=partial_BTD, started=True if started is True else begun)
            new, out = self._group(run, *xs, here, scanned)
            return (new.partial_BTD, jnp.ones((), bool)), out

        (partial, _), outs = _loop(self.config, body, (partial, jnp.asarray(started)), (params, router))
        return depth._replace(partial_BTD=partial, started=True), outs

    def _group(self, run: Run, params: Tree, router: Tree, depth: Depth, scanned: bool) -> tuple[Depth, Tree]:
        """One pass of a run's layers; `scanned` tells whether a lax.scan, of the run or of the block, is around it."""
        outputs = {}
        for p, kind in enumerate(run.kinds):
            name = f"layer_{p}"
            depth, outputs[name] = self._layer(kind, params[name], router.get(name, {}), depth, scanned)
        return depth, outputs

    def _layer(self, kind: LayerKind, params: Tree, router: Tree, depth: Depth, scanned: bool) -> tuple[Depth, Tree]:
        layer = DecoderLayer(self.config, kind, self.dtype, parent=None)

        def run(params, router, memory, partial, mask, segment_ids):
            variables = {"params": params, "router": router}
            return layer.apply(variables, memory, partial, mask, segment_ids, mutable=list(self.collections))

        if self.config.remat != "none":
            # A scan's backward pass is a loop of its own, so nothing there can be merged with the recomputation;
            # outside of one the compiler would merge the two, and save what was to be recomputed.
            run = jax.checkpoint(run, policy=REMAT_POLICIES[self.config.remat], prevent_cse=not scanned)
        out, outputs = run(
            params, router, depth.memory_BTRD, depth.partial_BTD, source_mask(depth), self.segment_ids_BT
        )
        if self.config.attn_res == "full":
            return append(append(depth, out.mixed_BTD), out.ffn_BTD), outputs
        return depth._replace(partial_BTD=out.mixed_BTD + out.ffn_BTD, started=True), outputs


def _init_stage(config: ModelConfig, stage: Stage, key: jax.Array, dtype) -> Tree:
    """Fresh variables of a stage: each layer from its own key, stacked as [block, repeat]."""
    memory = None if config.attn_res == "none" else jnp.zeros((1, 1, 1, config.hidden_size), dtype)
    partial = jnp.zeros((1, 1, config.hidden_size), dtype) if memory is None else None
    variables: dict[str, Tree] = {"params": {}, "router": {}}
    for r, run in enumerate(stage.runs):
        for p, kind in enumerate(run.kinds):
            layer = DecoderLayer(config, kind, dtype, parent=None)
            key, layer_key = jax.random.split(key)
            keys = jax.random.split(layer_key, (stage.repeats, run.repeats))
            fresh = jax.vmap(jax.vmap(lambda k, layer=layer: layer.init(k, memory, partial)))(keys)
            for collection in variables:
                if collection in fresh:
                    variables[collection].setdefault(f"run_{r}", {})[f"layer_{p}"] = fresh[collection]
    return {collection: tree for collection, tree in variables.items() if tree}


def _loop(config: ModelConfig, body, carry, xs: Tree) -> tuple[Any, Tree]:
    """lax.scan, or the same steps traced one by one for debugging."""
    if config.layer_loop == "scan":
        return jax.lax.scan(body, carry, xs)
    outputs = []
    for i in range(len(jax.tree.leaves(xs)[0])):
        carry, out = body(carry, _index(xs, i))
        outputs.append(out)
    return carry, _stack(outputs)


def _index(tree: Tree, i: int) -> Tree:
    return jax.tree.map(lambda x: x[i], tree)


def _stack(trees: list[Tree]) -> Tree:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _pick(outputs: Tree, collection: str) -> Tree:
    """{run: {layer: {collection: values}}} to {run: {layer: values}}, without layers that have none."""
    picked = {
        run: {layer: out[collection] for layer, out in layers.items() if collection in out}
        for run, layers in outputs.items()
    }
    return {run: layers for run, layers in picked.items() if layers}


def init_variables(config: ModelConfig, seed: int = 0, sharding: jax.sharding.Sharding | None = None) -> Tree:
    """Fresh variables of `KimiK3(config)`: {"params": ..., "router": ...}, the same bits for the same seed.

    Args:
        config: architecture.
        seed: of every parameter.
        sharding: of every leaf; None = the default device.
    Returns:
        float32 parameters, and router biases of zero where the model has experts.
    Source: spec §1.5.
    """

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        keys = tuple(key.key for key in path)
        if keys[0] == "router":
            return jax.device_put(np.zeros(leaf.shape, np.float32), sharding)
        return initial_leaf(config, seed, keys[1:], leaf.shape, sharding)

    return jax.tree_util.tree_map_with_path(fill, variable_shapes(config))


def variable_shapes(config: ModelConfig) -> Tree:
    """The tree of `init_variables` as shapes and dtypes; nothing is computed.

    Args:
        config: architecture.
    Returns:
        jax.ShapeDtypeStruct in place of every array.
    """
    return jax.eval_shape(KimiK3(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
