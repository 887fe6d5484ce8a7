"""The tensors of quantised matrices: which ones there must be, and what shapes they have.

    producer            scheme      codes                   scales                global
    fp8                 FP8_BLOCK   X.weight F8 [N, K]      X.weight_scale_inv    -
                        FP8_TENSOR  X.weight F8 [N, K]      X.weight_scale        -
    compressed-tensors  FP8         X.weight F8 [N, K]      X.weight_scale        -
                        NVFP4       X.weight_packed U8      X.weight_scale F8     X.weight_
                                    [N, K / 2]              [N, K / 16]           global_scale
    modelopt            FP8         X.weight F8 [N, K]      X.weight_scale        -
                        NVFP4       X.weight U8 [N, K / 2]  X.weight_scale F8     X.weight_scale_2
                                                            [N, K / 16]

The global scale of compressed-tensors divides, ModelOpt's multiplies.
Despite its name `weight_scale_inv` multiplies. Scales of FP8 are BF16, F16 or F32: [] or [1] a
matrix, [N] or [N, 1] a row, [ceil(N / 128), ceil(K / 128)] a block. NVFP4's even column is in the
low nibble. Experts may be one stack with `fp8`: X [E, N, K] and X_scale_inv.

A matrix that is stored as plain numbers is taken as it is, whatever the configuration says.

Source: transformers/integrations/finegrained_fp8.py; compressed_tensors/compressors (nvfp4 and
float quantised); ModelOpt's unified HF export; vLLM's loaders of the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from ninfer.artifact.numeric_formats import FLOAT_FORMATS
from ninfer.artifact.safetensors_file import TensorEntry
from ninfer.contract.errors import ModelFileError
from ninfer.contract.weights import GROUP_SIZE, WeightEncoding, band_shapes
from ninfer.convert.hf_names import StoredShape
from ninfer.convert.segments import EncodedSegment, Plane
from ninfer.convert.shards import Checkpoint
from ninfer.models.quantisation import Producer, Quantisation, WeightScheme

UNUSED_SUFFIXES: Final = (
    ".input_scale", ".input_global_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale",
    ".output_scale",
)  # fmt: skip
"""Scales of activations and of the KV cache; activations stay 16 bits wide here."""
PACKED_SUFFIX: Final = "_packed"
_ENCODINGS: Final = {
    WeightScheme.FP8_TENSOR: WeightEncoding.FP8_ROW,
    WeightScheme.FP8_CHANNEL: WeightEncoding.FP8_ROW,
    WeightScheme.FP8_BLOCK: WeightEncoding.FP8_BLOCK,
    WeightScheme.NVFP4: WeightEncoding.NVFP4,
}


@dataclass(frozen=True, slots=True)
class QuantisedTensors:
    """Finds the encoded matrices of a checkpoint."""

    checkpoint: Checkpoint
    quantisation: Quantisation | None

    def has(self, name: str) -> bool:
        """Whether the matrix `name` is stored in any form."""
        tensors = self.checkpoint.tensors
        return name in tensors or name + PACKED_SUFFIX in tensors

    def find(self, wanted: StoredShape) -> EncodedSegment | None:
        """The matrix, None when it is absent or stored as plain numbers. Raises ModelFileError."""
        name, shape = wanted
        tensors = self.checkpoint.tensors
        stored = name if name in tensors else name + PACKED_SUFFIX
        if stored not in tensors or tensors[stored][1].dtype in FLOAT_FORMATS:
            return None
        codes = Plane(*tensors[stored])
        scheme = self._scheme(name, codes)
        if len(shape) < 2:
            raise codes.error(f"dtype {codes.entry.dtype} of a vector is not supported")
        stack = shape[0] if len(shape) == 3 and shape[1] != 1 else None
        matrix = shape if stack is None else shape[1:]
        rows, columns = matrix[0], prod(matrix[1:])
        if scheme is WeightScheme.NVFP4:
            return self._nvfp4(name, codes, rows, columns)
        return self._fp8(name, codes, scheme, (rows, columns), stack, shape)

    def _scheme(self, name: str, codes: Plane) -> WeightScheme:
        quantisation, dtype = self.quantisation, codes.entry.dtype
        if quantisation is None:
            known = ", ".join(FLOAT_FORMATS)
            raise codes.error(
                f"dtype {dtype} is not supported ({known} are) without a quantization_config"
            )
        module = name.removesuffix(".weight")
        scheme = quantisation.scheme_of(module)
        if scheme is None:
            raise codes.error(
                f"stored as {dtype}, but {quantisation.field} leaves {module} as it was"
            )
        return scheme

    def _fp8(
        self, name: str, codes: Plane, scheme: WeightScheme, matrix: tuple[int, int],
        stack: int | None, shape: tuple[int, ...],
    ) -> EncodedSegment:  # fmt: skip
        _check(codes, "F8_E4M3", (shape,), scheme)
        rows, columns = matrix
        is_block = scheme is WeightScheme.FP8_BLOCK
        if stack is not None and not is_block:
            raise codes.error(f"stacked experts with {scheme.value} are not supported yet")
        suffix = "_scale_inv" if is_block and self._producer is Producer.FP8 else "_scale"
        scales = self._plane(name + suffix, codes)
        if scales.entry.dtype not in FLOAT_FORMATS:
            raise scales.error(f"a scale of dtype {scales.entry.dtype} ({_floats()} are supported)")
        _check(scales, scales.entry.dtype, _scale_shapes(scheme, rows, columns, stack), scheme)
        return EncodedSegment(_ENCODINGS[scheme], rows, columns, codes, scales, stack=stack)

    def _nvfp4(self, name: str, codes: Plane, rows: int, columns: int) -> EncodedSegment:
        if columns % GROUP_SIZE:
            raise codes.error(f"NVFP4 with {columns} columns, not a multiple of {GROUP_SIZE}")
        shapes = band_shapes(WeightEncoding.NVFP4, rows, columns)
        _check(codes, "U8", (shapes["codes"],), WeightScheme.NVFP4)
        scales = self._plane(f"{name}_scale", codes)
        _check(scales, "F8_E4M3", (shapes["scales"],), WeightScheme.NVFP4)
        divides = self._producer is Producer.COMPRESSED_TENSORS
        factor = self._plane(f"{name}_global_scale" if divides else f"{name}_scale_2", codes)
        _check(factor, "F32", ((), (1,)), WeightScheme.NVFP4)
        return EncodedSegment(
            WeightEncoding.NVFP4, rows, columns, codes, scales, factor, divides=divides
        )

    @property
    def _producer(self) -> Producer | None:
        return None if self.quantisation is None else self.quantisation.producer

    def _plane(self, name: str, codes: Plane) -> Plane:
        if name not in self.checkpoint.tensors:
            raise ModelFileError(self.checkpoint.path, name, f"missing scale of {codes.entry.name}")
        return Plane(*self.checkpoint.tensors[name])


def _scale_shapes(
    scheme: WeightScheme, rows: int, columns: int, stack: int | None
) -> tuple[tuple[int, ...], ...]:
    """Shapes that the scales of an FP8 matrix may have."""
    if scheme is WeightScheme.FP8_TENSOR:
        return (), (1,)
    if scheme is WeightScheme.FP8_CHANNEL:
        return (rows, 1), (rows,)
    blocks = band_shapes(WeightEncoding.FP8_BLOCK, rows, columns)["scales"]
    if stack is not None:
        return ((stack, *blocks),)
    return blocks, (blocks[0], 1, blocks[1], 1)


def _check(
    plane: Plane, dtype: str, shapes: tuple[tuple[int, ...], ...], scheme: WeightScheme
) -> None:
    entry: TensorEntry = plane.entry
    if entry.dtype != dtype:
        raise plane.error(f"dtype {entry.dtype}, {scheme.value} has {dtype}")
    if entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise plane.error(f"shape {list(entry.shape)}, {scheme.value} has {wanted} here")


def _floats() -> str:
    return ", ".join(FLOAT_FORMATS)
