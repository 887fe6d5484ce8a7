"""Codes to floats and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.ops.float_codecs import (
    bf16_to_float,
    e2m1_to_float,
    e4m3_to_float,
    float_to_bf16,
    float_to_e2m1,
    float_to_e4m3,
)


def test_every_finite_bf16_code_comes_back() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    finite = codes[np.isfinite(bf16_to_float(codes))]
    assert (float_to_bf16(bf16_to_float(finite)) == finite).all()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1.0 + 2**-8, 0x3F80),
        (1.0 + 3 * 2**-8, 0x3F82),
        (1.0 + 2**-8 + 2**-20, 0x3F81),
        (3.4e38, 0x7F80),
        (float("inf"), 0x7F80),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, code: int) -> None:
    assert float_to_bf16(np.array([value], np.float32))[0] == code


def test_nan_stays_nan_in_bf16() -> None:
    bits = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_float(float_to_bf16(bits))).all()


def test_e4m3_has_its_published_landmarks() -> None:
    codes = np.array([0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE, 0x7F], np.uint8)
    want = [0.0, 2**-9, 7 * 2**-9, 2**-6, 1.0, 448.0, -448.0, np.nan]
    np.testing.assert_array_equal(e4m3_to_float(codes), np.array(want, np.float32))


def test_every_finite_small_code_comes_back() -> None:
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[codes & 0x7F != 0x7F]
    assert (float_to_e4m3(e4m3_to_float(finite)) == finite).all()
    nibbles = np.arange(16, dtype=np.uint8)
    assert (float_to_e2m1(e2m1_to_float(nibbles)) == nibbles).all()


@given(st.floats(-1000, 1000, width=32))
def test_e4m3_takes_the_nearest_code_and_saturates(value: float) -> None:
    got = float(e4m3_to_float(float_to_e4m3(np.array([value], np.float32)))[0])
    finite = e4m3_to_float(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]))
    clipped = min(max(value, -448.0), 448.0)
    assert abs(got - clipped) == np.abs(finite.astype(np.float64) - clipped).min()


@given(st.floats(-10, 10, width=32))
def test_e2m1_takes_the_nearest_code_and_saturates(value: float) -> None:
    got = float(e2m1_to_float(float_to_e2m1(np.array([value], np.float32)))[0])
    table = e2m1_to_float(np.arange(16, dtype=np.uint8)).astype(np.float64)
    assert abs(got - min(max(value, -6.0), 6.0)) == np.abs(table - min(max(value, -6), 6)).min()
