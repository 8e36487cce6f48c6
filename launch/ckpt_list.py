"""`k3 ckpt list`: the checkpoints of a run."""

import argparse
import datetime
import json
import pathlib

from launch.ckpt_common import add_json, nbytes_text, number, print_json
from launch.tables import print_rows

HELP = "Lists a run's checkpoints: step, size, time, what was measured there, and whether each is complete."
EXAMPLE = "k3 ckpt list runs/quickstart"
METRICS = ("loss", "eval_loss", "eval_bits_per_byte", "max_violation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subverb's arguments."""
    parser.add_argument("path", metavar="RUN", help="the run's directory")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the list; returns the exit status."""
    from k3jax.checkpoint.open import released_folder
    from k3jax.checkpoint.run_source import checkpoint_steps, open_step
    from k3jax.errors import UserError

    folder = pathlib.Path(args.path)
    if released_folder(folder, None) is not None:
        raise UserError(f"{folder}: released weights and no step of a run yet; k3 ckpt show tells what they are")
    metrics = _metrics(folder / "metrics.jsonl")
    entries = []
    for step in checkpoint_steps(folder):
        problem = step.problem
        if not problem:
            try:
                open_step(step.folder)  # holds the table of contents against the files
            except UserError as error:
                problem = str(error)
        entries.append(
            {
                "step": step.step,
                "complete": not problem,
                "problem": problem,
                "bytes": sum(file.stat().st_size for file in step.folder.rglob("*") if file.is_file()),
                "time": _time(step.folder),
                "metrics": metrics.get(step.step, {}),
            }
        )
    if args.json:
        print_json({"path": str(folder), "checkpoints": entries})
        return 0
    shown = [name for name in METRICS if any(name in entry["metrics"] for entry in entries)]
    rows = [("step", "size", "written", *shown, "state")]
    for entry in entries:
        values = [number(entry["metrics"].get(name)) for name in shown]
        state = "complete" if entry["complete"] else "incomplete"
        rows.append((str(entry["step"]), nbytes_text(entry["bytes"]), entry["time"] or "-", *values, state))
    if entries:
        print_rows(rows, left=0)
    else:
        print(f"{folder}: no checkpoint yet")
    for entry in entries:
        if entry["problem"]:
            print(f"step {entry['step']}: {entry['problem']}")
    return 0


def _metrics(file: pathlib.Path) -> dict[int, dict]:
    """{step: every number that was logged there}."""
    found: dict[int, dict] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            record = json.loads(line)
            values = {name: record[name] for name in METRICS if isinstance(record.get(name), (int, float))}
            found.setdefault(record["step"], {}).update(values)
        except (ValueError, KeyError, TypeError, AttributeError):  # torn by a kill
            continue
    return found


def _time(folder: pathlib.Path) -> str:
    """When the checkpoint was complete, in local time; "" where that was not kept."""
    try:
        nanoseconds = json.loads((folder / "_CHECKPOINT_METADATA").read_text())["commit_timestamp_nsecs"]
        return datetime.datetime.fromtimestamp(nanoseconds / 1e9).strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, ValueError, KeyError, TypeError):
        return ""
