"""`k3 compare`: runs side by side, with means and standard errors over seeds."""

import argparse
import pathlib
import sys
import typing

from k3jax.errors import UserError
from k3jax.study import tables
from k3jax.study.groups import compare
from k3jax.study.page import comparison_page
from k3jax.study.plan import SweepDir
from k3jax.study.runs import read_runs
from k3jax.train.run_dir import write_atomically
from launch.tables import print_rows

Format = typing.Literal["text", "markdown", "latex"]

HELP = """Lays runs side by side: a table with mean and standard error over seeds, and a page with learning curves.
Runs that differ in more than what is compared are flagged, with the fields. Changes no run."""
EXAMPLE = """k3 compare runs/ratio
  k3 compare runs/ratio --format=latex --page=ratio.html > ratio.tex
  k3 compare runs/mine runs/other --by=OptimConfig.learning_rate"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, sweep directories, folders of runs")
    parser.add_argument(
        "--format", choices=typing.get_args(Format), default="text", help="of the table that is printed"
    )
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="where the HTML page goes; by default compare.html, in the sweep's directory if there is one",
    )
    parser.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="X.y",
        help="a field that is compared; repeatable. By default what the runs' sweeps vary, or the fewest fields that "
        "tell the runs apart",
    )
    parser.add_argument(
        "--unfinished",
        choices=("leave", "count"),
        default="leave",
        help="whether figures leave unfinished runs out, the default, or count them as far as they have come",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the table and writes the page; returns the exit status."""
    paths = [pathlib.Path(path) for path in args.runs]
    comparison = compare(read_runs(paths), args.by, args.unfinished)
    table, notes = tables.summary_table(comparison), tables.notes(comparison)
    if args.format == "text":
        print_rows([table.heading, *table.rows], left=table.left)
        print()
        print("\n".join(notes))
    else:
        comment = "% " if args.format == "latex" else ""
        print(tables.latex(table) if args.format == "latex" else tables.markdown(table))
        print()
        print("\n".join(f"{comment}{note}" if comment else f"{note}\n" for note in notes).rstrip())
    in_sweep = len(paths) == 1 and SweepDir(paths[0]).plan.exists()
    page = pathlib.Path(args.page) if args.page else (paths[0] if in_sweep else pathlib.Path()) / "compare.html"
    try:
        write_atomically(page, comparison_page(comparison, f"Comparison of {_title(paths)}"))
    except OSError as error:
        raise UserError(f"{page} cannot be written ({error.strerror}); give another --page") from None
    print(f"page: {page}", file=sys.stdout if args.format == "text" else sys.stderr)
    return 0


def _title(paths: list[pathlib.Path]) -> str:
    names = [path.resolve().name for path in paths]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
