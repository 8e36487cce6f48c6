"""Decays inside one chunk of one head, as a few [C, K] factors that are products' operands: a list of levels.

A pair row i > column j of a chunk needs exp(g_{j+1} + ... + g_i) per channel, inside a product. Each pair is served by
exactly one level, whose rows carry the decay from an anchor and whose columns carry the decay to it.

- Halving levels, size s: blocks of 2 s rows, anchor the last row of the first half. Rows are second halves, columns are
  first halves, both factors at most 1, whatever the decay.
- Without a promised floor of the decay the sizes are C/2, ... 2, 1 and the diagonal is a level without decay.
- With a floor (K3's gate is above -5) sizes stop at 16 and one level serves the blocks of 16 rows: anchor just before a
  block's first row, rows exp(sum + shift), columns exp(-sum - shift). The shift is a constant, half of what 16 rows
  can decay, so nothing overflows, no gradient of a saturated gate is flushed to zero, and the anchor is in the past.

The sums of g are products of a 0/1 matrix with g cut in bfloat16 parts: exact products, added in float32, always of
numbers of one sign, so nothing cancels.

Letters: C rows of a chunk, L kinds of sums. Source: spec §2.5.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda_chunk import BLOCK, LOG2_E, dot, iotas

EXPONENT_SPAN = 85.0  # exp of this, times the size of q and k, is finite in float32 and in bfloat16


class Level(NamedTuple):
    """Factors of rows and columns [C, K], 0 where a row plays no part; pairs [C, C] bool or None for all."""

    row: jax.Array
    column: jax.Array
    pairs: jax.Array | None
    log_sign: float | None  # of the column's exponent in the level's sum, the row's being +1; None: no decay here


class Decays(NamedTuple):
    levels: list[Level]
    from_start: jax.Array  # [C, K] from before the chunk's first row to after each row
    to_end: jax.Array  # [C, K] from after each row to the chunk's end
    whole: jax.Array  # [1, K]


def blocked(floor: float | None) -> bool:
    """Whether the promised floor of the log decay allows the level of 16-row blocks."""
    return floor is not None and -floor * BLOCK <= EXPONENT_SPAN


def sizes(C: int, floor: float | None) -> tuple[int, ...]:
    """Halves' sizes, largest first."""
    smallest = BLOCK if blocked(floor) else 1
    return tuple(C >> i for i in range(1, int(math.log2(C // smallest)) + 1))


def exact_dot(zero_one, x, contract: str, parts: int):
    """A 0/1 matrix times float32 x, exact to 8 bits a part (3 parts hold all of float32)."""
    total, rest = 0.0, x
    for _ in range(parts):
        part = rest.astype(jnp.bfloat16)
        rest = rest - part.astype(jnp.float32)
        total += dot(zero_one, part, contract, jnp.bfloat16)
    return total


def sum_matrix(C: int, floor: float | None):
    """[L C, C] bfloat16 0/1: which rows' g each exponent adds up.

    Kinds: up to the row, after the row, then a halving level each (in a second half up to the row, in a first half
    after it, inside the half), then up to the row inside its block of 16 if there is a floor.
    """
    row, column = iotas(C, C)
    kinds = [column <= row, column > row]
    for s in sizes(C, floor):
        kinds.append((row // s == column // s) & jnp.where(row & s != 0, column <= row, column > row))
    if blocked(floor):
        kinds.append((row // BLOCK == column // BLOCK) & (column <= row))
    return jnp.concatenate(kinds, axis=0).astype(jnp.bfloat16)


def decays(g_CK, sums_XC, floor: float | None, parts: int) -> Decays:
    """Every factor from log decays in base 2, float32, <= 0."""
    C = g_CK.shape[0]
    sums = exact_dot(sums_XC, g_CK, "mk,kn", parts)
    kinds = [sums[i * C : (i + 1) * C] for i in range(sums.shape[0] // C)]
    from_start, to_end = jnp.exp2(kinds[0]), jnp.exp2(kinds[1])
    row, column = iotas(C, C)
    levels = []
    for s, kind in zip(sizes(C, floor), kinds[2:], strict=False):
        decay, second = jnp.exp2(kind), iotas(*g_CK.shape)[0] & s != 0
        pairs = None if 2 * s == C else row // (2 * s) == column // (2 * s)
        levels.append(Level(jnp.where(second, decay, 0.0), jnp.where(second, 0.0, decay), pairs, 1.0))
    if blocked(floor):
        exponent = kinds[-1] - 0.5 * BLOCK * floor * LOG2_E
        levels.append(Level(jnp.exp2(exponent), jnp.exp2(-exponent), row // BLOCK == column // BLOCK, -1.0))
    else:
        levels.append(Level(jnp.ones_like(g_CK), jnp.ones_like(g_CK), row == column, None))
    return Decays(levels, from_start, to_end, from_start[C - 1 :])
