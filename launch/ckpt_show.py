"""`k3 ckpt show`: the tree of a checkpoint, from its table of contents alone."""

import argparse
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
        entries, title = _released(stored), str(stored.path)
        if not args.each:
            entries = _collapse(entries)
    else:
        entries, title = _each(stored) if args.each else _leaves(stored), describe(stored)
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

    def order(name: str) -> list:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    entries = []
    for name in sorted(folder.tensors, key=order):
        tensor = folder.tensors[name]
        words = re.sub(r"\.\d+\.", ".", name).split(".")
        group = ".".join(word for word in words[:-1] if word not in ("language_model", "model", "layers"))
        group = re.sub(r"\.(w\d|[a-z_]+proj|[qkv]_conv1d)$", "", group) or words[-1]
        entries.append(_entry(name, group, tensor.shape, tensor.dtype, tensor.nbytes, ""))
    return entries


def _collapse(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensors that differ by numbers only (layer, expert) in one line, with the numbers' ranges."""
    together: dict[tuple, list[dict[str, Any]]] = {}
    for entry in entries:
        form = re.sub(r"(?<=\.)\d+(?=\.)", "{}", entry["name"])
        together.setdefault((form, tuple(entry["shape"]), entry["dtype"]), []).append(entry)
    lines = []
    for (form, _, _), members in together.items():
        numbers = [[int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", entry["name"])] for entry in members]
        spans = [f"{min(n)}" if min(n) == max(n) else f"{{{min(n)}..{max(n)}}}" for n in zip(*numbers, strict=True)]
        nbytes = sum(entry["bytes"] for entry in members)
        lines.append(members[0] | {"name": form.format(*spans), "count": len(members), "bytes": nbytes})
    return lines
