from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import dflash_logits
from tests.helpers.arrays import f32, normal
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes
from tests.helpers.tolerance import FLOAT32_POINTWISE, assert_close


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("cap", [None, 2.0, 30.0])
def test_against_the_definition(scale: float, cap: float | None) -> None:
    logits = normal(np.random.default_rng(0), 3, 50, scale=4.0)
    want = logits * scale if cap is None else cap * np.tanh(logits * scale / cap)
    assert_close(
        dflash_logits.reference(f32(logits), scale=scale, cap=cap), want, FLOAT32_POINTWISE
    )


@pytest.mark.parametrize(("scale", "cap"), [(0.0, None), (1.0, 0.0), (1.0, -1.0)])
def test_factors_are_positive(scale: float, cap: float | None) -> None:
    with pytest.raises(OpContractError, match="dflash_logits"):
        dflash_logits.reference(np.ones((1, 2), np.float32), scale=scale, cap=cap)


def floats(*shape: int, **options: Any) -> ShapeOnly:
    return ShapeOnly(shape, "float32", **options)


@pytest.mark.parametrize("columns", [1, 1024, 1025, 248320])
def test_every_logit_has_its_thread(columns: int) -> None:
    kernels = RecordingLibrary()
    logits = floats(3, columns, strides=(4 << 20, 4))
    dflash_logits.launch(kernels.library, logits, scale=0.5, cap=30.0, stream=0, is_chained=True)
    launch = kernels.only()
    assert launch.grid[0] == 3
    assert 4 * launch.grid[1] * launch.block[0] >= columns
    assert launch.arguments.dtype.itemsize == struct_bytes("dflash", "LogitsParams")
    assert launch.options["programmatic"]
    assert (launch["logits"], launch["logits_stride"]) == (launch["y"], launch["y_stride"])
    assert (launch["logits_stride"], launch["num_ids"]) == (1 << 20, columns)
    assert (launch["token_ids"], launch["scale"], launch["cap"]) == (0, 0.5, 30.0)


def test_nothing_is_queued_when_nothing_changes() -> None:
    kernels = RecordingLibrary()
    dflash_logits.launch(kernels.library, floats(3, 50), scale=1.0, cap=None, stream=0)
    assert not kernels.launches


def test_columns_go_to_the_places_of_their_tokens() -> None:
    kernels = RecordingLibrary()
    dflash_logits.launch(
        kernels.library, floats(3, 50), scale=1.0, cap=None, stream=0,
        token_ids=ShapeOnly((50,), "int32", 4096), y=floats(3, 90, address=8192),
    )  # fmt: skip
    launch = kernels.only()
    assert (launch["token_ids"], launch["y"], launch["num_ids"]) == (4096, 8192, 90)
    assert (launch["columns"], launch["y_stride"], launch["cap"]) == (50, 90, 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"cap": 0.0},
        {"logits": floats(0, 50)},
        {"logits": ShapeOnly((3, 50))},
        {"token_ids": None},
        {"y": None},
        {"token_ids": ShapeOnly((49,), "int32")},
        {"token_ids": ShapeOnly((50,), "int64")},
        {"y": floats(2, 90)},
        {"y": ShapeOnly((3, 90), "float64")},
    ],
)
def test_a_launch_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    arguments: dict[str, Any] = {
        "logits": floats(3, 50), "scale": 1.0, "cap": None, "y": floats(3, 90),
        "token_ids": ShapeOnly((50,), "int32"), **change,
    }  # fmt: skip
    with pytest.raises(OpContractError, match="dflash_logits"):
        dflash_logits.launch(kernels.library, stream=0, **arguments)
    assert not kernels.launches
