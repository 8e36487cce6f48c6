"""`k3 ckpt gates`: how long KDA remembers, by head and channel, in tokens."""

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
    "Shows the half-life of every KDA head's channels in tokens: at rest, where the input adds nothing to the gate, "
    "and on held-out text where that is known."
)
EXAMPLE = "k3 ckpt gates runs/quickstart"
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    add_measure(parser)
    add_json(parser)
    add_pictures(parser)


def run(args: argparse.Namespace) -> int:
    """Prints and draws; returns the exit status."""
    import numpy as np

    from k3jax.checkpoint.inspect_model import gates

    source = open_checkpoint(args)
    layers = gates(source)
    diagnostics = measured(args, source)
    on_text = {}
    if diagnostics is not None and diagnostics.decay_counts_NJX.any():
        from k3jax.train.diagnostics import half_life_quantile

        on_text = dict(zip(diagnostics.kda_layers, half_life_quantile(diagnostics, 0.5).tolist(), strict=True))
    if args.json:
        entries = [
            {"layer": g.layer, "half_life": g.half_life_JK.tolist(), "median_on_text_by_head": on_text.get(g.layer)}
            for g in layers
        ]
        print_json({"checkpoint": describe(source), "unit": "tokens", "layers": entries})
        return 0
    heads = ["shortest", "10%", "median", "90%", "longest", "heads' medians from", "to"]
    rows = [("KDA layer", *heads, *(["on text: heads' medians from", "to"] if on_text else []))]
    for g in layers:
        by_head_J = np.median(g.half_life_JK, axis=1)
        cells = [*np.quantile(g.half_life_JK, QUANTILES).tolist(), by_head_J.min(), by_head_J.max()]
        if on_text:
            cells += [min(on_text[g.layer]), max(on_text[g.layer])]
        rows.append((str(g.layer), *(number(float(x)) for x in cells)))
    print(
        f"{describe(source)}: half-lives in tokens, at rest (of each channel where the input adds nothing to the gate)"
    )
    print_rows(rows, left=0)
    title = f"Decay of {describe(source)}"
    write_pictures(
        args, pictures_of(args, source, "gates"), title, _pictures(source, layers, diagnostics), text_rows(rows, 0)
    )
    return 0


def _pictures(source, layers, diagnostics):
    import math

    from k3jax.train import report_inside
    from k3jax.train.report_page import Picture
    from k3jax.train.report_style import png
    from launch.ckpt_plots import half_lives_at_rest

    config = source.config
    floor = math.log(2) / -config.kda_decay_lower_bound if config.kda_decay == "bounded" else None
    caption = (
        "Each head's channels from the shortest half-life to the longest, where the input adds nothing to the gate."
    )
    pictures = [
        Picture("at-rest", png(half_lives_at_rest, layers), "Heat maps of half-lives, channels by heads", caption)
    ]
    if diagnostics is not None and diagnostics.decay_counts_NJX.any():
        caption = f"Every channel of every head over {diagnostics.tokens:,} held-out tokens. Marked: the median."
        image = png(report_inside.half_lives, diagnostics, floor, None)
        pictures.append(Picture("on-text", image, "Histogram of half-lives for each KDA layer", caption))
        image = png(report_inside.half_life_by_head, diagnostics)
        caption = "Median over tokens and channels, in tokens."
        pictures.append(Picture("by-head", image, "Heat map of the median half-life, heads by KDA layers", caption))
    return pictures
