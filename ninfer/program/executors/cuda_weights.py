"""Weights on the device: which tensors there are, how they are stored, and how they get there.

    matrices      images of linear_packing; gate_up with gate and up rows interleaved
    embed_tokens  row-major bf16, and for a tied head the image `lm_head` beside it
    vectors       bf16, but A_log and dt_bias f32

A weight format applies to the projections of mixers and MLPs. Embeddings, the head, norms,
convolutions and routers stay bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelConfig, ModelObject
from ninfer.kernels.library import DeviceLimits
from ninfer.models.parameters import model_objects
from ninfer.ops import linear_pack, linear_small_t, quantise
from ninfer.ops.float_codecs import HalfArray, float_to_bf16
from ninfer.ops.linear_packing import (
    SCALE_GROUP,
    ImageLayout,
    WeightFormat,
    interleave_gate_up,
)
from ninfer.ops.linear_small_t import PackedLinear
from ninfer.program.executors.cuda_driver import CudaDriver
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor

EMBED: Final = "embed_tokens"
HEAD: Final = "lm_head"
WEIGHT_FORMATS: Final[Mapping[str, WeightFormat]] = {
    "bf16": WeightFormat.BF16,
    "fp8": WeightFormat.FP8_ROW,
    "nvfp4": WeightFormat.NVFP4,
}
_FLOAT_VECTORS: Final = ("A_log", "dt_bias")
_UNQUANTISED: Final = (HEAD, "router", "shared_gate")
_UPLOAD_ROWS_BYTES: Final = 64 << 20
"""Most float32 bytes of a weight that are converted and copied at a time."""

_STAGING_SLACK_BYTES: Final = 1 << 20
"""For scales and for the alignment of what a quantiser makes."""


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A weight stored as an image. `is_interleaved`: gate and up rows in turns of 8."""

    name: str
    layout: ImageLayout
    is_interleaved: bool


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A weight stored as it is; dtype uint16 (bf16) or float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    """Every weight of the text model by its object's name; a tied head has an image too."""

    matrices: Mapping[str, MatrixSpec]
    linears: Mapping[str, PackedLinear]
    vectors: Mapping[str, DeviceTensor]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What is stored, in the order of the arena."""

    matrices: tuple[MatrixSpec, ...]
    vectors: tuple[VectorSpec, ...]

    @property
    def num_bytes(self) -> int:
        arena = Arena()
        for vector in self.vectors:
            arena.take(vector.shape, vector.dtype)
        for matrix in self.matrices:
            _take_image(arena, matrix.layout)
        return arena.used_bytes

    @property
    def staging_bytes(self) -> int:
        """Row-major bf16 of the largest matrix, and its codes in the stored format."""
        return max(_staging_bytes(matrix.layout) for matrix in self.matrices)


def plan_weights(config: ModelConfig, fmt: WeightFormat) -> WeightPlan:
    """Raises OpContractError for sizes that the format cannot hold."""
    matrices: list[MatrixSpec] = []
    vectors: list[VectorSpec] = []
    for item in model_objects(config):
        if item.component != "text":
            continue
        if item.name == EMBED or len(item.shape) == 1 or _leaf(item.name) == "conv":
            vectors.append(_vector_spec(item))
        else:
            matrices.append(_matrix_spec(item, fmt))
    if config.tie_word_embeddings:
        layout = ImageLayout.of(WeightFormat.BF16, config.vocab_size, config.hidden_size)
        matrices.append(MatrixSpec(HEAD, layout, is_interleaved=False))
    return WeightPlan(tuple(matrices), tuple(vectors))


class WeightStore:
    """Receives the weights of a plan one by one and turns them into DeviceWeights."""

    def __init__(self, driver: CudaDriver, plan: WeightPlan, arena: Arena) -> None:
        self._driver = driver
        self._kernels = driver.kernels
        self._matrices = {matrix.name: matrix for matrix in plan.matrices}
        self._vectors = {item.name: arena.take(item.shape, item.dtype) for item in plan.vectors}
        limits = driver.kernels.limits
        self._linears = {
            matrix.name: _packed_linear(arena, matrix.layout, limits) for matrix in plan.matrices
        }
        self._missing = {*self._vectors, *self._matrices}
        self._staging_bytes = plan.staging_bytes
        self._staging = driver.allocate(plan.staging_bytes)

    def put(self, name: str, weight: Float32Array) -> None:
        """Store one object's weight; blocks until the host array is no longer needed."""
        if name in self._vectors:
            self._upload(self._vectors[name], weight)
        else:
            matrix = self._matrices[name]
            rows = DeviceTensor.dense(self._staging, weight.shape, "uint16")
            self._upload(rows, weight)
            self._pack(matrix, rows)
        self._missing.discard(name)

    def put_device(self, name: str, rows: DeviceTensor) -> None:
        """Store a matrix whose row-major bf16 lies on the device."""
        self._pack(self._matrices[name], rows)
        self._missing.discard(name)

    def put_pattern(self, name: str, pattern: DeviceTensor) -> None:
        """Store a made-up weight: the flat bf16 `pattern`, repeated to the weight's size."""
        if name in self._vectors:
            self._repeat(pattern, self._vectors[name])
        else:
            layout = self._matrices[name].layout
            rows = DeviceTensor.dense(self._staging, (layout.rows, layout.columns), "uint16")
            self._repeat(pattern, rows)
            self._pack(self._matrices[name], rows)
        self._missing.discard(name)

    def finish(self) -> DeviceWeights:
        """Pack a tied head, give the staging memory back. InvariantError when one is missing."""
        if HEAD in self._missing and EMBED not in self._missing:
            self.put_device(HEAD, self._vectors[EMBED])
        self._driver.synchronize()
        self._driver.release(self._staging)
        if self._missing:
            raise InvariantError(f"weights {', '.join(sorted(self._missing))} are missing")
        return DeviceWeights(self._matrices, self._linears, self._vectors)

    def _upload(self, target: DeviceTensor, weight: Float32Array) -> None:
        if weight.shape != target.shape:
            raise InvariantError(f"a weight {weight.shape} for a tensor {target.shape}")
        matrix = weight.reshape(weight.shape[0], -1)
        step = max(1, _UPLOAD_ROWS_BYTES // (4 * matrix.shape[1]))
        for first in range(0, matrix.shape[0], step):
            part = matrix[first : first + step]
            codes = part if target.dtype == "float32" else bf16_codes(part)
            offset = first * matrix.shape[1] * target.itemsize
            self._driver.upload(target.address + offset, np.ascontiguousarray(codes))
            self._driver.synchronize()

    def _repeat(self, pattern: DeviceTensor, target: DeviceTensor) -> None:
        for offset in range(0, target.num_bytes, pattern.num_bytes):
            size = min(pattern.num_bytes, target.num_bytes - offset)
            self._driver.copy(target.address + offset, pattern.address, size)

    def _pack(self, matrix: MatrixSpec, rows: DeviceTensor) -> None:
        linear, kernels, stream = self._linears[matrix.name], self._kernels, self._driver.stream
        codes, scales = rows, None
        if matrix.layout.format is WeightFormat.FP8_ROW:
            codes = self._quantise_rows(matrix, rows, linear)
        elif matrix.layout.format is WeightFormat.NVFP4:
            codes, scales = self._quantise_groups(rows, linear)
        linear_pack.launch(
            kernels, matrix.layout, codes, linear.image, scales=scales,
            is_interleaved=matrix.is_interleaved, stream=stream,
        )  # fmt: skip
        self._driver.synchronize()

    def _quantise_rows(
        self, matrix: MatrixSpec, rows: DeviceTensor, linear: PackedLinear
    ) -> DeviceTensor:
        """e4m3 codes; the row scales go to the weight, in the order of the image."""
        staging = self._staging_behind(rows)
        codes = staging.take(rows.shape, "uint8")
        scales = staging.take((rows.shape[0],), "float32")
        quantise.launch_fp8_row(self._kernels, rows, codes, scales, stream=self._driver.stream)
        ordered = np.empty(scales.shape, np.float32)
        self._driver.download(ordered, scales.address)
        self._driver.synchronize()
        if matrix.is_interleaved:
            ordered = interleave_gate_up(ordered)
        self._driver.upload(_required_scale(linear).address, ordered)
        self._driver.synchronize()
        return codes

    def _quantise_groups(
        self, rows: DeviceTensor, linear: PackedLinear
    ) -> tuple[DeviceTensor, DeviceTensor]:
        """e2m1 codes and group scales; one factor a matrix, so its order does not matter."""
        staging = self._staging_behind(rows)
        num_rows, columns = rows.shape
        codes = staging.take((num_rows, columns // 2), "uint8")
        scales = staging.take((num_rows, columns // SCALE_GROUP), "uint8")
        amax = staging.take((1,), "uint32")
        self._driver.fill(amax.address, 0, amax.num_bytes)
        quantise.launch_nvfp4(
            self._kernels, rows, codes, scales, _required_scale(linear), amax=amax,
            stream=self._driver.stream,
        )  # fmt: skip
        return codes, scales

    def _staging_behind(self, rows: DeviceTensor) -> Arena:
        """Staging memory that `rows` does not use."""
        staging = Arena(self._staging, self._staging_bytes)
        staging.take(rows.shape, rows.dtype)
        return staging


def bf16_codes(values: Float32Array) -> HalfArray:
    """float_to_bf16; weights that come from bf16 take one pass."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if not np.any(bits & np.uint32(0xFFFF)):
        return (bits >> np.uint32(16)).astype(np.uint16)
    return float_to_bf16(values)


def _vector_spec(item: ModelObject) -> VectorSpec:
    dtype = "float32" if _leaf(item.name) in _FLOAT_VECTORS else "uint16"
    return VectorSpec(item.name, item.shape, dtype)


def _matrix_spec(item: ModelObject, fmt: WeightFormat) -> MatrixSpec:
    used = WeightFormat.BF16 if _leaf(item.name) in _UNQUANTISED else fmt
    rows, columns = item.shape
    return MatrixSpec(
        item.name, ImageLayout.of(used, rows, columns), is_interleaved=_leaf(item.name) == "gate_up"
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _packed_linear(arena: Arena, layout: ImageLayout, limits: DeviceLimits) -> PackedLinear:
    image, scale = _take_image(arena, layout)
    return PackedLinear(linear_small_t.plan_linear(layout, limits), image, scale)


def _required_scale(linear: PackedLinear) -> DeviceTensor:
    scale = linear.row_scale
    if not isinstance(scale, DeviceTensor):
        raise InvariantError("a quantised weight has no place for its row scales")
    return scale


def _take_image(arena: Arena, layout: ImageLayout) -> tuple[DeviceTensor, DeviceTensor | None]:
    image = arena.take((layout.image_bytes,), "uint8")
    scale = arena.take((layout.rows,), "float32") if layout.format.has_row_scale else None
    return image, scale


def _staging_bytes(layout: ImageLayout) -> int:
    values = layout.rows * layout.columns
    codes = {WeightFormat.BF16: 0, WeightFormat.NVFP4: values * 9 // 16}.get(layout.format, values)
    return 2 * values + codes + _STAGING_SLACK_BYTES
