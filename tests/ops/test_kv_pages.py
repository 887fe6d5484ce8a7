"""Coding of KV pages, and which pages the Ops refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.ops import kv_pages
from ninfer.ops.float_codecs import bf16_to_float
from tests.helpers.kv_cache import random_bf16
from tests.helpers.recorded_launches import ShapeOnly


@dataclass(frozen=True, slots=True)
class Pages:
    pages: ShapeOnly
    scales: ShapeOnly | None


SHAPE = (9, 2, 4, 64, 256)


@given(
    kv_format=st.sampled_from(["fp8", "int8"]),
    head_dim=st.sampled_from([64, 128, 256]),
    seed=st.integers(0, 1000),
    exponent=st.integers(-12, 12),
)
def test_decoding_gives_back_what_was_coded(
    kv_format: str, head_dim: int, seed: int, exponent: int
) -> None:
    values = bf16_to_float(random_bf16((5, head_dim), seed, 2.0**exponent))
    codes, scales = kv_pages.encode(values, kv_format)
    back = kv_pages.decode(codes, scales, kv_format)
    group = head_dim if kv_format == "fp8" else kv_pages.SCALE_GROUP
    largest = np.abs(values).reshape(5, -1, group).max(-1, keepdims=True)
    error = np.abs(back - values).reshape(5, -1, group) / largest
    assert error.max() <= (2.0**-4 if kv_format == "fp8" else 0.6 / 127.0 + 2.0**-10)


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_zeros_and_huge_numbers_stay_finite(kv_format: str) -> None:
    values = np.zeros((2, 64), np.float32)
    values[1] = 3e38
    codes, scales = kv_pages.encode(values, kv_format)
    back = kv_pages.decode(codes, scales, kv_format)
    assert (back[0] == 0.0).all()
    assert np.isfinite(back).all()
    assert (back[1] > 0.0).all()


@pytest.mark.parametrize(
    ("dtype", "scales", "kv_format", "scale_bytes"),
    [
        ("uint16", None, "bf16", 0),
        ("uint8", ShapeOnly(SHAPE[:-1], "float32"), "fp8", 256),
        ("int8", ShapeOnly((*SHAPE[:-1], 4), "float16"), "int8", 512),
    ],
)
def test_a_view_says_what_pages_are(
    dtype: str, scales: ShapeOnly | None, kv_format: str, scale_bytes: int
) -> None:
    view = kv_pages.view_pages("op", Pages(ShapeOnly(SHAPE, dtype), scales))
    assert (view.format, view.num_kv_heads, view.head_dim) == (kv_format, 4, 256)
    assert view.scale_bytes == scale_bytes
    assert view.row_bytes == 256 * np.dtype(dtype).itemsize


@pytest.mark.parametrize(
    "pages",
    [
        Pages(ShapeOnly(SHAPE, "float32"), None),
        Pages(ShapeOnly((9, 4, 64, 256)), None),
        Pages(ShapeOnly((9, 3, 4, 64, 256)), None),
        Pages(ShapeOnly((9, 2, 4, 32, 256)), None),
        Pages(ShapeOnly((9, 2, 4, 64, 96)), None),
        Pages(ShapeOnly(SHAPE, address=1032), None),
        Pages(ShapeOnly(SHAPE), ShapeOnly(SHAPE[:-1], "float32")),
        Pages(ShapeOnly(SHAPE, "uint8"), None),
        Pages(ShapeOnly(SHAPE, "uint8"), ShapeOnly(SHAPE[:-1], "float16")),
        Pages(ShapeOnly(SHAPE, "int8"), ShapeOnly(SHAPE[:-1], "float16")),
    ],
)
def test_other_pages_are_refused(pages: Any) -> None:
    with pytest.raises(OpContractError, match="op: "):
        kv_pages.view_pages("op", pages)
