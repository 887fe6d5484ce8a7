"""WeightStore: weights from the host to their places on the device, quantised and packed there.

    float32 or bf16 rows -> bf16 in staging memory -> codes and scales (fp8, nvfp4) -> image
    codes and scales of a quantised checkpoint -> staging memory -> image

One matrix (one expert) at a time goes through staging memory, which is the store's own. Copies and
kernels are of one stream: a matrix is packed before the next one overwrites its codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.weights import AnyBand
from ninfer.ops import linear_pack, linear_small_t, quantise
from ninfer.ops.expert_weights import ExpertWeights
from ninfer.ops.float_codecs import HalfArray, bf16_to_float, float_to_bf16
from ninfer.ops.linear_packing import (
    E2M1_SHIFT,
    SCALE_BLOCK,
    SCALE_GROUP,
    ImageLayout,
    WeightFormat,
    interleave_gate_up,
)
from ninfer.ops.linear_small_t import PackedLinear
from ninfer.program.executors.cuda_draft_head import make_draft_head
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_tensor import ALIGNMENT_BYTES, Arena, DeviceTensor
from ninfer.program.executors.cuda_weights import (
    DRAFT_HEAD,
    EMBED,
    HEAD,
    DeviceWeights,
    EncodedImage,
    LinearPart,
    MatrixSpec,
    WeightPlan,
)

_UPLOAD_BYTES: Final = 64 << 20
"""Most bytes of a weight that are converted and copied at a time."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one matrix goes. scale is None for formats without row scales."""

    layout: ImageLayout
    is_interleaved: bool
    image: DeviceTensor
    scale: DeviceTensor | None


class WeightStore:
    """Takes the weights of a plan one by one, each once; then `finish` gives them all."""

    def __init__(self, driver: CudaDriver, plan: WeightPlan, arena: Arena) -> None:
        """Raises MemoryError when there is no staging memory."""
        self._driver = driver
        self._kernels = driver.kernels
        self._arena = arena
        self._plan = plan
        self._vectors = {item.name: arena.take(item.shape, item.dtype) for item in plan.vectors}
        self._matrices = {matrix.name: matrix for matrix in plan.matrices}
        self._images = {matrix.name: matrix.take(arena) for matrix in plan.matrices}
        self._missing = {*self._vectors, *self._matrices}
        kept = {image.matrix.name for images in plan.encoded.values() for image in images}
        self._staging_bytes = max(
            _staging_bytes(matrix.layout, is_kept=matrix.name in kept) for matrix in plan.matrices
        )
        self._staging = driver.allocate(self._staging_bytes)
        self._held: list[NDArray[Any]] = []

    def put(self, name: str, weight: Float32Array | HalfArray) -> None:
        """Store one object's weight, float32 or bf16 codes; blocks until the host array is no
        longer needed."""
        if name in self._vectors:
            vector = self._vectors[name]
            self._upload(vector, weight.reshape(vector.shape))
        else:
            matrix = self._matrices[name]
            parts = weight.reshape(matrix.num_matrices, *weight.shape[-2:])
            for part, place in zip(parts, self._places(matrix), strict=True):
                rows = self._staged(matrix)
                self._upload(rows, part)
                self._pack(place, rows)
        self._missing.discard(name)

    @property
    def encoded(self) -> frozenset[str]:
        """Names of the objects whose codes are kept: `put_bands` takes them."""
        return frozenset(self._plan.encoded)

    def put_bands(self, name: str, bands: Sequence[AnyBand]) -> None:
        """Store one object's codes; blocks until the host arrays are no longer needed."""
        for image in self._plan.encoded[name]:
            chosen = bands[image.bands.first_band : image.bands.last_band]
            is_stacked = image.matrix.num_experts is not None
            for index, place in enumerate(self._places(image.matrix)):
                matrix = [band.expert(index) for band in chosen] if is_stacked else list(chosen)
                self._put_encoded(place, matrix)
            self._missing.discard(image.matrix.name)
        self._driver.synchronize()
        self._held.clear()

    def put_pattern(self, name: str, pattern: DeviceTensor) -> None:
        """Store a made-up weight: the flat bf16 `pattern`, repeated to the weight's size."""
        if name in self._vectors:
            self._repeat(pattern, self._vectors[name])
        else:
            matrix = self._matrices[name]
            for place in self._places(matrix):
                rows = self._staged(matrix)
                self._repeat(pattern, rows)
                self._pack(place, rows)
        self._missing.discard(name)

    def expects(self, name: str) -> bool:
        """Whether the weights of an object of that name belong here."""
        return name in self._vectors or name in self._matrices or name in self.encoded

    def finish(self) -> DeviceWeights:
        """Pack a tied head, give the staging memory back, make the draft head. InvariantError when
        a weight is missing."""
        if HEAD in self._missing and EMBED not in self._missing:
            for place in self._places(self._matrices[HEAD]):
                self._pack(place, self._vectors[EMBED])
            self._missing.discard(HEAD)
        if self._missing:
            raise InvariantError(f"weights {', '.join(sorted(self._missing))} are missing")
        self._driver.synchronize()
        self._driver.release(self._staging)
        linears = self._linears()
        if self._plan.draft_head:
            linears[DRAFT_HEAD] = make_draft_head(
                self._driver, linears[HEAD], self._plan.draft_head, self._arena
            )
        return DeviceWeights(
            linears=linears,
            experts={
                matrix.name: ExpertWeights(matrix.layout, *self._images[matrix.name])
                for matrix in self._plan.matrices
                if matrix.num_experts is not None
            },
            vectors=self._vectors,
        )

    def _linears(self) -> dict[str, tuple[LinearPart, ...]]:
        linears: dict[str, tuple[LinearPart, ...]] = {
            matrix.name: (LinearPart(0, True, matrix, self._linear(matrix)),)
            for matrix in self._plan.matrices
            if matrix.num_experts is None
        }
        for name, images in self._plan.encoded.items():
            if len(images) > 1:
                linears[name] = tuple(self._part(image) for image in images)
                for image in images:
                    del linears[image.matrix.name]
        return linears

    def _part(self, image: EncodedImage) -> LinearPart:
        linear = self._linear(image.matrix)
        return LinearPart(image.bands.first_row, False, image.matrix, linear)

    def _linear(self, matrix: MatrixSpec) -> PackedLinear:
        plan = linear_small_t.plan_linear(matrix.layout, self._kernels.limits)
        return PackedLinear(plan, *self._images[matrix.name])

    def _places(self, matrix: MatrixSpec) -> Iterator[_Place]:
        images, scales = self._images[matrix.name]
        if matrix.num_experts is None:
            yield _Place(matrix.layout, matrix.is_interleaved, images, scales)
            return
        for expert in range(matrix.num_experts):
            scale = None if scales is None else scales.index(expert)
            yield _Place(matrix.layout, matrix.is_interleaved, images.index(expert), scale)

    def _staged(self, matrix: MatrixSpec) -> DeviceTensor:
        """Where the next matrix is built, row-major bf16 [N, K]."""
        shape = (matrix.layout.rows, matrix.layout.columns)
        return DeviceTensor.dense(self._staging, shape, "uint16")

    def _upload(self, target: DeviceTensor, weight: Float32Array | HalfArray) -> None:
        if weight.shape != target.shape:
            raise InvariantError(f"a weight {weight.shape} for a tensor {target.shape}")
        values = weight.reshape(-1)
        step = _UPLOAD_BYTES // values.itemsize
        for first in range(0, values.size, step):
            part = values[first : first + step]
            self._driver.upload(
                target.address + first * target.itemsize, _as_dtype(part, target.dtype)
            )
            self._driver.synchronize()

    def _repeat(self, pattern: DeviceTensor, target: DeviceTensor) -> None:
        for offset in range(0, target.num_bytes, pattern.num_bytes):
            size = min(pattern.num_bytes, target.num_bytes - offset)
            self._driver.copy(target.address + offset, pattern.address, size)

    def _pack(self, place: _Place, rows: DeviceTensor) -> None:
        codes, scales = rows, None
        if place.scale is not None:
            if place.layout.format is WeightFormat.NVFP4:
                codes, scales = self._quantise_groups(place.scale, rows)
            else:
                codes = self._quantise_rows(place, place.scale, rows)
        linear_pack.launch(
            self._kernels,
            place.layout,
            codes,
            place.image,
            scales=scales,
            is_interleaved=place.is_interleaved,
            stream=self._driver.stream,
        )
        self._driver.synchronize()

    def _put_encoded(self, place: _Place, bands: Sequence[AnyBand]) -> None:
        """The rows of `bands`, one behind the other, as one image."""
        layout = place.layout
        if layout.format is WeightFormat.BF16:
            rows = DeviceTensor.dense(self._staging, (layout.rows, layout.columns), "uint16")
            self._upload(rows, _stacked([band.codes for band in bands]))
            self._pack(place, rows)
            return
        staging = Arena(self._staging, self._staging_bytes)
        codes = self._uploaded(staging, [band.codes for band in bands])
        scales = None
        if layout.format is WeightFormat.FP8_ROW:
            self._upload_row_scales(place, [band.scales for band in bands], 1.0)
        else:
            scales = self._uploaded(staging, [band.scales for band in bands])
        if layout.format is WeightFormat.NVFP4:
            self._upload_row_scales(place, [band.row_factors for band in bands], E2M1_SHIFT)
        linear_pack.launch(
            self._kernels,
            layout,
            codes,
            place.image,
            scales=scales,
            is_interleaved=place.is_interleaved,
            stream=self._driver.stream,
        )

    def _uploaded(self, staging: Arena, parts: Sequence[NDArray[Any] | None]) -> DeviceTensor:
        """The parts, stacked along rows, in staging memory."""
        arrays = [np.ascontiguousarray(array) for array in _present(parts)]
        shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
        tensor = staging.take(shape, arrays[0].dtype.name)
        address = tensor.address
        for array in arrays:
            self._queue_upload(address, array)
            address += array.nbytes
        return tensor

    def _upload_row_scales(
        self, place: _Place, parts: Sequence[NDArray[Any] | None], factor: float
    ) -> None:
        scales = _stacked(parts) * np.float32(factor)
        if place.is_interleaved:
            scales = interleave_gate_up(scales)
        if place.scale is None or scales.shape != place.scale.shape:
            raise InvariantError(f"row scales {scales.shape} for {place.layout}")
        self._queue_upload(place.scale.address, scales)

    def _queue_upload(self, address: int, array: NDArray[Any]) -> None:
        """The array lives until put_bands has waited for the copy."""
        self._held.append(array)
        self._driver.upload(address, array)

    def _quantise_rows(
        self, place: _Place, scale: DeviceTensor, rows: DeviceTensor
    ) -> DeviceTensor:
        """e4m3 codes; the row scales go to their place, in the order of the image."""
        staging = self._staging_behind(rows)
        codes = staging.take(rows.shape, "uint8")
        scales = staging.take((rows.shape[0],), "float32")
        quantise.launch_fp8_row(self._kernels, rows, codes, scales, stream=self._driver.stream)
        ordered = np.empty(scales.shape, np.float32)
        self._driver.download(ordered, scales.address)
        self._driver.synchronize()
        if place.is_interleaved:
            ordered = interleave_gate_up(ordered)
        self._driver.upload(scale.address, ordered)
        self._driver.synchronize()
        return codes

    def _quantise_groups(
        self, scale: DeviceTensor, rows: DeviceTensor
    ) -> tuple[DeviceTensor, DeviceTensor]:
        """e2m1 codes and group scales; all row scales are one factor, so their order is free."""
        staging = self._staging_behind(rows)
        num_rows, columns = rows.shape
        codes = staging.take((num_rows, columns // 2), "uint8")
        scales = staging.take((num_rows, columns // SCALE_GROUP), "uint8")
        amax = staging.take((1,), "uint32")
        self._driver.fill(amax.address, 0, amax.num_bytes)
        quantise.launch_nvfp4(
            self._kernels, rows, codes, scales, scale, amax=amax, stream=self._driver.stream
        )
        return codes, scales

    def _staging_behind(self, rows: DeviceTensor) -> Arena:
        """Staging memory that `rows` does not use."""
        staging = Arena(self._staging, self._staging_bytes)
        staging.take(rows.shape, rows.dtype)
        return staging


def _stacked(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    """Arrays of the same plane, one behind the other."""
    return np.concatenate(_present(parts))


def _present(parts: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
    arrays = [part for part in parts if part is not None]
    if len(arrays) != len(parts):
        raise InvariantError("a band lacks a plane of its encoding")
    return arrays


def _as_dtype(part: Float32Array | HalfArray, dtype: str) -> NDArray[Any]:
    """float32 numbers or bf16 codes as `dtype`: float32, or uint16 for bf16."""
    if part.dtype == dtype:
        return part
    if part.dtype == np.uint16:
        codes: HalfArray = part.astype(np.uint16, copy=False)
        return bf16_to_float(codes)
    return bf16_codes(part.astype(np.float32, copy=False))


def bf16_codes(values: Float32Array) -> HalfArray:
    """float_to_bf16; weights that come from bf16 take one pass."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if not np.any(bits & np.uint32(0xFFFF)):
        return (bits >> np.uint32(16)).astype(np.uint16)
    return float_to_bf16(values)


def _staging_bytes(layout: ImageLayout, *, is_kept: bool) -> int:
    """Codes and scales that are kept; else row-major bf16 and what a quantiser makes of it: codes,
    scales and a word."""
    values = layout.rows * layout.columns
    rows = [2 * values]
    if layout.format is WeightFormat.NVFP4:
        codes = [values // 2, values // SCALE_GROUP, 4]
    elif layout.format is WeightFormat.BF16:
        codes = []
    else:
        blocks = (-(-layout.rows // SCALE_BLOCK) + 1) * -(-layout.columns // SCALE_BLOCK)
        codes = [values, 4 * max(layout.rows, blocks)]
    sizes = codes if is_kept and codes else rows + codes
    return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
