"""Products of many columns: as few launches as the weight and the device allow, of one size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ninfer.kernels.library import DeviceLimits
from ninfer.ops import linear_small_t
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import Epilogue, PackedLinear, plan_linear, workspace_size
from ninfer.program.executors.cuda_products import NormRule, Products
from ninfer.program.executors.cuda_tensor import DeviceTensor
from tests.helpers.fake_driver import H200
from tests.ops.test_linear_small_t import RTX_4090, FakeKernels

ROWS, COLUMNS = 2560, 4096
SUMS = -(-ROWS // 32)


class Rig:
    """Products over one weight, whose launches a stand-in driver remembers."""

    def __init__(self, limits: DeviceLimits, fmt: WeightFormat, max_columns: int) -> None:
        layout = ImageLayout.of(fmt, ROWS, COLUMNS)
        plan = plan_linear(layout, limits)
        image = DeviceTensor.dense(0x2000, (layout.image_bytes,), "uint8")
        scale = DeviceTensor.dense(0x1000, (ROWS,), "float32") if fmt.has_row_scale else None
        part = SimpleNamespace(linear=PackedLinear(plan, image, scale), columns_of=lambda y: y)
        self.kernels = FakeKernels(limits)
        size = workspace_size(plan, max_columns)
        buffers = SimpleNamespace(
            partials=DeviceTensor.dense(0x30000, (size,), "float32"),
            square_sums=DeviceTensor.dense(0x700000, (max_columns, SUMS), "float32"),
        )
        self.products = Products(
            NormRule(1e-6, 1.0),
            cast(Any, SimpleNamespace(kernels=self.kernels, stream=0)),
            cast(Any, SimpleNamespace(linears={"w": (part,)}, vectors={})),
            cast(Any, buffers),
        )

    def launched(self, num_tokens: int, **options: Any) -> list[np.void]:
        """Parameters of the launches of one product of so many columns."""
        x = DeviceTensor.dense(0x100000, (num_tokens, COLUMNS), "uint16")
        y = DeviceTensor.dense(0x900000, (num_tokens, ROWS), "uint16")
        self.products.small("w", x, y, **options)
        return [
            np.frombuffer(call.arguments, linear_small_t._PARAMS)[0]
            for call in self.kernels.driver.launches
        ]


@pytest.mark.parametrize(
    ("limits", "num_tokens", "sizes"),
    [
        (H200, 1, [1]),
        (H200, 16, [16]),
        (H200, 24, [24]),
        (H200, 32, [32]),
        (H200, 33, [17, 16]),
        (H200, 40, [20, 20]),
        (H200, 96, [32, 32, 32]),
        (RTX_4090, 16, [16]),
        (RTX_4090, 24, [12, 12]),
    ],
)
def test_columns_are_split_evenly_into_as_few_launches_as_fit(
    limits: DeviceLimits, num_tokens: int, sizes: list[int]
) -> None:
    """A weight of narrow row blocks has long windows of x: a small device takes 16 columns."""
    rig = Rig(limits, WeightFormat.FP8_ROW, num_tokens)
    launches = rig.launched(num_tokens)
    assert [int(params["tokens"]) for params in launches] == sizes
    starts = np.cumsum([0, *sizes[:-1]])
    assert [int(p["x"]) for p in launches] == [0x100000 + first * COLUMNS * 2 for first in starts]
    assert [int(p["y"]) for p in launches] == [0x900000 + first * ROWS * 2 for first in starts]


def test_residuals_and_square_sums_go_with_their_columns() -> None:
    launches = Rig(H200, WeightFormat.BF16, 48).launched(48, epilogue=Epilogue.ADD_RESIDUAL)
    assert [int(params["tokens"]) for params in launches] == [24, 24]
    assert [int(p["residual"]) for p in launches] == [int(p["y"]) for p in launches]
    assert [int(p["square_sums"]) for p in launches] == [0x700000, 0x700000 + 24 * SUMS * 4]
