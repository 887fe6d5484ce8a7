"""What embedding, rms_norm and swiglu queue, and which arguments they refuse; without a device."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.errors import OpContractError
from ninfer.ops import embedding, rms_norm, swiglu
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes


def test_embedding_covers_every_token_and_vector() -> None:
    kernels = RecordingLibrary()
    embedding.launch(
        kernels.library, ShapeOnly((5,), "int32"), ShapeOnly((100, 2560)), ShapeOnly((5, 2560)),
        square_sums=ShapeOnly((5, 80), "float32"), stream=0, is_chained=True,
    )  # fmt: skip
    launch = kernels.only()
    assert launch.grid == (5, 1, 1)
    assert launch.block[0] % 32 == 0
    assert launch.arguments.dtype.itemsize == struct_bytes("embedding", "EmbeddingParams")
    assert launch.options["programmatic"]
    assert (launch["num_rows"], launch["columns"], launch["y_stride"]) == (100, 2560, 2560)
    assert launch["scale"] == 1.0


@pytest.mark.parametrize(
    ("ids", "table", "y"),
    [
        (ShapeOnly((5,), "int64"), ShapeOnly((9, 64)), ShapeOnly((5, 64))),
        (ShapeOnly((0,), "int32"), ShapeOnly((9, 64)), ShapeOnly((0, 64))),
        (ShapeOnly((5,), "int32"), ShapeOnly((9, 60)), ShapeOnly((5, 60))),
        (ShapeOnly((5,), "int32"), ShapeOnly((9, 64), "float32"), ShapeOnly((5, 64))),
        (ShapeOnly((5,), "int32"), ShapeOnly((9, 64)), ShapeOnly((4, 64))),
        (ShapeOnly((5,), "int32"), ShapeOnly((9, 64), address=1026), ShapeOnly((5, 64))),
        (ShapeOnly((5,), "int32"), ShapeOnly((9, 64)), ShapeOnly((5, 64), strides=(130, 2))),
        (ShapeOnly((5,), "int32"), ShapeOnly((9, 64), strides=(256, 2)), ShapeOnly((5, 64))),
    ],
)
def test_embedding_refuses(ids: ShapeOnly, table: ShapeOnly, y: ShapeOnly) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="embedding"):
        embedding.launch(kernels.library, ids, table, y, stream=0)
    assert not kernels.launches


def test_embedding_refuses_a_scale_that_is_not_positive() -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="embedding: scale"):
        embedding.launch(
            kernels.library, ShapeOnly((5,), "int32"), ShapeOnly((9, 64)), ShapeOnly((5, 64)),
            scale=0.0, stream=0,
        )  # fmt: skip
    assert not kernels.launches


@pytest.mark.parametrize("columns", [8, 32, 1000, 2048, 2560, 4096, 4104, 5120, 9000, 32768])
def test_rms_norm_threads_hold_a_whole_row(columns: int) -> None:
    kernels = RecordingLibrary()
    rows = ShapeOnly((3, columns))
    rms_norm.launch(
        kernels.library, rows, ShapeOnly((columns,)), rows, eps=1e-6, offset=1.0, stream=0,
        addition=rms_norm.Addition(rows, rows),
        square_sums=ShapeOnly((3, -(-columns // 32)), "float32"),
    )  # fmt: skip
    launch = kernels.only()
    vectors = int(launch.entry.rsplit("_", 1)[1])
    threads = launch.block[0]
    assert threads % 32 == 0
    assert 8 * vectors * threads >= columns
    assert 8 * vectors * (threads - 32) < columns
    assert launch.arguments.dtype.itemsize == struct_bytes("rms_norm", "RmsNormParams")
    assert launch["sum_stride"] == launch["residual_stride"] == columns


@pytest.mark.parametrize(
    "change",
    [
        {"x": ShapeOnly((3, 60))},
        {"x": ShapeOnly((0, 64))},
        {"x": ShapeOnly((3, 64), "float32")},
        {"x": ShapeOnly((3, 64), strides=(136, 2))},
        {"weight": ShapeOnly((32,))},
        {"y": ShapeOnly((2, 64))},
        {"eps": 0.0},
        {"eps": float("nan")},
        {"square_sums": ShapeOnly((3, 3), "float32")},
        {"addition": rms_norm.Addition(ShapeOnly((3, 64)), ShapeOnly((3, 32)))},
    ],
)
def test_rms_norm_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    rows = ShapeOnly((3, 64))
    arguments: dict[str, Any] = {
        "x": rows, "weight": ShapeOnly((64,)), "y": rows, "eps": 1e-6, "offset": 0.0, **change,
    }  # fmt: skip
    x, weight, y = (arguments.pop(name) for name in ("x", "weight", "y"))
    with pytest.raises(OpContractError, match="rms_norm"):
        rms_norm.launch(kernels.library, x, weight, y, stream=0, **arguments)
    assert not kernels.launches


def test_rms_norm_rows_longer_than_its_registers_are_refused() -> None:
    kernels = RecordingLibrary()
    rows = ShapeOnly((1, 32776))
    with pytest.raises(OpContractError, match="32768"):
        rms_norm.launch(
            kernels.library, rows, ShapeOnly((32776,)), rows, eps=1e-6, offset=0.0, stream=0
        )


def test_swiglu_reads_rows_with_gaps() -> None:
    kernels = RecordingLibrary()
    x = ShapeOnly((7, 128), strides=(512, 2))
    swiglu.launch(kernels.library, x, ShapeOnly((7, 64)), stream=0)
    launch = kernels.only()
    assert (launch["x_stride"], launch["y_stride"], launch["inner"]) == (256, 64, 64)
    assert launch.arguments.dtype.itemsize == struct_bytes("swiglu", "SwigluParams")


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (ShapeOnly((7, 120)), ShapeOnly((7, 60))),
        (ShapeOnly((7, 128)), ShapeOnly((7, 128))),
        (ShapeOnly((0, 128)), ShapeOnly((0, 64))),
        (ShapeOnly((7, 128), address=1032), ShapeOnly((7, 64))),
    ],
)
def test_swiglu_refuses(x: ShapeOnly, y: ShapeOnly) -> None:
    with pytest.raises(OpContractError, match="swiglu"):
        swiglu.launch(RecordingLibrary().library, x, y, stream=0)
