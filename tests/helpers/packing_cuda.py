"""A FakeCuda whose linear_pack kernels really run, in NumPy: images hold what they would hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.linear_packing import (
    ImageLayout,
    WeightFormat,
    interleave_gate_up,
    pack_bf16,
    pack_fp8_row,
    pack_fp8_scaled_rows,
    pack_nvfp4,
)
from tests.helpers.fake_cuda import FakeCuda, Launch


class PackingCuda(FakeCuda):
    def queue(self, item: Any) -> None:
        super().queue(item)
        if isinstance(item, Launch) and item.family == "linear_pack":
            self._pack(item)

    def _pack(self, launch: Launch) -> None:
        arguments = launch.arguments
        fmt = WeightFormat(launch.entry.removeprefix("linear_pack_"))
        rows, columns = int(arguments["rows"]), int(arguments["columns"])
        layout = ImageLayout(fmt, rows, columns, int(arguments["strips_per_block"]))
        is_interleaved = bool(arguments["is_interleaved"])
        width = {WeightFormat.BF16: 2 * columns, WeightFormat.NVFP4: columns // 2}.get(fmt, columns)
        codes = self._array(int(arguments["codes"]), (rows, width))
        scales = None
        if fmt is WeightFormat.NVFP4:
            scales = self._array(int(arguments["scales"]), (rows, columns // 16))
        elif fmt is WeightFormat.FP8_BLOCK:
            scales = self._row_scales(int(arguments["scales"]), rows, columns, 1 + is_interleaved)
        if is_interleaved:
            codes = interleave_gate_up(codes)
            scales = None if scales is None else interleave_gate_up(scales)
        image = _image(layout, codes, scales)
        self.memory(int(arguments["image"]), image.nbytes)[:] = image

    def _row_scales(self, address: int, rows: int, columns: int, parts: int) -> NDArray[np.float32]:
        """The scale of every row and block of columns; blocks start again at the up rows."""
        part_rows, blocks = rows // parts, -(-columns // 128)
        height = parts * -(-part_rows // 128)
        scales = self._array(address, (height, 4 * blocks)).view(np.float32)
        by_part = np.repeat(scales.reshape(parts, -1, blocks), 128, axis=1)
        return by_part[:, :part_rows].reshape(rows, blocks)

    def _array(self, address: int, shape: tuple[int, int]) -> NDArray[Any]:
        return self.memory(address, shape[0] * shape[1]).reshape(shape).copy()


def _image(
    layout: ImageLayout, codes: NDArray[Any], scales: NDArray[Any] | None
) -> NDArray[np.uint8]:
    if layout.format is WeightFormat.BF16:
        return pack_bf16(np.ascontiguousarray(codes).view(np.uint16), layout)
    if layout.format is WeightFormat.FP8_ROW:
        return pack_fp8_row(codes, layout)
    assert scales is not None
    if layout.format is WeightFormat.FP8_BLOCK:
        return pack_fp8_scaled_rows(codes, scales, layout)
    return pack_nvfp4(codes, scales, layout)
