"""What a run measures of itself: numbers, records, and the files they go to."""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

# Fields that differ between two runs of the same configuration; every other one is the same to the bit.
TIMING_FIELDS = ("tokens_per_second", "step_seconds", "mfu", "eval_seconds")

MAX_LOAD_ENTRIES = 8192  # expert counts that metrics.jsonl gets for each logged step, on average

# Dense bfloat16 FLOP/s of one jax device, from the vendors' data sheets. First match wins; in lower case.
PEAK_FLOPS = (
    ("tpu v4", 275e12),
    ("tpu v5 lite", 197e12),
    ("tpu v5e", 197e12),
    ("tpu v5", 459e12),  # v5p
    ("tpu v6", 918e12),
    ("tpu7x", 2307e12 / 2),  # two devices a chip
    ("tpu v7", 2307e12 / 2),
    ("gb200", 2500e12),
    ("b200", 2250e12),
    ("h200", 989e12),
    ("h100 pcie", 756e12),
    ("h100", 989e12),
    ("a100", 312e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its `jax.Device.device_kind`; None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS if name in device_kind.lower()), None)


def bits_per_byte(nats_per_target: float, targets: int, num_bytes: int) -> float | None:
    """A loss as bits for each byte of the text it was measured on.

    Args:
        nats_per_target: mean loss.
        targets: predicted tokens in the text, document tokens included.
        num_bytes: bytes of the same text.
    Returns:
        bits a byte, or None where there are no bytes.
    """
    return nats_per_target * targets / num_bytes / math.log(2) if num_bytes else None


def violations(load_by_layer: Sequence[Sequence[int]]) -> list[float]:
    """MaxVio of each layer: the busiest expert's load over the mean load, minus 1; 0 is perfect balance."""
    result = []
    for load_E in load_by_layer:
        total = int(sum(load_E))
        result.append(float(max(load_E) * len(load_E) / total - 1) if total else 0.0)
    return result


def load_interval(num_layers: int, num_experts: int) -> int:
    """Of how many logged steps one carries the experts' loads, so that they do not swamp the file."""
    return max(1, -(-num_layers * num_experts // MAX_LOAD_ENTRIES))


class MetricsLog:
    """`metrics.jsonl`: one whole JSON object a line, and the same numbers for TensorBoard.

    Args:
        path: the file; what it holds beyond `keep_up_to` is cut off.
        tensorboard: directory for event files, or None for none.
        keep_up_to: the step a run goes on from; 0 starts afresh.
    """

    def __init__(self, path: pathlib.Path, tensorboard: pathlib.Path | None, keep_up_to: int):
        _cut(path, keep_up_to)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._tensorboard = None
        if tensorboard is not None:
            from tensorboardX import SummaryWriter

            # Events of steps that are taken again are then not shown twice.
            self._tensorboard = SummaryWriter(str(tensorboard), purge_step=keep_up_to + 1 if keep_up_to else None)

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record, which has a "step"; numbers that are not finite become null."""
        record = _finite(record)
        # One unbuffered write a line: a killed process leaves at most the last line torn.
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        if self._tensorboard is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, (int, float)):
                    group = "heldout" if name.startswith("eval_") else "train"
                    self._tensorboard.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, record["step"])

    def sync(self) -> None:
        """Sees to it that what was written survives a crash of the machine."""
        os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Closes the files; the log cannot be used afterwards."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in order; a torn last line is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_whole_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """Every whole record in the order of steps, whatever else is in the file; of a step logged twice, both."""
    records = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return sorted(records, key=lambda record: record["step"])


def _cut(path: pathlib.Path, keep_up_to: int) -> None:
    """Shortens the file to the records of steps up to the given one, and to whole lines."""
    if not path.exists():
        return
    size = 0
    with open(path, "r+b") as file:
        for line in file:
            if keep_up_to == 0 or not _is_kept(line, keep_up_to):
                break
            size += len(line)
        file.truncate(size)


def _is_kept(line: bytes, keep_up_to: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= keep_up_to
    except ValueError:
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
