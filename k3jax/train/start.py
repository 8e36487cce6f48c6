"""Parameters to begin with from a checkpoint, whole or in part: what was taken and what is fresh is always told.

Tensors are matched by layer, not by leaf, so that a model may be started from one with other layers beside it.
"""

import dataclasses
import difflib
import fnmatch
import math
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import numpy as np

from k3jax.checkpoint.hf_aside import ASIDE, keep_aside, kept_aside
from k3jax.checkpoint.hf_config import NOT_STORED
from k3jax.checkpoint.hf_layout import hf_tensors, leaf_shapes
from k3jax.checkpoint.hf_source import ReleasedSource
from k3jax.checkpoint.open import open_any
from k3jax.checkpoint.source import Leaf, Path, Source, Tensor, tensors
from k3jax.config import Config, ModelConfig
from k3jax.errors import UserError

RECORD = "init_from.txt"  # in the run directory


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
        source: the checkpoint.
        taken: (tensor of the new model, the checkpoint's), in the new model's order.
        fresh: tensors that are drawn at random.
        differences: settings of the two models that differ, a line each.
    """

    source: Source
    taken: list[tuple[Tensor, Tensor]]
    fresh: list[Tensor]
    differences: list[str]

    def summary(self) -> str:
        """One line."""
        values = sum(math.prod(ours.shape) for ours, _ in self.taken)
        rest = f"{len(self.fresh)} fresh" if self.fresh else "none fresh"
        return f"from {self.source.path}: {len(self.taken)} tensors taken ({values:,} values), {rest}; see {RECORD}"

    def record(self) -> str:
        """Every tensor by name; those that differ in the layer only share a line."""
        lines = [f"began with {self.source.path}"]
        lines += [f"differs from it: {line}" for line in self.differences]
        for title, names in (("taken", [t.name for t, _ in self.taken]), ("fresh", [t.name for t in self.fresh])):
            lines += ["", f"{title}: {len(names)} tensors"]
            groups: dict[tuple[str, str], list[str]] = {}
            for name in names:
                before, layer, after = re.fullmatch(r"(.*?)(?:layer (\d+)/)?([^ ]*)", name).groups()
                groups.setdefault((before, after), []).extend([layer] if layer else [])
            for (before, after), layers in groups.items():
                where = f"   layers {', '.join(layers)}" if layers else ""
                lines.append(f"  {before}{'layer */' if layers else ''}{after}{where}")
        return "\n".join(lines) + "\n"


def plan_start(config: Config) -> Start:
    """Finds what TrainConfig.init_from gives to a run; reads no values.

    Args:
        config: a whole run; train.init_from is not None. train.init_tensors are patterns such as "params/layer */kda/*"
            for the names that `k3 ckpt stats` prints; what one of them matches must be in the checkpoint.
    Returns:
        Start.
    Raises:
        UserError: no checkpoint there, a pattern that matches nothing, or tensors that the checkpoint lacks or has in
            another shape, all listed.
    """
    source = open_any(config.train.init_from)
    theirs = {tensor.name: tensor for tensor in tensors(source)}
    wanted: list[Tensor] = []
    fresh: list[Tensor] = []
    patterns = config.train.init_tensors
    ours = tensors(_Shapes(config.model))
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(tensor.name, pattern) for tensor in ours):
            near = difflib.get_close_matches(pattern, [tensor.name for tensor in ours], n=1, cutoff=0)
            raise UserError(f"TrainConfig.init_tensors: no tensor is called {pattern!r}; there is {near[0]!r}")
    for tensor in ours:
        taken = any(fnmatch.fnmatchcase(tensor.name, pattern) for pattern in patterns)
        (wanted if taken else fresh).append(tensor)
    lines = []
    for tensor in wanted:
        found = theirs.get(tensor.name)
        if found is None:
            near = difflib.get_close_matches(tensor.name, theirs, n=1)
            lines.append(f"  {tensor.name}: not there" + (f"; nearest: {near[0]}" if near else ""))
        elif found.shape != tensor.shape:
            lines.append(f"  {tensor.name}: {list(found.shape)} there, {list(tensor.shape)} in the model")
    if lines:
        more = [f"  ... and {len(lines) - 50} more"] if len(lines) > 50 else []
        heading = f"TrainConfig.init_from = {config.train.init_from!r}: not all of the model is in it; "
        heading += "name what to take in TrainConfig.init_tensors, or give the ModelConfig of the checkpoint:"
        raise UserError("\n".join([heading, *lines[:50], *more]))
    pairs = [(tensor, theirs[tensor.name]) for tensor in wanted]
    return Start(source, pairs, fresh, _differences(source.config, config.model))


def load_start(start: Start, shapes: dict[str, Any], fresh: dict[str, Any] | None) -> dict[str, Any]:
    """Reads a run's first variables, each process the bytes that its devices hold.

    Args:
        start: from `plan_start`.
        shapes: jax.ShapeDtypeStruct with shardings, in the form of the variables.
        fresh: variables drawn at random, needed if start.fresh is not empty; their buffers may be freed.
    Returns:
        Variables in the dtypes and shardings of `shapes`.
    Raises:
        UserError: damaged files.
    """
    import jax

    pairs: dict[Path, dict[tuple[int, ...], Tensor]] = {}
    for ours, theirs in start.taken:
        pairs.setdefault(ours.path, {})[ours.index] = theirs
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    drawn = [None] * len(leaves) if fresh is None else jax.tree.leaves(fresh)
    out = []
    for i, (keys, like) in enumerate(leaves):
        path = tuple(key.key for key in keys)
        out.append(_leaf(start.source, like, pairs.get(path, {}), drawn[i]))
        drawn[i] = None
    return jax.tree.unflatten(tree, out)


def keep_beside(start: Start, run: pathlib.Path) -> None:
    """Copies what the checkpoint holds beside the model into the run, for an export: vision tensors, tokeniser."""
    folder = run / ASIDE
    if isinstance(start.source, ReleasedSource):
        keep_aside(start.source, folder)
        return
    kept = kept_aside(start.source)
    if kept is not None and not folder.exists():
        shutil.copytree(kept, folder)


class _Shapes:
    """A model's leaves by shape alone, as a Source that cannot be read."""

    def __init__(self, config: ModelConfig):
        shapes = leaf_shapes(config, hf_tensors(config, ""))
        self.config = config
        self.leaves = {path: Leaf(shape, np.dtype(np.float32), 0) for path, shape in shapes.items()}


def _leaf(source: Source, like, parts: dict[tuple[int, ...], Tensor], drawn):
    """One leaf of the variables: parts from the checkpoint, the others as drawn."""
    import jax

    if not parts:
        return drawn
    lead = len(next(iter(parts)))
    whole = len(parts) == math.prod(like.shape[:lead])

    def box_of(index) -> tuple[tuple[int, int], ...]:
        return tuple(part.indices(n)[:2] for part, n in zip(index, like.shape, strict=True))

    here = {} if whole else {box_of(shard.index): shard.data for shard in drawn.addressable_shards}
    done: dict[tuple, np.ndarray] = {}  # devices that hold the same part share one reading of it

    def read(index) -> np.ndarray:
        box = box_of(index)
        if box not in done:
            counts = [last - first for first, last in box]
            out = np.empty(counts, like.dtype) if whole else np.array(here[box])
            for at in np.ndindex(*counts[:lead]):
                theirs = parts.get(tuple(i + first for i, (first, _) in zip(at, box[:lead], strict=True)))
                if theirs is not None:
                    out[at] = source.read(theirs.path, (*theirs.index, *(slice(*span) for span in box[lead:])))
            done[box] = out
        return done[box]

    return jax.make_array_from_callback(like.shape, like.sharding, read)


def _differences(theirs: ModelConfig | None, ours: ModelConfig) -> list[str]:
    """Settings that change what the model computes; shapes are compared tensor by tensor."""
    if theirs is None:
        return []
    skip = NOT_STORED | {"init_std", "kda_per_mla", "last_layer", "mla_layers"}  # which layers there are, shows by name
    fields = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in skip]
    pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in fields]
    return [f"ModelConfig.{name}: {before!r} -> {after!r}" for name, before, after in pairs if before != after]
