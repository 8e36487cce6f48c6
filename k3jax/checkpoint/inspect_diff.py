"""How two checkpoints differ: first in structure, then tensor by tensor. No jax import here."""

import math
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.matrices import BLOCK_BYTES
from k3jax.checkpoint.source import Source, Tensor, parts


class Structure(NamedTuple):
    """Attributes:
    common: (tensor of A, tensor of B) with one name and one shape.
    only_a, only_b: names.
    reshaped: (name, shape in A, shape in B).
    retyped: (name, dtype in A, dtype in B); these are compared all the same.
    """

    common: list[tuple[Tensor, Tensor]]
    only_a: list[str]
    only_b: list[str]
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    retyped: list[tuple[str, str, str]]


class Change(NamedTuple):
    """How far a tensor has moved.

    Attributes:
        name, layer, shape: of the tensor.
        relative: 2-norm of B - A over that of A; infinite where A is zero and B is not; NaN where either is not finite.
        norm: of B - A.
        largest: largest absolute value of B - A.
        changed: number of values that are not equal.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    relative: float
    norm: float
    largest: float
    changed: int


def compare_structure(a: Source, b: Source, of_a: list[Tensor], of_b: list[Tensor]) -> Structure:
    """Matches tensors by name, whatever files and stacking they lie in.

    Args:
        a, b: open checkpoints.
        of_a, of_b: the tensors that are to be compared.
    """
    in_a, in_b = {t.name: t for t in of_a}, {t.name: t for t in of_b}
    both = [(t, in_b[name]) for name, t in in_a.items() if name in in_b]
    dtypes = [(x, a.leaves[x.path].dtype.name, b.leaves[y.path].dtype.name) for x, y in both]
    return Structure(
        [(x, y) for x, y in both if x.shape == y.shape],
        [name for name in in_a if name not in in_b],
        [name for name in in_b if name not in in_a],
        [(x.name, x.shape, y.shape) for x, y in both if x.shape != y.shape],
        [(x.name, before, after) for x, before, after in dtypes if before != after],
    )


def change(a: Source, b: Source, of_a: Tensor, of_b: Tensor) -> Change:
    """Reads a tensor of both, a slice at a time, and measures the difference.

    Args:
        a, b: open checkpoints.
        of_a, of_b: tensors of one shape.
    Raises:
        UserError: damaged files.
    """
    moved = before = largest = 0.0
    changed = 0
    for index in parts(a.leaves[of_a.path], of_a.index, BLOCK_BYTES):
        there = (*of_b.index, *index[len(of_a.index) :])
        x = a.read(of_a.path, index).astype(np.float64)
        difference = b.read(of_b.path, there).astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinity from infinity is NaN, and told as that
            difference -= x
        changed += int(np.count_nonzero(difference))
        largest = max(largest, float(np.max(np.abs(difference), initial=0.0)))
        moved += float(np.vdot(difference, difference))
        before += float(np.vdot(x, x))
    if not (math.isfinite(moved) and math.isfinite(before)):
        relative = math.nan
    else:
        relative = math.sqrt(moved / before) if before else (math.inf if moved else 0.0)
    return Change(of_a.name, of_a.layer, of_a.shape, relative, math.sqrt(moved), largest, changed)
