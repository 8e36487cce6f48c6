"""Safetensors files by the byte range; what is wrong with one names the file and the offset. Nothing is unpickled."""

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.errors import UserError

DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: its key.
        file: where it is.
        dtype: the format's name of it, a key of `DTYPES`.
        shape: as stored.
        start: offset of its first byte in the file.
        nbytes: length.
    """

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Header(NamedTuple):
    """What a file says of itself.

    Attributes:
        raw: the bytes before the first tensor.
        tensors: in the order of their bytes.
    """

    raw: bytes
    tensors: list[StoredTensor]


def read_header(file: pathlib.Path) -> Header:
    """Reads a file's header and checks it against the file's size.

    Args:
        file: a safetensors file.
    Returns:
        Header.
    Raises:
        UserError: the file is truncated or is no safetensors file; file, offset and tensor are named.
    """
    with open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        start = handle.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            says = f"the header should have {length} bytes" if size >= 8 else "no header"
            raise UserError(f"{file}: truncated or not safetensors: {says}, at byte 0 of {size}")
        text = handle.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("not an object")
    except ValueError as error:
        at = f"at byte {8 + error.pos} of {size}" if isinstance(error, json.JSONDecodeError) else "from byte 8"
        raise UserError(f"{file}: corrupt header {at}: {error}") from None
    base = 8 + length
    tensors = [_entry(file, name, entry, base) for name, entry in entries.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    end = base
    for tensor in tensors:
        if tensor.start != end:
            raise UserError(f"{file}: corrupt header: {tensor.name} starts at byte {tensor.start}, expected {end}")
        end += tensor.nbytes
        if end > size:
            raise UserError(f"{file}: truncated: {tensor.name} ends at byte {end}, the file at {size}")
    if end != size:
        raise UserError(f"{file}: {size - end} bytes that belong to no tensor, from byte {end}")
    return Header(start + text, tensors)


def make_header(tensors: list[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The bytes of a file before its first tensor, padded to a multiple of 8.

    Args:
        tensors: (name, dtype's name, shape), in the order their bytes will have.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # torch's axis order; transformers insists on it
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + num_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Length of a tensor, in bytes."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def read(tensor: StoredTensor, shape: tuple[int, ...] | None = None, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Reads a tensor or a box of it, and no byte outside of the pages that hold it.

    Args:
        tensor: which.
        shape: what its axes are merged from; None = as stored.
        index: slices of step 1 over the first axes of that shape.
    Returns:
        A new array.
    Raises:
        UserError: the file has become shorter.
    """
    shape = tensor.shape if shape is None else shape
    dtype = DTYPES[tensor.dtype]
    bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=False)]
    bounds += [(0, n) for n in shape[len(bounds) :]]
    if all(bound == (0, n) for bound, n in zip(bounds[1:], shape[1:], strict=True)):
        first, last = bounds[0] if shape else (0, 1)
        stride = math.prod(shape[1:]) * dtype.itemsize
        data = read_bytes(tensor.file, tensor.start + first * stride, (last - first) * stride)
        return data.view(dtype).reshape((last - first, *shape[1:]) if shape else ())
    mapped = np.memmap(tensor.file, dtype, "r", tensor.start, shape)
    return np.array(mapped[tuple(slice(*bound) for bound in bounds)])


def read_bytes(file: pathlib.Path, start: int, count: int) -> np.ndarray:
    """uint8 [count], the bytes from `start` on."""
    data = np.empty(count, np.uint8)
    with open(file, "rb", buffering=0) as handle:
        handle.seek(start)
        done = 0
        while done < count:  # a single read ends at 2 GiB
            step = handle.readinto(memoryview(data)[done:])
            if not step:
                raise UserError(f"{file}: truncated: ends at byte {start + done}, expected {start + count}")
            done += step
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _entry(file: pathlib.Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        integers = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        integers = False
    if not integers:
        raise UserError(f"{file}: corrupt header: {name}: expected dtype, shape and data_offsets, got {entry!r:.200}")
    if dtype not in DTYPES:
        raise UserError(f"{file}: {name}, at byte {base + start}: unknown dtype {dtype!r}")
    if end - start != num_bytes(dtype, shape):
        raise UserError(
            f"{file}: corrupt header: {name}, at byte {base + start}, has {end - start} bytes; "
            f"{dtype}{list(shape)} needs {num_bytes(dtype, shape)}"
        )
    return StoredTensor(name, file, dtype, shape, base + start, end - start)
