"""`k3 ckpt experts`: router bias, load, and experts that are dead or alike, layer by layer."""

import argparse
import json
import pathlib

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
from launch.tables import print_rows, text_rows

HELP = (
    "Shows each MoE layer's experts: router bias, load where the run logged it, experts that are dead (no token came, "
    "or weights of zero) and twins (nearly the same weights)."
)
EXAMPLE = "k3 ckpt experts runs/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    add_json(parser)
    add_pictures(parser)


def run(args: argparse.Namespace) -> int:
    """Prints and draws; returns the exit status."""
    import numpy as np

    from k3jax.checkpoint.inspect_model import experts

    source = open_checkpoint(args)
    layers = experts(source)
    at, loads = _loads(source)
    loads = {
        layer.layer: loads[layer.layer] for layer in layers if len(loads.get(layer.layer, ())) == len(layer.bias_E)
    }
    entries = []
    for layer in layers:
        load_E = np.array(loads.get(layer.layer, ()), float)
        idle = np.flatnonzero(load_E == 0).tolist() if load_E.sum() else []
        relative_E = load_E / load_E.mean() if load_E.sum() else None
        entries.append(
            {
                "layer": layer.layer,
                "bias": layer.bias_E.tolist(),
                "load": None if relative_E is None else relative_E.tolist(),
                "router_norm": layer.router_E.tolist(),
                "weight_rms": layer.weight_E.tolist(),
                "dead": sorted({*layer.dead, *idle}),
                "twins": [list(twin) for twin in layer.twins],
            }
        )
    if args.json:
        print_json({"checkpoint": describe(source), "load_at_step": at, "layers": entries})
        return 0
    rows = [("layer", "bias from", "to", "load from", "to", "MaxVio", "weights rms from", "to", "dead", "twins")]
    for e in entries:
        spans = [number(x) for x in (min(e["bias"]), max(e["bias"]))]
        spans += (
            [f"{min(e['load']):.2f}", f"{max(e['load']):.2f}", f"{max(e['load']) - 1:.2f}"] if e["load"] else ["-"] * 3
        )
        spans += [number(x) for x in (min(e["weight_rms"]), max(e["weight_rms"]))]
        rows.append((str(e["layer"]), *spans, str(len(e["dead"]) or "-"), str(len(e["twins"]) or "-")))
    print(describe(source))
    print_rows(rows, left=0)
    for e in entries:
        if e["dead"]:
            print(f"layer {e['layer']}: dead experts {', '.join(str(i + 1) for i in e['dead'])}")
        for a, b, cosine in e["twins"]:
            print(f"layer {e['layer']}: experts {a + 1} and {b + 1} are twins (cosine {cosine:.3f})")
    if at is None:
        print("No load is known: a run logs it, a released checkpoint does not.")
    else:
        print(f"Loads: over the mean load of the layer, at step {at}, one training step.")
    from k3jax.train.report_page import Picture
    from k3jax.train.report_style import png
    from launch.ckpt_plots import expert_maps

    caption = "Loads and weights: over the mean of the layer. Crosses: dead experts. Bias: added to scores to choose."
    pictures = [Picture("map", png(expert_maps, entries), "Heat maps of load, bias and weights by layer", caption)]
    title = f"Experts of {describe(source)}"
    write_pictures(args, pictures_of(args, source, "experts"), title, pictures, text_rows(rows, 0))
    return 0


def _loads(source) -> tuple[int | None, dict[int, list[float]]]:
    """(step, {layer: tokens of each expert}) of the last record up to the checkpoint's step that has them."""
    step = getattr(source, "step", None)
    file = pathlib.Path(source.path).parent.parent / "metrics.jsonl"
    found: tuple[int | None, dict[int, list[float]]] = (None, {})
    if step is None or not file.is_file():
        return found
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            if record.get("load") and record["step"] <= step:
                found = record["step"], {int(layer): load for layer, load in record["load"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):  # torn by a kill, or of another form
            continue
    return found
