"""`k3 ckpt`: what is in a checkpoint, how two differ, and the way from and to released ones."""

import argparse
import importlib
import importlib.util
from typing import Protocol

HELP = "Inspects, compares and converts checkpoints: of a run, a step's folder, or released ones."
EXAMPLE = "k3 ckpt show runs/quickstart"


class Subverb(Protocol):
    """What stands for a subverb: a module, or an object of `launch.ckpt_convert`."""

    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


# name -> module, or module:object.
SUBVERBS = {
    "list": "launch.ckpt_list",
    "show": "launch.ckpt_show",
    "stats": "launch.ckpt_stats",
    "diff": "launch.ckpt_diff",
    "scan": "launch.ckpt_scan",
    "experts": "launch.ckpt_experts",
    "attnres": "launch.ckpt_attnres",
    "gates": "launch.ckpt_gates",
    "parity": "launch.ckpt_parity",
    "import": "launch.ckpt_convert:IMPORT",
    "export": "launch.ckpt_convert:EXPORT",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a parser for each subverb."""
    choices = parser.add_subparsers(
        dest="subverb", metavar="WHAT", required=True, title="what", parser_class=_strict(type(parser))
    )
    for name, place in SUBVERBS.items():
        module, _, attribute = place.partition(":")
        if importlib.util.find_spec(module) is None:
            continue
        subverb: Subverb = importlib.import_module(module)
        subverb = getattr(subverb, attribute) if attribute else subverb
        own = choices.add_parser(
            name,
            help=subverb.HELP,
            description=subverb.HELP,
            epilog=f"example:\n  {subverb.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        subverb.add_arguments(own)
        own.set_defaults(run_subverb=subverb.run)


def _strict(parser_class: type[argparse.ArgumentParser]) -> type[argparse.ArgumentParser]:
    """A parser that itself refuses what it does not know, where argparse leaves that to the one above it, which knows
    none of its options and so cannot say which was meant."""

    class Strict(parser_class):
        def parse_known_args(self, *args, **kwargs):
            namespace, unknown = super().parse_known_args(*args, **kwargs)
            if unknown:
                self.error(f"unrecognized arguments: {' '.join(unknown)}")
            return namespace, unknown

    return Strict


def run(args: argparse.Namespace) -> int:
    """Runs the subverb that was asked for; returns the exit status."""
    return args.run_subverb(args)
