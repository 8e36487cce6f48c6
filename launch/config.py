"""`k3 config`: a resolved configuration, where its parameters are, and what a token costs."""

import argparse
import json
import sys

from k3jax.config import Config, to_dict
from k3jax.train.figures import short
from launch import configure
from launch.tables import print_rows

HELP = "Prints a configuration with every default filled in, its parameters by component, and FLOPs a token."
EXAMPLE = "k3 config --gin_file=experiments/kimi_linear_48b.gin --gin.ModelConfig.kda_per_mla=7"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    configure.add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for programs")


def run(args: argparse.Namespace) -> int:
    """Prints what was asked for; returns the exit status."""
    loaded = configure.from_arguments(args)
    if args.print_config:
        print(loaded.operative, end="")
        return 0
    summary = summarise(loaded.config)
    if args.json:
        print(json.dumps({"config": to_dict(loaded.config), **summary}, indent=2))
        return 0
    if not args.gin_file:
        files = " ".join(str(file) for file in configure.experiment_files()) or "no files in experiments/"
        print(f"No --gin_file: the model is Kimi K3's, all else at its default. There are: {files}", file=sys.stderr)
    print(loaded.operative)
    _print_table(summary)
    return 0


def summarise(config: Config) -> dict:
    """Parameters by component, totals, and FLOPs a token, as plain values for JSON.

    Args:
        config: any configuration.
    Returns:
        {"global_layers": [...], "parameters": {...}, "flops_per_token": {...}}.
    """
    from k3jax.models import accounting

    model, seq_len = config.model, config.data.seq_len
    table = accounting.count_parameters(model)
    forward = accounting.flops_per_token(model, seq_len)
    return {
        "global_layers": list(model.global_layers),
        "parameters": {
            "components": [c._asdict() | {"total": c.total, "active": c.active} for c in table.components],
            "total": table.total,
            "active": table.active,
            "active_with_embedding": table.active_with_embedding,
            "active_without_head": table.active_without_head,
        },
        "flops_per_token": {
            "seq_len": seq_len,
            "forward": forward,
            "forward_total": sum(forward.values()),
            "train_total": accounting.train_flops_per_token(model, seq_len),
        },
    }


def _print_table(summary: dict) -> None:
    parameters, flops = summary["parameters"], summary["flops_per_token"]
    components = [c for c in parameters["components"] if c["layers"] and c["per_layer"]]
    rows = [("component", "each", "layers", "total", "share", "active")]
    for c in components:
        share = f"{c['total'] / parameters['total']:.1%}"
        rows.append((c["name"], f"{c['per_layer']:,}", str(c["layers"]), f"{c['total']:,}", share, f"{c['active']:,}"))
    rows.append(("all", "", "", f"{parameters['total']:,}", "100.0%", f"{parameters['active']:,}"))
    print_rows(rows, last_is_sum=True)
    total, active = parameters["total"], parameters["active"]
    with_embedding, without_head = parameters["active_with_embedding"], parameters["active_without_head"]
    print(f"""
Total parameters   {short(total, 4 if total >= 1e12 else 2)}
Active parameters  {short(active, 2)} a token: with the output head, without the input embedding, as published
                   ({short(with_embedding, 2)} with both tables, {short(without_head, 2)} with neither)
Forward FLOPs      {short(flops["forward_total"], 2)} a token at {flops["seq_len"]} tokens a row; a training \
step takes {short(flops["train_total"], 2)}
MLA layers         {" ".join(map(str, summary["global_layers"])) or "none"}""")
