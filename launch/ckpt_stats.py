"""`k3 ckpt stats`: norms, dead rows and spectral norms of every tensor, and how they run over depth."""

import argparse
import math

from launch.ckpt_common import (
    MODEL,
    add_checkpoint,
    add_json,
    add_match,
    add_pictures,
    describe,
    number,
    open_checkpoint,
    pictures_of,
    print_json,
    progress,
    select,
    shape_text,
    write_pictures,
)
from launch.tables import print_rows, text_rows

HELP = "Measures every tensor: norm, largest value, dead rows and columns, spectral norm; draws them over depth."
EXAMPLE = "k3 ckpt stats runs/quickstart --match=kda"
COLUMNS = ("tensor", "shape", "dtype", "norm", "rms", "absmax", "spectral", "dead in", "dead out", "not finite")
DRAWN = {"rms": "Root mean square", "absmax": "Largest absolute value", "spectral": "Spectral norm (estimate)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    add_match(parser, "parameters and router biases")
    parser.add_argument(
        "--passes", type=int, metavar="N", help="passes of the spectral norm over each matrix; 0 leaves it out (8)"
    )
    add_json(parser)
    add_pictures(parser)


def run(args: argparse.Namespace) -> int:
    """Measures, prints and draws; returns the exit status."""
    from k3jax.checkpoint.inspect_stats import PASSES, tensor_stats
    from k3jax.checkpoint.source import tensors
    from k3jax.errors import UserError

    passes = PASSES if args.passes is None else args.passes
    if passes < 0:
        raise UserError(f"--passes={passes}: give 0 or more")
    source = open_checkpoint(args)
    found = tensors(source)
    found = [found[i] for i in select([tensor.name for tensor in found], args.match, MODEL)]
    stats = [tensor_stats(source, tensor, passes) for tensor in progress(found, "reading")]
    if args.json:
        print_json({"checkpoint": describe(source), "tensors": [s._asdict() for s in stats]})
        return 0
    rows = [COLUMNS]
    for s in stats:
        values = [number(value) for value in (s.norm, s.rms, s.absmax, s.spectral)]
        counts = [f"{n:,}" if n else "-" for n in (s.dead_inputs, s.dead_outputs, s.nonfinite)]
        rows.append((s.name, shape_text(s.shape), s.dtype, *values, *counts))
    print(describe(source))
    print_rows(rows)
    pictures = []
    layered = [s for s in stats if s.layer]
    if layered:
        from k3jax.train.report_page import Picture
        from k3jax.train.report_style import png
        from launch.ckpt_plots import over_depth

        for field, title in DRAWN.items():
            values = {(s.name.split("/", 2)[2], s.layer): getattr(s, field) for s in layered}
            values = {key: value for key, value in values.items() if math.isfinite(value) and value > 0}
            if values:
                alternative = f"Heat map of {title.lower()}, tensors by layers"
                image = png(over_depth, values, f"{title} by layer", title.lower())
                pictures.append(Picture(field, image, alternative, "Grey: no such tensor in this layer, or zero."))
    title = f"Tensors of {describe(source)}"
    write_pictures(args, pictures_of(args, source, "stats"), title, pictures, text_rows(rows))
    return 0
