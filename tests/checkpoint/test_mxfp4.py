"""MXFP4 against stored samples of an independent decoder, and blocks worked out by hand."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.checkpoint import mxfp4
from tests.conftest import FIXTURES

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def block(*values: float) -> np.ndarray:
    """A row of one block, zeros behind the values."""
    return np.array([[*values, *[0.0] * (32 - len(values))]], np.float32)


def test_decodes_what_another_program_decoded():
    packed = load_file(FIXTURES / "kimi_k3_tiny" / "mxfp4_packed.safetensors")
    decoded = load_file(FIXTURES / "kimi_k3_tiny" / "mxfp4_decoded.safetensors")
    assert len(decoded) == 4
    for name, want in decoded.items():
        got = mxfp4.decode(packed[f"{name}_packed"], packed[f"{name}_scale"])
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_every_code_and_scale_survives_with_stored_scales():
    """Also -0, blocks of zeros, blocks whose largest element is small, and scales at the ends of the range."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (300, 64), np.uint8)
    packed[0], packed[1], packed[2] = 0, 0x88, packed[2] & 0x99  # 0 alone, -0 alone, small codes
    scale = rng.integers(0, 252, (300, 4), np.uint8)  # 6 * 2^124 is the largest that float32 holds
    scale[3], scale[4] = 0, 252
    values = mxfp4.decode(packed, scale)
    assert np.isfinite(values).all()
    got = mxfp4.encode(values, stored_scale=scale)
    np.testing.assert_array_equal(got.packed, packed)
    np.testing.assert_array_equal(got.scale, scale)
    for low, high in ((0, 255), (2, 252)):  # the general way, and the one for normal results
        rows = ((scale >= low) & (scale <= high)).all(1)
        narrow = mxfp4.decode_bfloat16(packed[rows], scale[rows])
        assert narrow.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(narrow.astype(np.float32), values[rows])
        np.testing.assert_array_equal(np.signbit(narrow), np.signbit(values[rows]))


def test_a_block_that_changed_gets_a_scale_by_the_rule():
    values = np.concatenate([block(6.0), block(0.5)], axis=1)
    stored = np.array([[127, 127]], np.uint8)
    values[0, 0] = 100.0
    got = mxfp4.encode(values, stored_scale=stored)
    assert got.scale.tolist() == [[131, 127]]  # floor(log2 100) - 2 = 4; 0.5 by the rule would be -3


def test_low_nibble_is_the_even_column_and_ties_go_to_even_codes():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    rounded = [0, 1, 1, 2, 2, 4, 4]
    got = mxfp4.encode(block(6.0, -6.0, *ties, *[-x for x in ties]))
    assert got.scale.tolist() == [[127]]
    assert got.packed[0, 0] == 0xF7  # 6 is code 7, -6 is code 15
    want = block(6.0, -6.0, *rounded, *[-x for x in rounded])
    np.testing.assert_array_equal(mxfp4.decode(*got), want)


@pytest.mark.parametrize(
    ("rule", "amax", "exponent", "largest"),
    [
        ("floor", 6.0, 0, 6.0),
        ("floor", 7.9, 0, 6.0),  # saturates
        ("floor", 8.0, 1, 8.0),
        ("round", 6.9, 0, 6.0),
        ("round", 7.0, 1, 8.0),
        ("ceil", 6.0, 0, 6.0),
        ("ceil", 6.1, 1, 6.0),
        ("ceil", 12.0, 1, 12.0),
        ("ceil", 0.75, -3, 0.75),
    ],
)
def test_scale_rules(rule, amax, exponent, largest):
    got = mxfp4.encode(block(amax, -amax), rule)
    assert got.scale.tolist() == [[127 + exponent]]
    assert mxfp4.decode(*got)[0, :2].tolist() == [largest, -largest]


@pytest.mark.parametrize("rule", ["floor", "round", "ceil"])
def test_every_element_goes_to_the_nearest(rule):
    values = np.random.default_rng(1).standard_normal((20, 96)).astype(np.float32)
    packed, scale = mxfp4.encode(values, rule)
    unit = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
    signed = np.array([*GRID, *[-x for x in GRID]])
    distance = np.abs(values[..., None] - unit[..., None] * signed)
    np.testing.assert_allclose(np.abs(mxfp4.decode(packed, scale) - values), distance.min(-1), rtol=1e-6)


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="40 input columns do not divide into blocks of 32"):
        mxfp4.encode(np.zeros((2, 40), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        mxfp4.encode(block(np.inf))
    with pytest.raises(ValueError, match="needs a scale a row and 32 columns"):
        mxfp4.decode(np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8))
    assert np.isnan(mxfp4.decode(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8))).all()
