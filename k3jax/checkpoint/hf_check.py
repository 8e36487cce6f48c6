"""Whether a folder holds exactly the tensors that its config.json implies; all that is wrong is said at once."""

import difflib
import re
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.hf_config import stored_dtype
from k3jax.checkpoint.hf_folder import Folder
from k3jax.checkpoint.hf_layout import PACKED, SCALE, VISION_PREFIXES, HFTensor
from k3jax.checkpoint.mxfp4 import BLOCK
from k3jax.checkpoint.safetensors_file import StoredTensor, read
from k3jax.errors import UserError

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


class Matched(NamedTuple):
    """Where a tensor of the model is stored.

    Attributes:
        tensor: what it is.
        values: its values, or packed elements.
        scale: of packed elements; None where they are not packed.
    """

    tensor: HFTensor
    values: StoredTensor
    scale: StoredTensor | None


class Contents(NamedTuple):
    """A folder that has been checked.

    Attributes:
        matched: the model's tensors, in the order of the layout.
        aside: tensors that our model has no place for, in stored order.
    """

    matched: list[Matched]
    aside: list[StoredTensor]


class _Problem(NamedTuple):
    kind: str  # missing, unexpected, wrong shape, wrong dtype
    name: str
    detail: str


def match(tensors: list[HFTensor], folder: Folder, *, vision: bool) -> Contents:
    """Finds every tensor of the model in a folder, and nothing else but a vision tower.

    Args:
        tensors: of the model, from `hf_tensors`.
        folder: an open folder.
        vision: whether vision tensors may be there; they are kept aside.
    Returns:
        Contents.
    Raises:
        UserError: every tensor that is missing, unexpected, or of another shape or dtype, alike ones as one line.
    """
    left = dict(folder.tensors)
    problems: list[_Problem] = []
    matched = []
    for tensor in tensors:
        if tensor.expert is not None and (tensor.name + PACKED in left or tensor.name + SCALE in left):
            pair = [left.pop(tensor.name + suffix, None) for suffix in (PACKED, SCALE)]
            found = _packed_problems(tensor, *pair)
        else:
            other = tensor.name.replace(".mlp.", ".block_sparse_moe.")  # what transformers 5 makes of it
            pair = [left.pop(tensor.name, None) or left.pop(other, None), None]
            found = _problems(tensor, pair[0], folder.values)
        problems += found
        if not found:
            matched.append(Matched(tensor, *pair))
    aside = [x for name, x in left.items() if vision and name.startswith(VISION_PREFIXES)]
    for stored in aside:
        del left[stored.name]
    problems += [_Problem("unexpected", name, f"{x.dtype}{list(x.shape)}") for name, x in left.items()]
    if problems:
        raise UserError(_describe(folder, problems))
    return Contents(matched, aside)


def _problems(tensor: HFTensor, stored: StoredTensor | None, values: dict) -> list[_Problem]:
    if stored is None:
        return [_Problem("missing", tensor.name, f"[{', '.join(map(str, tensor.stored))}]")]
    problems = []
    heads = tensor.shape[0]
    padded = tensor.path[-1] == "a_log" and len(stored.shape) == 1 and stored.shape[0] >= heads
    if _squeeze(stored.shape) != _squeeze(tensor.stored) and not padded:
        detail = f"{list(stored.shape)}, expected {list(tensor.stored)}"
        problems.append(_Problem("wrong shape", tensor.name, detail))
    elif padded and np.any(read(stored).reshape(-1)[heads:] != 0):
        detail = f"{list(stored.shape)}, for {heads} heads"
        problems.append(_Problem("not zero after its heads", tensor.name, detail))
    narrow = {"BF16", "F16"} if stored_dtype(values) == "float16" else {"BF16"}
    allowed = {"F32", "F64"} | (set() if tensor.path[-1] in ("a_log", "dt_bias", "bias") else narrow)
    if stored.dtype not in allowed:
        detail = f"{stored.dtype}, expected {' or '.join(sorted(allowed))}"
        problems.append(_Problem("wrong dtype", tensor.name, detail))
    return problems


def _packed_problems(tensor: HFTensor, packed: StoredTensor | None, scale: StoredTensor | None) -> list[_Problem]:
    rows, columns = tensor.stored
    problems = []
    for suffix, stored, other, per in ((PACKED, packed, scale, 2), (SCALE, scale, packed, BLOCK)):
        name = tensor.name + suffix
        if stored is None:
            problems.append(_Problem("missing", name, f"{other.name} cannot be read without it"))
            continue
        if stored.shape != (rows, columns // per) or columns % per:
            detail = f"{list(stored.shape)}, expected {[rows, columns // per]} for {[rows, columns]}"
            problems.append(_Problem("wrong shape", name, detail))
        if stored.dtype != "U8":
            problems.append(_Problem("wrong dtype", name, f"{stored.dtype}, expected U8"))
    return problems


def _squeeze(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _describe(folder: Folder, problems: list[_Problem]) -> str:
    """Problems as lines; names that differ in numbers only, with the same complaint, are one line."""
    of_layer: dict[tuple, list[str]] = {}  # names by kind and by the numbers in them
    for problem in problems:
        of_layer.setdefault((problem.kind, *_NUMBERS.findall(problem.name)), []).append(problem.name)
    groups: dict[tuple[str, str, str], list[_Problem]] = {}
    for problem in problems:
        detail = "" if problem.kind == "missing" else problem.detail
        groups.setdefault((problem.kind, _NUMBERS.sub("*", problem.name), detail), []).append(problem)
    lines = [f"{folder.path} does not hold the tensors that its config.json implies ({len(problems)} problems):"]
    for (kind, pattern, _), group in sorted(groups.items()):
        first = group[0]
        called = first.name if len(group) == 1 else f"{pattern} ({len(group)}, first {first.name})"
        others = {"missing": "unexpected", "unexpected": "missing"}.get(kind)
        near = difflib.get_close_matches(
            first.name, of_layer.get((others, *_NUMBERS.findall(first.name)), []), n=1, cutoff=0.8
        )
        hint = f"; nearest {'there' if kind == 'missing' else 'expected'}: {near[0]}" if near else ""
        lines.append(f"  {kind}: {called}: {first.detail}{hint}")
    return "\n".join(lines)
