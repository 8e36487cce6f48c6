"""Numbers about every tensor of a checkpoint: size, dead rows, spectral norm, and what is not finite.

No jax import here. A block of rows is in memory at a time, in float32 or wider.
"""

import math
from typing import NamedTuple

import numpy as np

from k3jax.checkpoint.matrices import Matrices, form, matrices
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
    is_matrix = min(form(tensor)[1][1:]) > 1
    total = absmax = spectral = 0.0
    nonfinite = infinite = risky = dead_in = dead_out = 0
    for group in matrices(source, tensor):
        here = _reduce(group)
        total, absmax = total + float(here.rows_NR.sum()), max(absmax, here.absmax)
        nonfinite, infinite, risky = nonfinite + here.nonfinite, infinite + here.infinite, risky + here.risky
        if is_matrix:
            dead_in, dead_out = dead_in + _dead(here.rows_NR), dead_out + _dead(here.columns_NC)
            if passes and not nonfinite:
                spectral = max(spectral, float(np.max(spectral_norms(group, here.absmax, passes))))
    if not (passes and is_matrix) or nonfinite:
        spectral = math.nan
    size, norm, dtype = math.prod(tensor.shape), math.sqrt(total), source.leaves[tensor.path].dtype.name
    return TensorStats(
        tensor.name, tensor.layer, tensor.shape, dtype, size, norm, norm / math.sqrt(max(size, 1)), absmax, dead_in,
        dead_out, spectral, nonfinite, infinite, risky,
    )  # fmt: skip


def spectral_norms(group: Matrices, absmax: float, passes: int = PASSES) -> np.ndarray:
    """Each matrix's largest singular value, estimated from below by subspace iteration on its Gram matrix.

    `WIDTH` directions from a fixed seed, one pass over the matrices an iteration, the largest Ritz value at the end.
    With the default passes it is low by less than 5% for matrices of independent Gaussian values, where the singular
    values lie densest, and by less than 0.01% where the largest stands out by half (a test holds it to both).

    Args:
        group: matrices of finite values.
        absmax: the largest absolute value, by which products are scaled to stay within float32.
        passes: at least 1.
    Returns:
        float64 [N].
    """
    N, R, C = group.shape
    if absmax == 0:
        return np.zeros(N)
    start_CS = np.random.default_rng(SEED).standard_normal((C, min(WIDTH, R, C)))
    x_NCS = np.repeat(np.linalg.qr(start_CS)[0].astype(np.float32)[None], N, axis=0)
    for _ in range(passes):
        z_NCS = np.zeros_like(x_NCS)
        for block in group.blocks():
            w_NRC = _wide(block)
            z_NCS = z_NCS + w_NRC.swapaxes(1, 2) @ ((w_NRC @ x_NCS) / absmax) / absmax
        ritz_N = np.linalg.eigvalsh((x_NCS.swapaxes(1, 2) @ z_NCS).astype(np.float64))[:, -1]
        x_NCS = np.linalg.qr(z_NCS)[0]
    return absmax * np.sqrt(np.maximum(ritz_N, 0.0))


class _Reduced(NamedTuple):
    """Sums of squares by row and column, float64, and what `TensorStats` has."""

    rows_NR: np.ndarray
    columns_NC: np.ndarray
    absmax: float
    nonfinite: int
    infinite: int
    risky: int


def _reduce(group: Matrices) -> _Reduced:
    N, _, C = group.shape
    absmax, nonfinite, infinite, risky = 0.0, 0, 0, 0
    rows, columns_NC = [], np.zeros((N, C))
    for block in group.blocks():
        w_NRC = _wide(block)
        largest = max(float(w_NRC.max(initial=0.0)), -float(w_NRC.min(initial=0.0)))
        if not math.isfinite(largest):
            finite = np.isfinite(w_NRC)
            nonfinite += int(w_NRC.size - finite.sum())
            w_NRC = np.where(finite, w_NRC, 0)
            largest = float(np.max(np.abs(w_NRC), initial=0.0))
        absmax = max(absmax, largest)
        if largest > BF16_RISK:
            size = np.abs(w_NRC)
            infinite, risky = infinite + int((size >= BF16_INFINITE).sum()), risky + int((size > BF16_RISK).sum())
            w_NRC = w_NRC.astype(np.float64)
        squares_NRC = np.square(w_NRC)
        rows.append(squares_NRC.sum(2, dtype=np.float64))
        columns_NC += squares_NRC.sum(1)
    rows_NR = np.concatenate(rows, axis=1) if rows else np.zeros((N, 0))
    return _Reduced(rows_NR, columns_NC, absmax, nonfinite, infinite, risky)


def _dead(squares: np.ndarray) -> int:
    """How many norms, of the last axis, are next to nothing beside their median, or are zero."""
    norms = np.sqrt(squares)
    return int(np.sum(norms <= DEAD * np.median(norms, axis=-1, keepdims=True)))


def _wide(values: np.ndarray) -> np.ndarray:
    """In float32, or float64 where it is: the values that 16 bits hold are the same there."""
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
