"""Safetensors files against the safetensors library, and damaged ones."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax.checkpoint.safetensors_file import make_header, read, read_bytes, read_header
from k3jax.errors import UserError


@pytest.fixture
def file(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((6, 4, 5)).astype(np.float32),
        "b": rng.standard_normal((3, 8)).astype(ml_dtypes.bfloat16),
        "c": np.array(3, np.int64),
        "d": np.zeros((0, 3), np.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def test_reads_what_the_library_wrote(file):
    found = {tensor.name: tensor for tensor in read_header(file).tensors}
    for name, want in load_file(file).items():
        got = read(found[name])
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("index", [(slice(2, 5),), (slice(2, 3), slice(1, 3)), (slice(None), slice(0, 2), slice(3, 5))])
def test_reads_a_box(file, index):
    tensor = next(tensor for tensor in read_header(file).tensors if tensor.name == "a")
    np.testing.assert_array_equal(read(tensor, index=index), load_file(file)["a"][index])
    split = load_file(file)["a"].reshape(2, 3, 20)
    np.testing.assert_array_equal(read(tensor, (2, 3, 20), index[:2]), split[index[:2]])


def test_the_library_reads_what_is_written(tmp_path):
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(5, dtype=np.uint8)}
    header = make_header([("x", "F32", (2, 3)), ("y", "U8", (5,))])
    assert len(header) % 8 == 0
    (tmp_path / "y.safetensors").write_bytes(header + b"".join(x.tobytes() for x in arrays.values()))
    for name, want in load_file(tmp_path / "y.safetensors").items():
        np.testing.assert_array_equal(want, arrays[name])


def rewrite(file, change) -> None:
    """Changes the header's entries, whose bytes then may have another length."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    change(entries)
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def test_truncated(file):
    data = file.read_bytes()
    last = [tensor for tensor in read_header(file).tensors if tensor.nbytes][-1]
    for size, message in [
        (len(data) - 5, f"truncated: {last.name} ends at byte {len(data)}, the file at {len(data) - 5}"),
        (20, r"truncated or not safetensors: the header should have \d+ bytes, at byte 0 of 20"),
        (3, "truncated or not safetensors: no header, at byte 0 of 3"),
    ]:
        file.write_bytes(data[:size])
        with pytest.raises(UserError, match=rf"{file}: {message}"):
            read_header(file)
    with pytest.raises(UserError, match=rf"{file}: truncated: ends at byte 3, expected 9"):
        read_bytes(file, 1, 8)


def test_corrupt(file):
    data = file.read_bytes()
    file.write_bytes(data[:30] + b"\0" + data[31:])
    with pytest.raises(UserError, match=rf"{file}: corrupt header at byte \d+ of {len(data)}"):
        read_header(file)
    file.write_bytes(data + b"more")
    with pytest.raises(UserError, match=f"4 bytes that belong to no tensor, from byte {len(data)}"):
        read_header(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["a"].update(data_offsets=[4, 484]), r"a starts at byte \d+, expected \d+"),
        (lambda e: e["b"].update(dtype="F32"), r"b, at byte \d+, has 48 bytes; F32\[3, 8\] needs 96"),
        (lambda e: e["b"].update(dtype="F4"), r"b, at byte \d+: unknown dtype 'F4'"),
        (lambda e: e["b"].update(shape=[-3, -8]), "b: expected dtype, shape and data_offsets"),
        (lambda e: e.update(b=7), "b: expected dtype, shape and data_offsets"),
    ],
)
def test_headers_that_lie(file, change, message):
    rewrite(file, change)
    with pytest.raises(UserError, match=message):
        read_header(file)


def test_a_name_that_occurs_twice(tmp_path):
    entry = '"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    text = f"{{{entry}, {entry}}}".encode()
    (tmp_path / "z.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(UserError, match="'x' occurs twice"):
        read_header(tmp_path / "z.safetensors")
