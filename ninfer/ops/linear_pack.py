"""linear_pack: row-major weights on the device -> the image of linear_packing, byte for byte.

Shapes     bf16 uint16 [N, K]; fp8 uint8 [N, K]; nvfp4 uint8 [N, K / 2] -> image uint8 [image_bytes]
           scales: fp8_block f32 [ceil(N / 128), ceil(K / 128)], nvfp4 uint8 [N, K / 16];
           with is_interleaved fp8_block's scales are those of gate, then those of up
Dtypes     as above
Effects    writes every byte of image; is_interleaved applies interleave_gate_up first
Errors     OpContractError for another shape or dtype, or rows not in contiguous memory
Tolerance  EXACT
Source     ninfer/ops/linear_packing.py
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ninfer.kernels.device_array import DeviceArray, DeviceView, view_of
from ninfer.kernels.library import KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.linear_packing import SCALE_BLOCK, SCALE_GROUP, ImageLayout, WeightFormat

_OP: Final = "linear_pack"
_THREADS: Final = 256
_BLOCKS_PER_MULTIPROCESSOR: Final = 8
_PARAMS: Final = np.dtype(
    [
        ("codes", "<u8"), ("scales", "<u8"), ("image", "<u8"),
        ("rows", "<i4"), ("columns", "<i4"), ("units_per_block", "<i4"), ("row_blocks", "<i4"),
        ("strips_per_block", "<i4"), ("last_strips", "<i4"), ("is_interleaved", "<i4"),
        ("padding", "<i4"),
    ]
)  # fmt: skip


def launch(
    kernels: KernelLibrary,
    layout: ImageLayout,
    codes: DeviceArray,
    image: DeviceArray,
    *,
    scales: DeviceArray | None = None,
    is_interleaved: bool = False,
    stream: int,
) -> None:
    """Queue the packing on `stream`; returns before it has run."""
    source = view_of(_OP, "codes", codes, _code_dtype(layout), 2)
    _require(source, "codes", _code_shape(layout))
    target = view_of(_OP, "image", image, "uint8", 1)
    _require(target, "image", (layout.image_bytes,))
    if is_interleaved and layout.rows % 16:
        fail(_OP, f"{layout.rows} gate and up rows are not a multiple of 16")
    params = np.zeros((), _PARAMS)
    params["codes"], params["image"] = source.address, target.address
    params["scales"] = _scales_address(layout, scales, is_interleaved)
    params["rows"], params["columns"] = layout.rows, layout.columns
    params["units_per_block"], params["row_blocks"] = layout.units_per_block, layout.row_blocks
    params["strips_per_block"] = layout.strips_per_block
    params["last_strips"], params["is_interleaved"] = layout.last_strips, is_interleaved
    kernels.function("linear_pack", f"linear_pack_{layout.format.value}").launch(
        (kernels.limits.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR, 1, 1),
        (_THREADS, 1, 1),
        params,
        stream=stream,
    )


def _code_dtype(layout: ImageLayout) -> str:
    return "uint16" if layout.format is WeightFormat.BF16 else "uint8"


def _code_shape(layout: ImageLayout) -> tuple[int, int]:
    if layout.format is WeightFormat.NVFP4:
        return layout.rows, layout.columns // 2
    return layout.rows, layout.columns


def _scales_address(layout: ImageLayout, scales: DeviceArray | None, is_interleaved: bool) -> int:
    if layout.format in (WeightFormat.BF16, WeightFormat.FP8_ROW):
        if scales is not None:
            fail(_OP, f"{layout.format.value} takes no scales")
        return 0
    if scales is None:
        fail(_OP, f"{layout.format.value} needs scales")
    if layout.format is WeightFormat.NVFP4:
        view = view_of(_OP, "scales", scales, "uint8", 2)
        _require(view, "scales", (layout.rows, layout.columns // SCALE_GROUP))
        return view.address
    parts = 2 if is_interleaved else 1
    scale_rows = parts * -(-layout.rows // parts // SCALE_BLOCK)
    view = view_of(_OP, "scales", scales, "float32", 2)
    _require(view, "scales", (scale_rows, -(-layout.columns // SCALE_BLOCK)))
    return view.address


def _require(view: DeviceView, name: str, shape: tuple[int, ...]) -> None:
    if view.shape != shape or view.row_stride != shape[-1] or view.address % 16:
        fail(_OP, f"{name} has shape {view.shape}, expected {shape}, contiguous and aligned to 16")
