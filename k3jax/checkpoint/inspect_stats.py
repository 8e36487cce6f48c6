"""Numbers about every tensor of a checkpoint: size, dead rows, spectral norm, and what is not finite.

No jax import here. A block of rows is in memory at a time, in float32 or wider.
"""

import math
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.matrices import Matrix, form, matrices
from k3jax.checkpoint.source import Source, Tensor

DEAD = 1e-4  # of the median norm of a matrix's rows: below it a row counts as dead
WIDTH, PASSES, SEED = 8, 8, 0  # of the spectral norm's subspace iteration

# Rounds to infinity in bfloat16: half a unit in the last place above its largest number.
BF16_INFINITE = float(2.0**128 * (1 - 2.0**-9))
# Its square is beyond float32 and bfloat16: a norm, a second moment or one product of two such values overflows.
BF16_RISK = 2.0**64


class TensorStats(NamedTuple):
    """Attributes:
    name, layer, shape, dtype: of the tensor; layer 0 = none.
    size: number of values.
    norm: 2-norm over all values; of those that are finite.
    rms: the norm over the square root of the size.
    absmax: largest absolute value that is finite.
    dead_inputs, dead_outputs: rows and columns (over all experts) with a norm below `DEAD` of their matrix's median.
    spectral: estimate from below of the largest singular value, of the largest expert; NaN where not wanted, or
        where there is no matrix or it is not finite.
    nonfinite: values that are NaN or infinite.
    infinite_in_bf16: finite values that bfloat16 rounds to infinity.
    risky: finite values above `BF16_RISK`, the former included.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str
    size: int
    norm: float
    rms: float
    absmax: float
    dead_inputs: int
    dead_outputs: int
    spectral: float
    nonfinite: int
    infinite_in_bf16: int
    risky: int


def tensor_stats(source: Source, tensor: Tensor, passes: int = PASSES) -> TensorStats:
    """Reads one tensor and reduces it.

    Args:
        source: an open checkpoint.
        tensor: one of `source.tensors(source)`.
        passes: of the spectral norm; 0 leaves it out.
    Raises:
        UserError: damaged files.
    """
    leaf, shape = source.leaves[tensor.path], form(tensor)
    total = absmax = spectral = 0.0
    nonfinite = infinite = risky = dead_in = dead_out = 0
    for matrix in matrices(source, tensor):
        here = _reduce(matrix)
        total, absmax = total + here.total, max(absmax, here.absmax)
        nonfinite, infinite, risky = nonfinite + here.nonfinite, infinite + here.infinite, risky + here.risky
        if shape.is_matrix:
            dead_in, dead_out = dead_in + _dead(here.rows_R), dead_out + _dead(here.columns_C)
            if passes and not here.nonfinite:
                spectral = max(spectral, spectral_norm(matrix, here.absmax, passes))
    if not (passes and shape.is_matrix) or nonfinite:
        spectral = math.nan
    size, norm = math.prod(tensor.shape), math.sqrt(total)
    return TensorStats(
        tensor.name, tensor.layer, tensor.shape, leaf.dtype.name, size, norm, norm / math.sqrt(max(size, 1)), absmax,
        dead_in, dead_out, spectral, nonfinite, infinite, risky,
    )  # fmt: skip


def spectral_norm(matrix: Matrix, absmax: float, passes: int = PASSES) -> float:
    """The largest singular value, estimated from below by subspace iteration on the Gram matrix.

    `WIDTH` directions from a fixed seed, one pass over the matrix an iteration, the largest Ritz value at the end.
    With the default passes it is low by less than 5% for matrices of independent Gaussian values, where the singular
    values lie densest, and by less than 0.01% where the largest stands out by half (a test holds it to both).

    Args:
        matrix: finite values.
        absmax: the largest absolute value, by which products are scaled to stay within float32.
        passes: at least 1.
    """
    if absmax == 0:
        return 0.0
    columns, ritz = matrix.shape[1], 0.0
    start = np.random.default_rng(SEED).standard_normal((columns, min(WIDTH, *matrix.shape)))
    x_CS = np.linalg.qr(start)[0].astype(np.float32)
    for _ in range(passes):
        z_CS = np.zeros_like(x_CS)
        for block in matrix.blocks():
            w_RC = _wide(block)
            z_CS = z_CS + w_RC.T @ ((w_RC @ x_CS) / absmax) / absmax
        ritz = np.linalg.eigvalsh((x_CS.T @ z_CS).astype(np.float64))[-1]
        x_CS = np.linalg.qr(z_CS)[0]
    return absmax * math.sqrt(max(float(ritz), 0.0))


class _Reduced(NamedTuple):
    total: float
    absmax: float
    nonfinite: int
    infinite: int
    risky: int
    rows_R: np.ndarray
    columns_C: np.ndarray


def _reduce(matrix: Matrix) -> _Reduced:
    absmax, nonfinite, infinite, risky = 0.0, 0, 0, 0
    rows, columns_C = [], np.zeros(matrix.shape[1])
    for block in matrix.blocks():
        w_RC = _wide(block)
        largest = float(np.max(np.abs(w_RC), initial=0.0))
        if not math.isfinite(largest):
            finite = np.isfinite(w_RC)
            nonfinite += int(w_RC.size - finite.sum())
            w_RC = np.where(finite, w_RC, 0)
            largest = float(np.max(np.abs(w_RC), initial=0.0))
        absmax = max(absmax, largest)
        if largest > BF16_RISK:
            size = np.abs(w_RC)
            infinite, risky = infinite + int((size >= BF16_INFINITE).sum()), risky + int((size > BF16_RISK).sum())
            w_RC = w_RC.astype(np.float64)
        rows.append(np.einsum("rc,rc->r", w_RC, w_RC).astype(np.float64))
        columns_C += np.einsum("rc,rc->c", w_RC, w_RC)
    rows_R = np.concatenate(rows) if rows else np.zeros(0)
    return _Reduced(float(rows_R.sum()), absmax, nonfinite, infinite, risky, rows_R, columns_C)


def _dead(squares: np.ndarray) -> int:
    """How many norms are next to nothing beside the median, or are zero."""
    norms = np.sqrt(squares)
    median = float(np.median(norms)) if norms.size else 0.0
    return int(np.sum(norms <= DEAD * median))


def _wide(values: np.ndarray) -> np.ndarray:
    """In float32, or float64 where it is: the values that 16 bits hold are the same there."""
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
