"""`k3 ckpt scan`: whether a checkpoint holds values that are not finite, or that bfloat16 will not survive."""

import argparse

from launch.ckpt_common import (
    add_checkpoint,
    add_json,
    add_match,
    describe,
    number,
    open_checkpoint,
    print_json,
    progress,
    select,
)
from launch.tables import print_rows

HELP = (
    "Looks at every value, the optimiser's too, for NaN, infinity, what bfloat16 rounds to infinity, and what "
    "overflows when it is squared (above 2^64). Exit status 1 if there is any, 0 if there is none."
)
EXAMPLE = "k3 ckpt scan runs/quickstart"
FIELDS = ("nonfinite", "infinite_in_bf16", "risky")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    add_match(parser, "all")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Scans and prints; returns the exit status."""
    from k3jax.checkpoint.inspect_stats import tensor_stats
    from k3jax.checkpoint.source import tensors
    from k3jax.errors import UserError

    source = open_checkpoint(args)
    found = tensors(source)
    found = [found[i] for i in select([tensor.name for tensor in found], args.match)]
    found = [
        tensor for tensor in found if source.leaves[tensor.path].dtype.kind not in "biu"
    ]  # step counters are finite
    stats = [tensor_stats(source, tensor, passes=0) for tensor in progress(found, "reading")]
    bad = [s for s in stats if any(getattr(s, field) for field in FIELDS)]
    if not stats:
        raise UserError(f"--match={args.match}: integers only, which are always finite; match weights")
    values, largest = sum(s.size for s in stats), max(stats, key=lambda s: s.absmax)
    if args.json:
        listed = [{"name": s.name, **{field: getattr(s, field) for field in (*FIELDS, "absmax")}} for s in bad]
        summary = {"tensors": len(stats), "values": values, "absmax": largest.absmax, "absmax_in": largest.name}
        print_json({"checkpoint": describe(source), **summary, "bad": listed})
        return 1 if bad else 0
    print(f"{describe(source)}: {values:,} values in {len(stats):,} tensors")
    if bad:
        rows = [("tensor", "not finite", "infinite in bf16", "above 2^64", "largest finite", "values")]
        for s in bad:
            counts = [f"{getattr(s, field):,}" if getattr(s, field) else "-" for field in FIELDS]
            rows.append((s.name, *counts, number(s.absmax), f"{s.size:,}"))
        print_rows(rows)
    print(f"largest finite value {largest.absmax:.4g} in {largest.name}")
    print(f"{len(bad):,} tensors are at fault" if bad else "all values are finite and safe in bfloat16")
    return 1 if bad else 0
