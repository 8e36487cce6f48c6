"""`k3 bench`: the parts and the whole, timed in one run beside their peers."""

import argparse

from k3jax.errors import UserError
from launch import configure

HELP = """Times the training step against the machine's matmul rate and a peer, and what each part costs (train);
the KDA kernels beside tokamax's, here or as schedules for a TPU that need not be there (kda); importing and exporting a
released checkpoint against cp of the same bytes (ckpt)."""
EXAMPLE = "k3 bench train --gin_file=experiments/bench_kimi_linear_15m.gin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("what", choices=["train", "kda", "ckpt"], help="which benchmark")
    configure.add_config_arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds; medians are printed (default 7)")
    parser.add_argument(
        "--peer_python", default=None,
        help="a Python that has torch and transformers, to time the peer with (default: this one, if it has them)",
    )  # fmt: skip
    parser.add_argument("--gigabytes", type=float, default=2.0, help="ckpt: size of the synthetic checkpoint (2)")
    parser.add_argument("--folder", default=None, help="ckpt: where to write it; all is deleted at the end")
    parser.add_argument(
        "--topology", default=None, help="kda: cycles of the schedule for this TPU, v6e:2x2 or tpu7x:2x2x1 say"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table; returns the exit status."""
    if args.repeats < 1:
        raise UserError(f"--repeats={args.repeats}: must be at least 1")
    if args.what == "kda":
        from launch.bench_kda import bench_kda

        bench_kda(args.topology, args.repeats)
        return 0
    if args.what == "ckpt":
        from launch.bench_ckpt import bench_ckpt

        bench_ckpt(args.gigabytes, args.repeats, args.folder)
        return 0
    loaded = configure.from_arguments(args)
    if args.print_config:
        print(loaded.operative, end="")
        return 0
    if not args.gin_file:
        raise UserError(f"bench train: needs --gin_file; for example: {EXAMPLE}")
    from launch.bench_train import bench_train

    bench_train(loaded.config, args.repeats, args.peer_python)
    return 0
