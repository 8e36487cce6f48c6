"""MXFP4, the storage format of Kimi K3's routed experts: 4-bit elements that share a scale a block of 32 (spec §9).

Plain numpy, because whole checkpoints are converted with it on the host, a tensor at a time.
"""

from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 32  # input columns that share a scale
BIAS = 127  # of a scale's exponent
NAN_SCALE = 255

# E2M1: bit 3 is the sign, the other three number these.
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
# A byte's two elements, the low nibble first.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)
_PAIR_BITS = _PAIRS.astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]

ScaleRule = Literal["floor", "round", "ceil"]
# An element is at most 6 * 2^e, and amax = m * 2^k with m in [1/2, 1): e is k - 3, or one more from this m on.
# "floor", of the OCP MX specification, lets blocks with amax in (6, 8) * 2^e saturate; "ceil" lets none; "round" is
# between them: amax goes to the power of two that it would reach with a one-bit mantissa.
_RAISE_FROM = {"floor": 1.0, "round": 0.875, "ceil": np.nextafter(np.float32(0.75), np.float32(1))}


class MXFP4(NamedTuple):
    """A packed matrix.

    Attributes:
        packed: uint8 [..., out, in/2], the even column in the low nibble.
        scale: uint8 [..., out, in/32]; byte e stands for 2^(e - 127), 255 for NaN.
    """

    packed: np.ndarray
    scale: np.ndarray


def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The values a packed matrix stands for; every one of them is also a bfloat16.

    Args:
        packed: uint8 [..., out, in/2].
        scale: uint8 [..., out, in/32].
    Returns:
        float32 [..., out, in].
    Raises:
        ValueError: the shapes do not belong together.
    """
    columns = packed.shape[-1] * 2
    if packed.shape[:-1] != scale.shape[:-1] or columns != scale.shape[-1] * BLOCK:
        raise ValueError(
            f"packed {list(packed.shape)} needs a scale a row and {BLOCK} columns, not {list(scale.shape)}"
        )
    values = _PAIRS[packed].reshape(*scale.shape, BLOCK)
    values *= _power(scale)[..., None]
    return values.reshape(*packed.shape[:-1], -1)


def decode_bfloat16(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`decode` as bfloat16, several times as fast: a scale is added to exponents, as integers.

    Args:
        packed, scale: as in `decode`.
    Returns:
        bfloat16 [..., out, in], equal to the float32 values.
    Raises:
        ValueError: the shapes do not belong together.
    """
    if scale.size == 0 or scale.min() < 2 or scale.max() > 252:  # results that are not normal
        return decode(packed, scale).astype(ml_dtypes.bfloat16)
    _check_shapes(packed, scale)
    bits = _PAIR_BITS[packed].view(np.uint16).reshape(*scale.shape, BLOCK)
    shift = (scale.astype(np.uint16) - BIAS) << 7  # modulo 2^16
    bits += np.where(bits << 1, shift[..., None], np.uint16(0))  # zeros stay
    return bits.reshape(*packed.shape[:-1], -1).view(ml_dtypes.bfloat16)


def encode(values: np.ndarray, rule: ScaleRule = "floor", stored_scale: np.ndarray | None = None) -> MXFP4:
    """Packs a matrix; elements go to the nearest of E2M1, ties to the even code.

    Args:
        values: float [..., out, in], in a multiple of 32.
        rule: how a block's scale follows from its largest magnitude, see `_RAISE_FROM`.
        stored_scale: uint8 [..., out, in/32], scales that the values may have been decoded with. A block that they
            represent exactly keeps its own; so an untouched matrix gets the bytes it was decoded from.
    Returns:
        MXFP4.
    Raises:
        ValueError: the columns do not divide into blocks, or a value is not finite.
    """
    if values.shape[-1] % BLOCK:
        raise ValueError(f"{values.shape[-1]} input columns do not divide into blocks of {BLOCK}")
    blocks = values.astype(np.float32, order="C", copy=False).reshape(*values.shape[:-1], -1, BLOCK)
    if not np.isfinite(blocks).all():
        raise ValueError("a value is not finite, and MXFP4 has none that is not")
    mantissa, exponent = np.frexp(np.max(np.abs(blocks), axis=-1))
    exponent = exponent - 3 + (mantissa >= _RAISE_FROM[rule])
    scale = np.where(mantissa == 0, BIAS, np.clip(exponent + BIAS, 0, NAN_SCALE - 1)).astype(np.uint8)
    codes = _nearest(blocks, scale)
    if stored_scale is not None:
        stored_codes = _nearest(blocks, stored_scale)
        exact = np.all(_VALUES[stored_codes] * _power(stored_scale)[..., None] == blocks, axis=-1)
        scale = np.where(exact, stored_scale, scale)
        codes = np.where(exact[..., None], stored_codes, codes)
    codes = codes.reshape(values.shape)
    return MXFP4(codes[..., 0::2] | (codes[..., 1::2] << 4), scale)


def _check_shapes(packed: np.ndarray, scale: np.ndarray) -> None:
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(
            f"packed {list(packed.shape)} needs a scale a row and {BLOCK} columns, not {list(scale.shape)}"
        )


def _power(scale: np.ndarray) -> np.ndarray:
    power = np.ldexp(np.float32(1), np.where(scale == NAN_SCALE, 0, scale.astype(np.int32) - BIAS))
    return np.where(scale == NAN_SCALE, np.float32("nan"), power)


def _nearest(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """uint8 codes of blocks [..., 32] at given scales."""
    with np.errstate(over="ignore", invalid="ignore"):  # a scale that does not fit saturates
        ratio = np.abs(np.ldexp(blocks, BIAS - scale.astype(np.int32)[..., None]))
    codes = np.signbit(blocks).astype(np.uint8) << 3
    for code, middle in enumerate((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2):
        codes += (ratio > middle) if code % 2 == 0 else (ratio >= middle)
    return codes
