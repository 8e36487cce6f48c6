"""`k3 ckpt show`: the tree of a checkpoint, from its table of contents alone."""

import argparse
import functools
import math
import re
from typing import Any

from launch.ckpt_common import (
    add_checkpoint,
    add_json,
    add_match,
    describe,
    nbytes_text,
    print_json,
    select,
    shape_text,
)
from launch.tables import print_rows

HELP = "Shows every array of a checkpoint with shape, dtype, sharding and bytes, and totals by group. Reads no values."
EXAMPLE = "k3 ckpt show runs/quickstart --match=moe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    add_match(parser, "all")
    parser.add_argument(
        "--each", action="store_true", help="a line for every layer's tensor, not one for all layers of a kind"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the tree; returns the exit status."""
    from k3jax.checkpoint.hf_folder import Folder
    from k3jax.checkpoint.open import open_stored

    stored = open_stored(args.path, args.step)
    if isinstance(stored, Folder):
        if args.match is not None:  # before names are put together
            names = list(stored.tensors)
            found = {names[i]: stored.tensors[names[i]] for i in select(names, args.match)}
            stored = stored._replace(tensors=found)
        entries, title = (_released if args.each else _collapsed)(stored), str(stored.path)
    else:
        entries, title = (_each if args.each else _leaves)(stored), describe(stored)
        entries = [entries[i] for i in select([entry["name"] for entry in entries], args.match)]
    groups: dict[str, dict[str, int]] = {}
    for entry in entries:
        group = groups.setdefault(entry["group"], {"arrays": 0, "values": 0, "bytes": 0})
        group["arrays"] += entry["count"]
        group["values"] += entry["count"] * math.prod(entry["shape"])
        group["bytes"] += entry["bytes"]
    total = {key: sum(group[key] for group in groups.values()) for key in ("arrays", "values", "bytes")}
    if args.json:
        print_json({"checkpoint": title, "arrays": entries, "groups": groups, "total": total})
        return 0
    print(title)
    sharded = any(entry["sharding"] for entry in entries)
    rows = [("array", *(["sharding"] if sharded else []), "shape", "dtype", "bytes")]
    for entry in entries:
        count = f" x{entry['count']:,}" if entry["count"] > 1 else ""
        where = [entry["sharding"]] if sharded else []
        size = nbytes_text(entry["bytes"])
        rows.append((entry["name"], *where, shape_text(entry["shape"]) + count, entry["dtype"], size))
    print_rows(rows, left=2 if sharded else 1)
    print()
    rows = [("group", "arrays", "values", "bytes")]
    for name, group in [*groups.items(), ("all", total)]:
        rows.append((name, f"{group['arrays']:,}", f"{group['values']:,}", nbytes_text(group["bytes"])))
    print_rows(rows, last_is_sum=True)
    return 0


def _entry(
    name: str, group: str, shape: tuple, dtype: str, nbytes: int, sharding: str, count: int = 1
) -> dict[str, Any]:
    return {
        "name": name, "group": group, "shape": list(shape), "dtype": dtype, "bytes": nbytes, "sharding": sharding,
        "count": count,
    }  # fmt: skip


def _leaves(source) -> list[dict[str, Any]]:
    return [
        _entry("/".join(path), _group(path), leaf.shape, leaf.dtype.name, leaf.size, leaf.sharding)
        for path, leaf in source.leaves.items()
    ]


def _each(source) -> list[dict[str, Any]]:
    from k3jax.checkpoint.source import tensors

    entries = []
    for tensor in tensors(source):
        leaf = source.leaves[tensor.path]
        nbytes = math.prod(tensor.shape) * leaf.dtype.itemsize
        entries.append(_entry(tensor.name, _group(tensor.path), tensor.shape, leaf.dtype.name, nbytes, leaf.sharding))
    return entries


def _group(path: tuple[str, ...]) -> str:
    """Collection and component: "params/kda"; of the optimiser, what it remembers: "opt_state/momentum"."""
    if path[0] not in ("params", "router"):
        return "/".join(path[:2]) if path[0] == "opt_state" else path[0]
    if not any(key.startswith("stage_") for key in path):
        return f"{path[0]}/{path[-1]}"
    keys = path[4:]
    if len(keys) == 1:
        return f"{path[0]}/norms and depth queries"
    return f"{path[0]}/{keys[0]}{' experts' if keys[-1].startswith('expert_') else ''}"


def _released(folder) -> list[dict[str, Any]]:
    """Tensors under their released names, in the order of layers and experts."""
    entries = []
    for name, tensor in folder.tensors.items():
        parts = NUMBER.split(name)
        entry = _entry(name, _released_group(tuple(parts[::2])), tensor.shape, tensor.dtype, tensor.nbytes, "")
        entries.append((_order(parts), entry))
    return [entry for _, entry in sorted(entries, key=lambda item: item[0])]


def _collapsed(folder) -> list[dict[str, Any]]:
    """Tensors that differ by numbers only (layer, expert) in one line, with the numbers' ranges."""
    together: dict[tuple, list] = {}
    for name, tensor in folder.tensors.items():  # half a million in Kimi K3: one pass, little for each
        parts = NUMBER.split(name)
        key = (tuple(parts[::2]), tensor.shape, tensor.dtype)
        members = together.setdefault(key, [0, 0, []])
        members[0] += 1
        members[1] += tensor.nbytes
        members[2].append(tuple(parts[1::2]))
    lines = []
    for (words, shape, dtype), (count, nbytes, numbers) in together.items():
        spans = [(min(ns), max(ns)) for ns in ({int(n) for n in set(column)} for column in zip(*numbers, strict=True))]
        texts = [str(low) if low == high else f"{{{low}..{high}}}" for low, high in spans]
        name = words[0] + "".join(text + word for text, word in zip(texts, words[1:], strict=True))
        first = [part for pair in zip(words, [*(str(low) for low, _ in spans), ""], strict=True) for part in pair][:-1]
        lines.append((_order(first), _entry(name, _released_group(words), shape, dtype, nbytes, "", count)))
    return [entry for _, entry in sorted(lines, key=lambda item: item[0])]


NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")  # of a layer or an expert


def _order(parts: list[str]) -> list:
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


@functools.cache
def _released_group(words: tuple[str, ...]) -> str:
    """Which component a released name belongs to, from its words without numbers."""
    keys = ".".join(word.strip(".") for word in words).split(".")
    group = ".".join(key for key in keys[:-1] if key not in ("language_model", "model", "layers"))
    return re.sub(r"\.(w\d|[a-z_]+proj|[qkv]_conv1d)$", "", group) or keys[-1]
