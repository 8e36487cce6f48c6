"""`k3 ckpt diff`: how two checkpoints differ."""

import argparse
import math

from launch.ckpt_common import (
    MODEL,
    add_json,
    add_match,
    add_pictures,
    describe,
    number,
    pictures_of,
    print_json,
    progress,
    select,
    shape_text,
    write_pictures,
)
from launch.tables import print_rows, text_rows

HELP = "Compares two checkpoints: their tensors and shapes, then how far each tensor has moved, the farthest first."
EXAMPLE = "k3 ckpt diff runs/quickstart/checkpoints/140 runs/quickstart"
LISTED = 10  # names of one kind of structural difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    for name in "ab":
        parser.add_argument(
            name, metavar=name.upper(), help="a run's directory (its newest), a step's folder, or a released checkpoint"
        )
    add_match(parser, "parameters and router biases")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="how many tensors to print; 0 = all (20)")
    add_json(parser)
    add_pictures(parser)


def run(args: argparse.Namespace) -> int:
    """Compares, prints and draws; returns the exit status."""
    from k3jax.checkpoint.inspect_diff import change, compare_structure
    from k3jax.checkpoint.open import open_any
    from k3jax.checkpoint.source import tensors

    a, b = open_any(args.a), open_any(args.b)
    of_a, of_b = tensors(a), tensors(b)
    names = [t.name for t in of_a] + [t.name for t in of_b if t.name not in {x.name for x in of_a}]
    wanted = {names[i] for i in select(names, args.match, MODEL)}
    structure = compare_structure(a, b, [t for t in of_a if t.name in wanted], [t for t in of_b if t.name in wanted])
    changes = [change(a, b, x, y) for x, y in progress(structure.common, "comparing")]
    changes.sort(key=lambda c: (not math.isnan(c.relative), -c.relative))
    if args.json:
        found = {key: value for key, value in structure._asdict().items() if key != "common"}
        print_json({"a": describe(a), "b": describe(b), **found, "changes": [c._asdict() for c in changes]})
        return 0
    print(f"A  {describe(a)}\nB  {describe(b)}")
    differences = {
        "only in A": structure.only_a,
        "only in B": structure.only_b,
        "another shape": [f"{n}: {shape_text(x)} -> {shape_text(y)}" for n, x, y in structure.reshaped],
        "another dtype": [f"{n}: {x} -> {y}" for n, x, y in structure.retyped],
    }
    for what, lines in differences.items():
        if lines:
            print(f"{what}: {len(lines)}")
            print("\n".join(f"  {line}" for line in lines[:LISTED]))
            if len(lines) > LISTED:
                print(f"  ... and {len(lines) - LISTED} more")
    same = sum(c.changed == 0 for c in changes)
    print(f"{len(changes)} tensors of one name and shape: {same} are equal, {len(changes) - same} differ")
    rows = [("tensor", "shape", "|B - A| / |A|", "|B - A|", "largest change", "values that differ")]
    for c in changes:
        share = f"{c.changed / max(math.prod(c.shape), 1):.1%}"
        rows.append((c.name, shape_text(c.shape), number(c.relative), number(c.norm), number(c.largest), share))
    shown = rows if args.top == 0 else rows[: args.top + 1]
    if len(rows) > 1:
        print_rows(shown)
    if len(shown) < len(rows):
        print(f"... and {len(rows) - len(shown)} more; --top=0 prints all")
    pictures = []
    drawn = {(c.name.split("/", 2)[2], c.layer): c.relative for c in changes if c.layer and 0 < c.relative < math.inf}
    if drawn:
        from k3jax.train.report_page import Picture
        from k3jax.train.report_style import png
        from launch.ckpt_plots import over_depth

        image = png(over_depth, drawn, "Relative change by layer", "|B - A| / |A|")
        alternative = "Heat map of relative change, tensors by layers"
        pictures.append(Picture("change", image, alternative, "Grey: no such tensor in this layer, or no change."))
    title = f"{describe(b)} against {describe(a)}"
    write_pictures(args, pictures_of(args, b, "diff"), title, pictures, text_rows(rows))
    return 0
