"""`k3 ckpt attnres`: what each sublayer reads over depth."""

import argparse

from launch.ckpt_common import (
    add_checkpoint,
    add_json,
    add_pictures,
    describe,
    number,
    open_checkpoint,
    pictures_of,
    print_json,
    write_pictures,
)
from launch.ckpt_measured import add_measure, measured
from launch.tables import print_rows, text_rows

HELP = (
    "Shows Attention Residuals: how sharp each sublayer's query over depth is, and the weights it gives its sources on "
    "held-out text where those are known."
)
EXAMPLE = "k3 ckpt attnres runs/quickstart --html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    add_measure(parser)
    add_json(parser)
    add_pictures(parser)


def run(args: argparse.Namespace) -> int:
    """Prints and draws; returns the exit status."""
    import numpy as np

    from k3jax.checkpoint.inspect_model import depth_queries

    source = open_checkpoint(args)
    queries = depth_queries(source)
    diagnostics = measured(args, source)
    weights = dict(zip(diagnostics.consumers, diagnostics.weights_QR, strict=True)) if diagnostics else {}
    entries = []
    for query in queries:
        entry = {"consumer": query.name, "query_norm": float(np.linalg.norm(query.query_D))}
        if query.name in weights:
            row_R = weights[query.name]
            known_R = ~np.isnan(row_R)
            known = {s: float(w) for s, w, k in zip(diagnostics.sources, row_R, known_R, strict=True) if k}
            entry["weights"] = known
        entries.append(entry)
    if args.json:
        print_json(
            {"checkpoint": describe(source), "tokens": diagnostics.tokens if diagnostics else 0, "consumers": entries}
        )
        return 0
    rows = [("reads", "query norm", "reads most", "weight", "sources", "of even weights' entropy")]
    for entry in entries:
        known = entry.get("weights")
        if known:
            most = max(known, key=known.get)
            p = np.array(list(known.values()))
            even = -np.sum(p * np.log(np.maximum(p, 1e-30))) / np.log(len(p)) if len(p) > 1 else 1.0
            cells = (most, f"{known[most]:.3f}", str(len(known)), f"{even:.1%}")
        else:
            cells = ("-",) * 4
        rows.append((entry["consumer"], number(entry["query_norm"]), *cells))
    print(describe(source))
    print_rows(rows)
    pictures = _pictures(queries, diagnostics)
    if diagnostics is None:
        print("A query of norm 0 weighs all sources the same. Weights need text: of a run, --measure reads its own.")
    else:
        print(f"Weights: means over {diagnostics.tokens:,} tokens of held-out text.")
    title = f"Attention Residuals of {describe(source)}"
    write_pictures(args, pictures_of(args, source, "attnres"), title, pictures, text_rows(rows))
    return 0


def _pictures(queries, diagnostics):
    from k3jax.train import report_inside
    from k3jax.train.report_page import Picture
    from k3jax.train.report_style import png
    from launch.ckpt_plots import query_norms

    alternative = "Lines of the depth queries' norms over layers"
    caption = "2-norm of query times gain: 0 gives every source the same weight, more makes a sharper choice."
    pictures = [Picture("queries", png(query_norms, queries), alternative, caption)]
    if diagnostics is not None and diagnostics.consumers:
        caption = f"Mean softmax weights over {diagnostics.tokens:,} held-out tokens."
        image = png(report_inside.depth_weights, diagnostics)
        pictures.append(Picture("weights", image, "Heat maps of depth weights, layers by sources", caption))
    return pictures
