"""The `k3` command: a table of verbs, each in a module of its own that is imported only when asked for.

A verb's module defines HELP (what it does), EXAMPLE (a command), add_arguments(parser) and run(args) -> exit
status. It imports jax inside of `run`, after the configuration is checked, so that a mistake costs no wait.
"""

import argparse
import difflib
import importlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Sequence

from k3jax.errors import UserError

# A line on each, here so that listing the verbs imports none of them.
VERBS = {
    "train": ("launch.train", "train a model, or go on where a run stopped"),
    "eval": ("launch.eval", "measure a run on held-out text"),
    "generate": ("launch.generate", "continue a prompt with a run's model"),
    "sweep": ("launch.sweep", "train a run for every combination of values, and hold parameters or FLOPs fixed"),
    "compare": ("launch.compare", "lay runs side by side: a table over seeds, learning curves, one page"),
    "config": ("launch.config", "print a resolved configuration and its parameter table"),
    "ckpt": ("launch.ckpt", "inspect, compare and convert checkpoints"),
    "bench": ("launch.bench", "time the parts and the whole, beside peers where they are installed"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, with the option that was probably meant."""

    def error(self, message: str):
        options = re.findall(r"--[\w.]+", self.format_help())
        given = re.search(r"unrecognized arguments: (-[^=\s]+)", message)
        near = difflib.get_close_matches(given[1], options, n=1) if given else []
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}; {hint}\n")


def available_verbs() -> dict[str, tuple[str, str]]:
    """The verbs whose module is there: name -> (module, one line of help)."""
    return {verb: entry for verb, entry in VERBS.items() if importlib.util.find_spec(entry[0])}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (without the program's name) and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    verbs = available_verbs()
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        print(_overview(verbs))
        return 0
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"did you mean {near[0]}?" if near else "see k3 --help"
        print(f"k3: error: no verb {verb!r}; {hint}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that its encoding lacks is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(verb, verbs[verb][0], argv[1:])
        sys.stdout.flush()  # here, where a reader that has left is known
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(f"k3 {verb}: error: {error}", file=sys.stderr)
        return 2


def _overview(verbs: dict[str, tuple[str, str]]) -> str:
    lines = [f"  {verb:<10} {text}" for verb, (_, text) in verbs.items()]
    return "\n".join(
        [
            "usage: k3 VERB [options]",
            "",
            "Trains, ablates and inspects models of the Kimi K3 family.",
            "",
            *lines,
            "",
            "k3 VERB --help shows a verb's options and an example.",
        ]
    )


def _run(verb: str, module_name: str, argv: list[str]) -> int:
    from launch import accelerators, configure

    module = importlib.import_module(module_name)
    parser = _Parser(
        prog=f"k3 {verb}",
        description=module.HELP,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    args = parser.parse_args(configure.expand_gin_flags(argv))
    accelerators.leave_libtpu_asleep()
    return module.run(args)


if __name__ == "__main__":
    sys.exit(main())
