"""The mathematics of one chunk of one head, as functions on values in VMEM.

Letters beyond K and V: C rows of a chunk. Everything is causal to the bit: what a row of the scores or of the inverse
holds depends on that row and on rows before it only. Rows after it enter products as exact zeros.
"""

import contextlib
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

CHUNK = 128  # tokens; the scores of a chunk fill the 128 lanes of a register
BLOCK = 16  # rows of a diagonal block
LARGEST_FUSED = 64  # rows of a left operand up to which two products are fused
VMEM_LIMIT = 32 * 2**20  # bytes; what eight heads at once spill passes v5e's and v5p's default of 16 MiB
LOG2_E = 1.4426950408889634


def dot(x, y, contract: str, dtype):
    """Product of two matrices; `contract` names the shared letter as einsum does, "mk,kn" or "mk,nk".

    Operands of dtype bfloat16 are rounded and multiplied in one pass, of float32 in as many as give full precision.
    """
    left, right = contract.split(",")
    shared = next(letter for letter in left if letter in right)
    dims = (((left.index(shared),), (right.index(shared),)), ((), ()))
    if dtype == jnp.bfloat16:
        x, y = x.astype(dtype), y.astype(dtype)
        return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
    return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def iotas(rows, columns):
    return lax.broadcasted_iota(jnp.int32, (rows, columns), 0), lax.broadcasted_iota(jnp.int32, (rows, columns), 1)


def sum_matrix(select_RC, parts):
    """A 0/1 matrix as `sum_rows` takes it."""
    return jnp.concatenate([jnp.where(select_RC, 1.0, 0.0).astype(jnp.bfloat16)] * parts, axis=1)


def sum_rows(select, x_CK, parts):
    """select @ x for a 0/1 matrix, exact to `parts` x 8 bits of each number: x is split into bfloat16 numbers."""
    pieces = []
    for _ in range(parts):
        pieces.append(x_CK.astype(jnp.bfloat16))
        x_CK = x_CK - pieces[-1].astype(jnp.float32)
    return (yield Product(select, jnp.concatenate(pieces), "mk,kn", jnp.bfloat16))


class Product(NamedTuple):
    """A product that a head asks for: the arguments of `dot`."""

    x: jnp.ndarray
    y: jnp.ndarray
    contract: str
    dtype: jnp.dtype


class Intra(NamedTuple):
    """What the decays of a chunk make of its queries and keys."""

    qk_CC: jnp.ndarray  # decayed inner products of queries with keys, j <= i, else 0
    kk_CC: jnp.ndarray  # of keys with keys, j < i, else 0
    q_start_CK: jnp.ndarray  # Q E, reads the entering state
    k_start_CK: jnp.ndarray  # K E
    k_end_CK: jnp.ndarray  # K F, writes to the leaving state
    whole_1K: jnp.ndarray  # decay over the whole chunk


def intra_chunk(q_CK, k_CK, g_CK, floor, dtype, constant):
    """Scores and decayed rows of a chunk.

    Args:
        q_CK: queries, scaled; float32 as all here.
        k_CK: keys.
        g_CK: log decays, base 2, finite.
        floor: a promise that no g is below it, base 2, or None.
        dtype: of the operands of products.
        constant: constant(key, make) gives make(), the same for all heads.
    Returns:
        Intra.
    """
    parts = 2 if dtype == jnp.bfloat16 else 3
    if floor_applies(floor):
        return (yield from _intra_floor(q_CK, k_CK, g_CK, floor, parts, dtype, constant))
    qk_CC, kk_CC = yield from scores(q_CK, k_CK, g_CK, parts, dtype, constant)
    row, column = iotas(*g_CK.shape[:1] * 2)
    prefix_CK = yield from sum_rows(constant("prefix", lambda: sum_matrix(column <= row, parts)), g_CK, parts)
    suffix_CK = yield from sum_rows(constant("suffix", lambda: sum_matrix(column > row, parts)), g_CK, parts)
    from_start_CK, to_end_CK = jnp.exp2(prefix_CK), jnp.exp2(suffix_CK)
    return Intra(qk_CC, kk_CC, q_CK * from_start_CK, k_CK * from_start_CK, k_CK * to_end_CK, from_start_CK[-1:])


def floor_applies(floor):
    """Whether 16 rows of the promised floor (base 2), taken from their middle, stay far inside float32's exponents."""
    return floor is not None and -BLOCK * floor / 2 < 64


def _intra_floor(q_CK, k_CK, g_CK, floor, parts, dtype, constant):
    """Rows decay from before their block's first row, columns up to there: growing by 2**64 at most, in one constant.

    With L the sums inside blocks of 16 rows, rows carry 2**(L - m) and columns of their own block 2**(m - L), where the
    constant m, the middle of what L can be, keeps both factors between 2**-64 and 2**64. It is a whole number and a
    factor of its own: adding it to L would round L. From block to block the columns decay further.
    """
    C, K = g_CK.shape
    row, column = iotas(C, C)
    inside = constant("inside", lambda: sum_matrix((row // BLOCK == column // BLOCK) & (column <= row), parts))
    local_CK = yield from sum_rows(inside, g_CK, parts)
    to_middle = 2.0 ** round(floor * BLOCK / 2)
    row_decay_CK = jnp.exp2(local_CK) * (1 / to_middle)
    q_rows, k_rows, k_columns = q_CK * row_decay_CK, k_CK * row_decay_CK, k_CK * (jnp.exp2(-local_CK) * to_middle)
    before_1K = jnp.zeros((1, K), jnp.float32)
    blocks, columns = [], k_columns[:BLOCK]
    for end in range(BLOCK, C + 1, BLOCK):
        block = slice(end - BLOCK, end)
        later = [jnp.zeros((C - end, K), jnp.float32)] if end < C else []
        rows = jnp.concatenate([q_rows[block], k_rows[block]])
        both = yield Product(rows, jnp.concatenate([columns, *later]), "mk,nk", dtype)
        row, column = iotas(BLOCK, C)
        row += end - BLOCK
        qk, kk = jnp.where(column <= row, both[:BLOCK], 0.0), jnp.where(column < row, both[BLOCK:], 0.0)
        start_1K = jnp.exp2(before_1K) * to_middle
        blocks.append((qk, kk, q_rows[block] * start_1K, k_rows[block] * start_1K))
        total_1K = local_CK[end - 1 : end]
        before_1K = before_1K + total_1K
        if end < C:
            columns = jnp.concatenate([columns * jnp.exp2(total_1K), k_columns[end : end + BLOCK]])
    k_end_CK = columns * (jnp.exp2(total_1K) * (1 / to_middle))
    return Intra(*(jnp.concatenate(x) for x in zip(*blocks, strict=True)), k_end_CK, jnp.exp2(before_1K))


def scores(q_CK, k_CK, g_CK, parts, dtype, constant):
    """Decayed inner products of queries with keys (j <= i) and of keys with keys (j < i), 0 elsewhere: any decay."""
    C = g_CK.shape[0]
    row, column = iotas(C, C)
    diagonal = jnp.sum(q_CK * k_CK, axis=1, keepdims=True)
    qk_CC = jnp.where(row == column, diagonal, 0.0)
    kk_CC = jnp.zeros((C, C), jnp.float32)
    s = 1
    while s < C:
        select = constant(s, lambda: sum_matrix(_halving_sums(row, column, s), parts))
        f_CK = yield from sum_rows(select, g_CK, parts)
        f_CK = jnp.exp2(f_CK)
        columns_CK = k_CK * f_CK
        rows = jnp.concatenate([q_CK * f_CK, columns_CK])
        both = yield Product(rows, columns_CK, "mk,nk", dtype)
        pair = _pairs(row, column, s)
        qk_CC, kk_CC = jnp.where(pair, both[:C], qk_CC), jnp.where(pair, both[C:], kk_CC)
        s *= 2
    return qk_CC, kk_CC


def _pairs(row, column, s):
    """Where a row in a second half of s rows meets a column of the first half beside it."""
    return ((row ^ column) >= s) & ((row ^ column) < 2 * s) & (row > column)


def _halving_sums(row, column, s):
    """Row i sums g from the pivot (the last row of the first half) to i, or from after i to the pivot."""
    second = (row & s) != 0
    return (row // s == column // s) & ((second & (column <= row)) | (~second & (column > row)))


def unit_lower_inverse(strict_CC, beta_1C, dtype):
    """(I + strict * beta)^-1 of a strictly lower triangular matrix and a scale of its columns.

    Diagonal blocks of 16 rows by forward substitution, all of a chunk side by side in the lanes; then pairs of blocks
    by exact elimination, [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], again all pairs side by side: a block
    of s rows holds lanes b s to (b + 1) s - 1, and only its rows are multiplied.
    """
    C = strict_CC.shape[0]
    s = BLOCK
    _, lane = iotas(s, C)
    diagonal = strict_CC[:s]
    for b in range(1, C // s):
        diagonal = jnp.where(lane // s == b, strict_CC[b * s : (b + 1) * s], diagonal)
    inverse = yield from _substitute(diagonal * beta_1C)
    while s < C:
        pairs = range(C // s // 2)
        _, lane = iotas(s, C)
        below = strict_CC[s : 2 * s]
        for p in pairs[1:]:
            below = jnp.where(lane // (2 * s) == p, strict_CC[(2 * p + 1) * s : (2 * p + 2) * s], below)
        first = (lane // s) % 2 == 0
        below = jnp.where(first, below, 0.0) * beta_1C
        blocks = [jnp.where(lane // s == b, 1.0, 0.0).astype(dtype) for b in range(C // s)]
        operand = inverse.astype(dtype)
        half = yield Product(below, jnp.concatenate([operand * block for block in blocks]), "mk,kn", dtype)
        half = half.astype(dtype)
        zeros = jnp.zeros((s, C), dtype)
        right = jnp.concatenate([x for p in pairs for x in (zeros, half * blocks[2 * p])])
        corner = yield Product(jnp.where(first, 0.0, inverse), right, "mk,kn", dtype)
        inverse = jnp.concatenate([jnp.where(first, inverse, 0.0), jnp.where(first, -corner, inverse)])
        s *= 2
    return inverse


def _substitute(diagonal):
    """Inverses of unit lower triangular [16, 16] blocks side by side, from their strictly lower parts."""
    half = BLOCK // 2
    row, lane = iotas(half, diagonal.shape[1])
    column = lane % BLOCK
    lower, inverse = (diagonal[:half], diagonal[half:]), [jnp.where(column == row + i * half, 1.0, 0.0) for i in (0, 1)]
    for j in range(BLOCK - 1):
        row_j = inverse[j // half][j % half : j % half + 1]
        for i in range(2):
            if j < (i + 1) * half - 1:
                column_j = jnp.take_along_axis(lower[i], lane - column + j, axis=1)
                inverse[i] = inverse[i] - column_j * row_j
        yield
    return jnp.concatenate(inverse)


def side_by_side(heads):
    """Runs heads in lockstep, one product of each at a time.

    A head is a generator that yields a Product and is sent its value, or yields None to let the others go on. So
    instructions that do not wait for each other stand side by side, which hides the latency of a matrix unit.
    """
    values = dict.fromkeys(heads)
    while values:
        asked = {}
        for head, value in values.items():
            with contextlib.suppress(StopIteration):
                asked[head] = head.send(value)
        values = dict.fromkeys(asked)
        products = [head for head in asked if asked[head] is not None]
        for i in range(0, len(products), 2):
            pair = products[i : i + 2]
            values.update(zip(pair, _fused(*(asked[head] for head in pair)), strict=True))


def _fused(first: Product, second: Product | None = None):
    """The values of two products of equal shapes, as one product where that is cheaper.

    A matrix unit takes 256 columns at the price of 128. Two small left operands, one above the other, meet both right
    operands side by side, and two quarters of what comes out are dropped; a left operand that is shared meets both.
    """
    if second is None:
        return (dot(*first),)
    n_axis = first.contract.split(",")[1].index("n")
    right = jnp.concatenate([first.y.astype(first.dtype), second.y.astype(first.dtype)], axis=n_axis)
    M, N = first.x.shape[0], first.y.shape[n_axis]
    if first.x is second.x:
        both = dot(first.x, right, first.contract, first.dtype)
        return both[:, :N], both[:, N:]
    if M > LARGEST_FUSED:
        return dot(*first), dot(*second)
    both = dot(jnp.concatenate([first.x, second.x]), right, first.contract, first.dtype)
    return both[:M, :N], both[M:, N:]
