"""`k3 ckpt parity`: a checkpoint's model against outputs of another program."""

import argparse

from launch.ckpt_common import add_checkpoint, add_json, describe, number, open_checkpoint, print_json
from launch.tables import print_rows

HELP = (
    "Compares a checkpoint's model, layer by layer, with outputs of another program, and names the first layer that "
    "departs, and whether by its numbers or by its choice of experts. Exit status 1 if one does, 0 if none does."
)
EXAMPLE = "k3 ckpt parity path/to/Kimi-Linear --reference=outputs.npz"
# Of the largest value of a layer's output.
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 3e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    add_checkpoint(parser)
    parser.add_argument(
        "--reference", required=True, metavar="NPZ",
        help="outputs of the other program: input_ids, logits, layer_outputs, router_layer, router_topk_indices",
    )  # fmt: skip
    parser.add_argument(
        "--routing", choices=["natural", "forced"], default="natural",
        help="forced: our layers visit the reference's experts where it tells them, so that only numbers are compared",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float32", help="of parameters and compute")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="of max |ours - reference| / max |reference|; by dtype"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the model and prints; returns the exit status."""
    import jax

    from k3jax.checkpoint.parity import Parity, read_reference
    from k3jax.errors import UserError

    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    if not tolerance > 0:
        raise UserError(f"--tolerance={tolerance}: give a number above 0")
    source = open_checkpoint(args)
    if source.config is None:
        raise UserError(f"{source.path}: no config.json tells the model; give the run's directory")
    reference = read_reference(args.reference, source.config)
    with jax.enable_x64(args.dtype == "float64"):
        parity = Parity(source, reference, args.dtype, args.routing)
        layers = list(parity.layers())
    verdict, departs = judge(layers, parity.logits_error, parity.head_error, tolerance)
    if args.json:
        found = [layer._asdict() | {"kind": list(layer.kind)} for layer in layers]
        errors = {"logits_error": parity.logits_error, "head_error": parity.head_error}
        print_json(
            {"checkpoint": describe(source), "tolerance": tolerance, "layers": found, **errors, "verdict": verdict}
        )
        return int(departs)
    print(f"{describe(source)} in {args.dtype}, {args.routing} routing, {reference.tokens_BT.size} tokens")
    rows = [("layer", "kind", "running", "alone", "alone, forced", "same experts", "gap where not")]
    for layer in layers:
        share = "-" if layer.agreement is None else f"{layer.agreement:.2%}"
        gap = number(layer.gap if layer.agreement is not None and layer.agreement < 1 else None)
        kind = f"{layer.kind.mixer.upper()} {layer.kind.ffn}"
        errors = [number(x) for x in (layer.running, layer.alone, layer.forced)]
        rows.append((str(layer.layer), kind, *errors, share, gap))
    rows.append(("head", "", number(parity.logits_error), number(parity.head_error), "-", "-", "-"))
    print_rows(rows, left=2)
    print(f"errors are max |ours - reference| / max |reference|; tolerance {tolerance:g}")
    print(verdict)
    return int(departs)


def judge(layers, logits_error: float | None, head_error: float | None, tolerance: float) -> tuple[str, bool]:
    """What the errors say.

    Args:
        layers: of `parity.LayerParity`, in order.
        logits_error, head_error: of `parity.Parity`.
        tolerance: of each error.
    Returns:
        (one line, whether anything departs).
    """

    def bad(error: float | None) -> bool:
        return error is not None and not error <= tolerance

    for layer in layers:
        name = f"layer {layer.layer} ({layer.kind.mixer.upper()}, {layer.kind.ffn})"
        if bad(layer.alone) and layer.forced is not None and not bad(layer.forced):
            what = (
                f"by its choice of experts: {1 - layer.agreement:.2%} of choices are others, where scores differ by "
                f"{layer.gap:.2g} at most; with the reference's experts its error is {layer.forced:.2g}"
            )
            return f"first layer that departs: {name}, {what}", True
        if bad(layer.alone):
            return f"first layer that departs: {name}, by its numbers: error {layer.alone:.2g} by itself", True
        if bad(layer.running):
            what = f"error {layer.running:.2g} behind our layers, {layer.alone:.2g} by itself: small errors have grown"
            return f"first layer that departs: {name}, {what}", True
    if bad(head_error):
        return f"all layers agree; the head departs: error {head_error:.2g} by itself", True
    if bad(logits_error):
        return f"logits depart: error {logits_error:.2g}; no layer does, as far as the reference tells", True
    worst = max((x for x in [*(layer.running for layer in layers), logits_error] if x is not None), default=0.0)
    return f"no layer departs; the largest error is {worst:.2g}", False
