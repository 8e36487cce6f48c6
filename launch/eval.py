"""`k3 eval`: what held-out text costs a run's model."""

import argparse
import json
import lzma
import sys
import zlib

from k3jax.train.run_dir import RunRefused, read_json
from launch import session

HELP = "Measures a run's model on its held-out text. Changes nothing in the run's directory."
EXAMPLE = "k3 eval --workdir=runs/mine --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    session.add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints; returns the exit status."""
    session.configure_logging()
    loaded = session.load_run(args.workdir, args.step)
    versions = read_json(loaded.run.versions) if loaded.run.versions.exists() else {}
    summary = read_json(loaded.run.summary) if loaded.run.summary.exists() else {}

    from k3jax.data import load_dataset
    from k3jax.train.evaluate import evaluate
    from k3jax.train.step import make_eval_step

    dataset = load_dataset(loaded.config.data)
    if versions.get("corpus") != dataset.fingerprint:
        print("k3: the text is not what this run was trained with: the split may differ", file=sys.stderr)
    result = evaluate(make_eval_step(loaded.config, loaded.mesh), loaded.variables, dataset, loaded.mesh)
    if result is None:
        raise RunRefused(f"{loaded.run.path}: no held-out text; DataConfig.heldout_fraction was too small")
    figures = {"step": loaded.step, **result._asdict()}
    if result.bits_per_byte is not None:
        figures |= compressors(dataset.heldout_bytes())
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"step {loaded.step}, {result.targets:,} held-out targets, {dataset.heldout.num_bytes:,} bytes")
    print(f"loss      {result.loss:.6f} nats a target")
    print(f"accuracy  {result.accuracy:.4%}")
    if result.bits_per_byte is not None:
        print(f"model     {result.bits_per_byte:.3f} bits a byte")
        print(f"zlib -9   {figures['zlib_bits_per_byte']:.3f} bits a byte, on the same bytes")
        print(f"xz -9     {figures['xz_bits_per_byte']:.3f} bits a byte")
    if "max_violation" in summary:
        print(
            f"experts   MaxVio {summary['max_violation']:.2f} on average over layers, "
            f"{summary['max_violation_worst']:.2f} in the worst (0 = every expert has the same load)"
        )
    if loaded.run.report.exists():
        print(f"report    {loaded.run.report}")
    return 0


def compressors(text: bytes) -> dict[str, float]:
    """What two general compressors make of the same bytes, in bits a byte."""
    return {
        "zlib_bits_per_byte": 8 * len(zlib.compress(text, 9)) / len(text),
        "xz_bits_per_byte": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
