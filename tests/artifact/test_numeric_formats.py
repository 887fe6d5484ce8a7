from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.artifact import numeric_formats
from ninfer.artifact.numeric_formats import CHUNK_ELEMENTS, FLOAT_FORMATS, has_e4m3_nan


def all_codes() -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.arange(1 << 16, dtype=np.uint16)


def widened(name: str, raw: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    stored = FLOAT_FORMATS[name]
    out = np.empty(len(raw) // stored.item_bytes, np.float32)
    stored.widen(memoryview(raw), out)
    return out


def test_every_bf16_code_is_the_upper_half_of_a_float32() -> None:
    values = widened("BF16", all_codes().tobytes())
    assert np.array_equal(values.view(np.uint32), all_codes().astype(np.uint32) << 16)


def test_every_f16_code_has_the_value_of_the_standard() -> None:
    codes = all_codes()
    sign = np.where(codes >> 15, -1.0, 1.0)
    exponent, mantissa = (codes >> 10 & 31).astype(int), (codes & 1023).astype(float)
    magnitude = np.where(
        exponent > 0, (1 + mantissa / 1024) * 2.0 ** (exponent - 15), mantissa * 2.0**-24
    )
    finite = exponent < 31
    values = widened("F16", codes.tobytes())
    assert np.array_equal(values[finite], (sign * magnitude)[finite].astype(np.float32))


def test_f32_is_copied_bit_for_bit() -> None:
    codes = np.array([0, 1, 0x80000000, 0x7F7FFFFF, 0x00800000], np.uint32)
    assert np.array_equal(widened("F32", codes.tobytes()).view(np.uint32), codes)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_finiteness_of_every_16_bit_code(name: str) -> None:
    codes = all_codes()
    expected = np.isfinite(widened(name, codes.tobytes()))
    stored = FLOAT_FORMATS[name]
    for code, is_finite in zip(codes[::97], expected[::97], strict=True):
        assert stored.is_finite(memoryview(code.tobytes())) == is_finite
    assert stored.is_finite(memoryview(codes[expected].tobytes()))
    assert not stored.is_finite(memoryview(codes.tobytes()))


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_finiteness_of_f32(values: list[float]) -> None:
    array = np.array(values, np.float32)
    assert FLOAT_FORMATS["F32"].is_finite(memoryview(array.tobytes())) == np.isfinite(array).all()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_chunks_cover_the_bytes_in_order(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numeric_formats, "CHUNK_ELEMENTS", 4)
    raw = bytes(range(2 * count))
    chunks = list(FLOAT_FORMATS["BF16"].chunks(memoryview(raw)))
    assert b"".join(chunks) == raw
    assert all(0 < len(chunk) <= 8 for chunk in chunks)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [0, 7, 8, 16, 18])
def test_a_nan_among_e4m3_codes_is_seen_at_any_place(code: int, place: int) -> None:
    codes = bytearray([0x7E, 0xFE, 0x00, 0x80, 0x3F, 0x7D] * 4)[:19]
    assert not has_e4m3_nan(memoryview(bytes(codes)))
    codes[place] = code
    assert has_e4m3_nan(memoryview(bytes(codes)))


def test_a_nan_behind_the_first_piece_is_seen() -> None:
    codes = bytearray(CHUNK_ELEMENTS + 3)
    codes[CHUNK_ELEMENTS + 1] = 0xFF
    assert has_e4m3_nan(memoryview(bytes(codes)))
    assert not has_e4m3_nan(memoryview(b""))
