"""Records and their file: whole lines, the right cut on resume, hand-worked numbers."""

import json
import math

import pytest

from k3jax.train.figures import duration, short
from k3jax.train.metrics import (
    MetricsLog,
    bits_per_byte,
    load_interval,
    peak_flops,
    read_metrics,
    violations,
)
from k3jax.train.progress import describe


def write(path, *steps):
    path.write_text("".join(json.dumps({"step": step, "loss": step / 2}) + "\n" for step in steps))


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight():
    assert bits_per_byte(math.log(256), targets=1000, num_bytes=1000) == pytest.approx(8)
    assert bits_per_byte(math.log(256), targets=500, num_bytes=1000) == pytest.approx(4)
    assert bits_per_byte(1.0, targets=5, num_bytes=0) is None


def test_max_violation_by_hand():
    # Loads 4, 2, 0, 2: mean 2, busiest 4, so 4/2 - 1 = 1. An even layer has 0, one without tokens too.
    assert violations([[4, 2, 0, 2], [3, 3, 3, 3], [0, 0]]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("cpu", None),
    ],
)
def test_peak_flops_by_device(kind, peak):
    assert peak_flops(kind) == peak


def test_loads_of_a_large_model_are_logged_less_often():
    assert load_interval(8, 16) == 1
    assert load_interval(92, 896) == 11  # 82,432 counts in shares of 8,192


def test_resume_keeps_the_records_up_to_its_step_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 4, 6)
    kept = path.read_bytes().split(b"\n")[:3]
    MetricsLog(path, None, keep_up_to=4).close()
    assert path.read_bytes() == b"\n".join(kept) + b"\n"


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step": 4, "loss": 1}', b"\0\0\0\0\n"])
def test_resume_drops_a_torn_last_line(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    log = MetricsLog(path, None, keep_up_to=4)
    log.write({"step": 6, "loss": 0.5})
    log.close()
    assert path.read_bytes().startswith(whole)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 6]


def test_a_reader_leaves_out_the_line_that_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_a_fresh_start_leaves_nothing_of_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    MetricsLog(path, None, keep_up_to=0).close()
    assert path.read_bytes() == b""


def test_every_line_is_json_whatever_the_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, tmp_path / "tensorboard", keep_up_to=0)
    log.write({"step": 1, "loss": float("nan"), "load": {"2": [1, 2]}, "grad_norm": float("inf")})
    log.close()

    def refuse(constant):
        raise AssertionError(constant)

    (record,) = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert record == {"step": 1, "loss": None, "load": {"2": [1, 2]}, "grad_norm": None}


def test_tensorboard_gets_scalars_and_forgets_steps_taken_again(tmp_path):
    from tensorboardX.proto import event_pb2

    folder = tmp_path / "tensorboard"
    log = MetricsLog(tmp_path / "metrics.jsonl", folder, keep_up_to=40)
    log.write({"step": 41, "loss": 2.0})
    log.write({"step": 41, "eval_loss": 3.0})
    log.close()
    (file,) = folder.iterdir()
    events = [event_pb2.Event.FromString(payload) for payload in _payloads(file.read_bytes())]
    scalars = {v.tag: (e.step, v.simple_value) for e in events for v in e.summary.value}
    assert scalars == {"train/loss": (41, 2.0), "heldout/loss": (41, 3.0)}
    assert [e.step for e in events if e.HasField("session_log")] == [41]  # steps from 41 on are purged


def _payloads(data: bytes):
    """The records of a TFRecord file: length (8 bytes), checksum (4), payload, checksum (4)."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 12 : at + 12 + length]
        at += length + 16


def test_a_record_in_words():
    record = {
        "step": 40, "loss": 2.34567, "bits_per_byte": 3.4, "tokens_per_second": 12345.0, "mfu": 0.341,
        "max_violation": 0.42, "skipped": 0, "step_seconds": 2.0,
    }  # fmt: skip
    line = describe(record, total=100)
    assert line == "  loss 2.3457  3.400 bits/byte  12.3k tokens/s  MFU 34.1%  MaxVio 0.42  ETA 2:00"
    assert "not finite" in describe({"step": 1, "loss": float("nan")}, total=2)


def test_numbers_as_people_read_them():
    assert (duration(3725), duration(59.6), duration(200000)) == ("1:02:05", "1:00", "2d07h")
    assert [short(x) for x in (0, 999.0, 12345, 1.5e6, 2.7795e12)] == ["0", "999", "12.3k", "1.5M", "2.78T"]
    assert (short(2_779_483_955_200, 4), short(104.19e9, 2), short(7, 2)) == ("2.7795T", "104.19B", "7")
