"""What a launch reads off an array, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ninfer.contract.errors import OpContractError
from ninfer.kernels.device_array import view_of
from tests.helpers.fake_array import FakeArray


def test_a_contiguous_matrix() -> None:
    view = view_of("op", "x", FakeArray((3, 64), "uint16", 4096), "uint16", 2)
    assert (view.address, view.shape, view.row_stride) == (4096, (3, 64), 64)


def test_rows_that_lie_apart() -> None:
    view = view_of("op", "x", FakeArray((3, 64), "uint16", row_stride=80), "uint16", 2)
    assert view.row_stride == 80


def test_the_stride_of_a_single_row_means_nothing() -> None:
    view = view_of("op", "x", FakeArray((1, 64), "uint16", row_stride=9999), "uint16", 2)
    assert view.row_stride == 64


@pytest.mark.parametrize(
    ("array", "rank"),
    [
        (FakeArray((3, 64), "float32"), 2),
        (FakeArray((3, 64), "int16"), 2),
        (FakeArray((64,), "uint16"), 2),
        (FakeArray((1, 3, 64), "uint16"), 2),
        (FakeArray((3, 64), "uint16"), 1),
    ],
)
def test_another_dtype_or_rank_is_refused(array: FakeArray, rank: int) -> None:
    with pytest.raises(OpContractError, match="op: x is"):
        view_of("op", "x", array, "uint16", rank)


class Transposed:
    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        return {"shape": (3, 64), "typestr": "<u2", "data": (4096, False), "strides": (2, 6)}


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(OpContractError, match="not contiguous"):
        view_of("op", "x", Transposed(), "uint16", 2)
