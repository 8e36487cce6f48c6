"""Muon: which matrices lie in a parameter, and the Newton-Schulz steps that orthogonalise each of them."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.nn.parameters import parameter_spec

MuonBlocks = Literal["per_head", "whole"]
Path = tuple[str, ...]

# Moonlight/K2 constants: singular values end near 1 (0.7 to 1.2), which is what makes five steps enough.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
# Below this Frobenius norm a matrix counts as no signal: an expert without tokens comes to rest instead of
# drifting at full speed along its last, decaying momentum.
EPS = 1e-7
# One bf16 pass, a TPU's default for float32 operands, would round every product of the iteration.
PRECISION = jax.lax.Precision.HIGHEST


_dot = partial(jnp.matmul, precision=PRECISION)


@dataclass(frozen=True)
class MatrixView:
    """A parameter seen as a batch of matrices, short side first.

    Attributes:
        order: permutation of the parameter's axes: stack and batch axes, the short side's, the long side's.
        moved: the parameter's shape in that order.
        short: length of the short side.
        long: length of the long side.
    """

    order: tuple[int, ...]
    moved: tuple[int, ...]
    short: int
    long: int

    @property
    def count(self) -> int:
        """How many matrices the parameter holds."""
        return math.prod(self.moved) // (self.short * self.long)

    def split(self, leaf):
        """The parameter as [count, short, long]."""
        return leaf.transpose(self.order).reshape(-1, self.short, self.long)

    def join(self, x_NRC):
        """Undoes `split`."""
        return x_NRC.reshape(self.moved).transpose(np.argsort(self.order))


def matrix_view(path: Path, shape: tuple[int, ...], muon_blocks: MuonBlocks = "per_head") -> MatrixView | None:
    """Finds the matrices in a parameter; None if Muon leaves it to AdamW.

    Args:
        path: keys from the root to the leaf.
        shape: the leaf's shape, stack axes first.
        muon_blocks: "per_head" cuts q, k and v projections into a matrix a head; "whole" keeps all heads in
            one.

    Returns:
        A MatrixView; None if Muon leaves the parameter to AdamW.

    Raises:
        ValueError: as parameter_spec, or muon_blocks is unknown.

    Source: spec §7.2.
    """
    if muon_blocks not in ("per_head", "whole"):
        raise ValueError(f"OptimConfig.muon_blocks = {muon_blocks!r}: use 'per_head' or 'whole'")
    spec = parameter_spec(path, len(shape))
    if spec.muon is None:
        return None
    m, stack = spec.muon, len(shape) - len(spec.axes)
    head = (m.head,) if m.head and muon_blocks == "per_head" else ()

    def positions(names):
        return tuple(stack + spec.axes.index(name) for name in names)

    def size(axes):
        return math.prod(shape[a] for a in axes)

    batch = tuple(range(stack)) + positions(m.batch + head)
    # Newton-Schulz commutes with transposition, and the Gram matrix is cheapest on the short side.
    sides = [positions(m.rows), positions(name for name in m.columns if name not in head)]
    short, long = sorted(sides, key=size)
    order = batch + short + long
    return MatrixView(order, tuple(shape[a] for a in order), size(short), size(long))


def newton_schulz(x_RC: jax.Array) -> jax.Array:
    """Replaces every singular value by one near 1 and keeps the singular vectors: about U V^T.

    Each step is X <- (a I + b A + c A^2) X with A = X X^T. For a long matrix the steps act on the small Gram
    matrix alone (A <- P A P, as P is a polynomial in A) and the product of all P meets X once, at the end: the
    same polynomial for as little as a quarter of the work. Forming A only once costs accuracy in float32, at
    most 1e-3 of a singular value that the polynomial itself leaves anywhere between 0.7 and 1.2.

    Args:
        x_RC: a matrix, or a batch of them [..., R, C], with R <= C; float32 or wider.

    Returns:
        An array of the same shape and dtype. A zero matrix stays zero.

    Source: spec §7.2.
    """
    short, long = x_RC.shape[-2:]
    x_RC = x_RC / (jnp.linalg.norm(x_RC, axis=(-2, -1), keepdims=True) + EPS)
    if long < 2 * short:
        for _ in range(STEPS):
            gram_RR = _dot(x_RC, x_RC.mT)
            x_RC = A * x_RC + _dot(B * gram_RR + C * _dot(gram_RR, gram_RR), x_RC)
        return x_RC

    gram_RR = _dot(x_RC, x_RC.mT)
    identity_RR = product_RR = jnp.eye(short, dtype=x_RC.dtype)
    for i in range(STEPS):
        poly_RR = A * identity_RR + B * gram_RR + C * _dot(gram_RR, gram_RR)
        product_RR = _dot(poly_RR, product_RR) if i > 0 else poly_RR
        if i < STEPS - 1:
            gram_RR = _dot(_dot(poly_RR, gram_RR), poly_RR)
    return _dot(product_RR, x_RC)


def orthogonalise(momentum: Mapping[Path, jax.Array], muon_blocks: MuonBlocks) -> dict[Path, jax.Array]:
    """Muon's direction, before the learning rate: NS5(M) * 0.2 * sqrt(max(rows, columns)), matrix by matrix.

    Matrices of one shape, wherever they lie in the tree, go through Newton-Schulz together: batched products
    instead of many small ones, and a batch axis along which the work can be divided over devices.

    Args:
        momentum: Muon parameters' momentum by path, float32 or wider.
        muon_blocks: as in matrix_view.

    Returns:
        Arrays of the same paths, shapes and dtypes; their root mean square is near 0.2 for well-conditioned
        momentum.

    Source: spec §7.2.
    """
    views = {path: matrix_view(path, m.shape, muon_blocks) for path, m in momentum.items()}
    groups = defaultdict(list)
    for path, view in views.items():
        groups[view.short, view.long, momentum[path].dtype].append(path)

    direction = {}
    for (_, long, _), paths in groups.items():
        x_NRC = jnp.concatenate([views[path].split(momentum[path]) for path in paths])
        # A CPU works through one matrix at a time: it stays in the cache, twice as fast as batched products.
        o_NRC = jax.lax.platform_dependent(
            x_NRC, cpu=lambda x_NRC: jax.lax.map(newton_schulz, x_NRC), default=newton_schulz
        )
        ends = np.cumsum([views[path].count for path in paths])[:-1]
        for path, part_NRC in zip(paths, jnp.split(o_NRC * (0.2 * math.sqrt(long)), ends), strict=True):
            direction[path] = views[path].join(part_NRC)
    return direction
