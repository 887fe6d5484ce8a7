"""Which weights lie on the device, how they are stored, and what that takes.

    matrices      images of linear_packing; gate_up with gate and up rows interleaved; experts one
                  image each, one behind the other
    embed_tokens  row-major bf16, and for a tied head the image `lm_head` beside it
    vectors       bf16, but A_log and dt_bias f32

A weight format applies to the projections of mixers and MLPs. Embeddings, the head, norms,
convolutions and routers stay bf16. Rows of the head may lie there a second time, for guesses
(cuda_draft_head).

Matrices of a quantised checkpoint keep their codes. Where their parts have different encodings
(cuda_bands), an object has several images, each with rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from ninfer.contract.model import ModelConfig, ModelObject
from ninfer.contract.weights import WeightBand, WeightEncoding
from ninfer.models.parameters import model_objects
from ninfer.ops.expert_weights import ExpertWeights
from ninfer.ops.linear_packing import ImageLayout, WeightFormat
from ninfer.ops.linear_small_t import PackedLinear
from ninfer.program.executors.cuda_bands import BandGroup, group_bands, undivided_reason
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor
from ninfer.program.executors.dflash_setup import DflashSetup
from ninfer.program.executors.draft_shape import NO_DRAFT_SHAPE, DraftShape, mtp_shape

EMBED: Final = "embed_tokens"
HEAD: Final = "lm_head"
DRAFT_HEAD: Final = "draft_head"
WEIGHT_FORMATS: Final[Mapping[str, WeightFormat]] = MappingProxyType(
    {
        "bf16": WeightFormat.BF16,
        "fp8": WeightFormat.FP8_ROW,
        "nvfp4": WeightFormat.NVFP4,
    }
)
"""By the values of `--weights`."""
_FLOAT_VECTORS: Final = ("A_log", "dt_bias")
_VECTORS: Final = (EMBED, "conv", "shared_gate")
"""Objects of two axes that no matrix product reads."""
_UNQUANTISED: Final = (HEAD, "router")


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A weight stored as images. `is_interleaved`: gate and up rows in turns of 8.

    num_experts   None for a single matrix
    """

    name: str
    layout: ImageLayout
    is_interleaved: bool
    num_experts: int | None = None

    @property
    def num_matrices(self) -> int:
        return 1 if self.num_experts is None else self.num_experts

    @property
    def num_bytes(self) -> int:
        """Of images and row scales."""
        scale_bytes = 4 * self.layout.rows if self.layout.format.has_row_scale else 0
        return self.num_matrices * (self.layout.image_bytes + scale_bytes)

    def take(self, arena: Arena) -> tuple[DeviceTensor, DeviceTensor | None]:
        """Images uint8 and row scales f32; a leading axis for experts."""
        axes = () if self.num_experts is None else (self.num_experts,)
        images = arena.take((*axes, self.layout.image_bytes), "uint8")
        if not self.layout.format.has_row_scale:
            return images, None
        return images, arena.take((*axes, self.layout.rows), "float32")


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A weight stored as it is; dtype uint16 (bf16) or float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A matrix that keeps the codes of some bands of an object."""

    matrix: MatrixSpec
    bands: BandGroup


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of the head from `first_row` on, as a matrix of their own."""

    first_row: int
    matrix: MatrixSpec


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What is stored, in the order of the arena: vectors, matrices, then the draft head.

    encoded      images of the objects whose codes are kept, by the object's name
    decoded      quantised matrices that are decoded to bf16 all the same, and why
    draft_head   what guesses are chosen from; empty: the head itself
    draft_shape  what a draft model among the weights keeps of a sequence
    dflash       that model, if it is one apart from the target
    """

    matrices: tuple[MatrixSpec, ...]
    vectors: tuple[VectorSpec, ...]
    encoded: Mapping[str, tuple[EncodedImage, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    decoded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    draft_head: tuple[HeadRows, ...] = ()
    draft_shape: DraftShape = NO_DRAFT_SHAPE
    dflash: DflashSetup | None = None

    @property
    def num_bytes(self) -> int:
        arena = Arena()
        for vector in self.vectors:
            arena.take(vector.shape, vector.dtype)
        for matrix in self.matrices:
            matrix.take(arena)
        for rows in self.draft_head:
            rows.matrix.take(arena)
        return arena.used_bytes


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """Rows of an object that one image holds, from `first_row` on. `is_whole`: all of them."""

    first_row: int
    is_whole: bool
    matrix: MatrixSpec
    linear: PackedLinear

    def columns_of(self, y: DeviceTensor) -> DeviceTensor:
        """What this part computes of the object's product y."""
        if self.is_whole:
            return y
        return y.columns(self.first_row, self.first_row + self.matrix.layout.rows)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeights:
    """Every weight of the text model by its object's name; a tied head is in `linears` too, and so
    is a draft head.

    linears    the parts of an object in the order of its rows, almost always one
    """

    linears: Mapping[str, tuple[LinearPart, ...]]
    experts: Mapping[str, ExpertWeights]
    vectors: Mapping[str, DeviceTensor]


def plan_weights(
    config: ModelConfig,
    fmt: WeightFormat,
    stored: Mapping[str, Sequence[WeightBand]] | None = None,
    *,
    components: Sequence[str] = ("text",),
) -> WeightPlan:
    """`stored`: bands by object of a checkpoint whose codes are kept. Raises OpContractError for
    sizes that the format cannot hold."""
    matrices: list[MatrixSpec] = []
    vectors: list[VectorSpec] = []
    encoded: dict[str, tuple[EncodedImage, ...]] = {}
    decoded: dict[str, str] = {}
    for item in model_objects(config):
        if item.component not in components:
            continue
        bands = () if stored is None else stored[item.name]
        is_quantised = any(band.encoding is not WeightEncoding.FLOAT for band in bands)
        is_vector = len(item.shape) == 1 or _leaf(item.name) in _VECTORS
        reason = "no product reads it" if is_vector else _undivided_reason(item, bands)
        if is_quantised and reason is None:
            encoded[item.name] = _encoded_images(item, bands)
            matrices.extend(image.matrix for image in encoded[item.name])
            continue
        if is_quantised:
            decoded[item.name] = reason or ""
        if is_vector:
            vectors.append(_vector_spec(item))
        else:
            matrices.append(_matrix_spec(item, fmt))
    if config.tie_word_embeddings:
        layout = ImageLayout.of(WeightFormat.BF16, config.vocab_size, config.hidden_size)
        matrices.append(MatrixSpec(HEAD, layout, is_interleaved=False))
    return WeightPlan(
        tuple(matrices),
        tuple(vectors),
        MappingProxyType(encoded),
        MappingProxyType(decoded),
        draft_shape=mtp_shape(config) if "mtp" in components else NO_DRAFT_SHAPE,
    )


def _undivided_reason(item: ModelObject, bands: Sequence[WeightBand]) -> str | None:
    """Why an object that has to be one image cannot keep its codes."""
    is_gate_up = _leaf(item.name) == "gate_up"
    if not bands or not (is_gate_up or len(item.shape) == 3):
        return None
    return undivided_reason(bands, is_gate_up=is_gate_up)


def _encoded_images(item: ModelObject, bands: Sequence[WeightBand]) -> tuple[EncodedImage, ...]:
    *experts, rows, columns = item.shape
    groups = group_bands(bands)
    if _leaf(item.name) == "gate_up" or experts:
        groups = (BandGroup(groups[0].format, 0, rows, 0, len(bands)),)
    return tuple(
        EncodedImage(
            MatrixSpec(
                item.name if len(groups) == 1 else f"{item.name}:{group.first_row}",
                ImageLayout.of(group.format, group.num_rows, columns),
                is_interleaved=_leaf(item.name) == "gate_up",
                num_experts=experts[0] if experts else None,
            ),
            group,
        )
        for group in groups
    )


def _vector_spec(item: ModelObject) -> VectorSpec:
    dtype = "float32" if _leaf(item.name) in _FLOAT_VECTORS else "uint16"
    shape = item.shape[1:] if _leaf(item.name) == "shared_gate" else item.shape
    return VectorSpec(item.name, shape, dtype)


def _matrix_spec(item: ModelObject, fmt: WeightFormat) -> MatrixSpec:
    used = WeightFormat.BF16 if _leaf(item.name) in _UNQUANTISED else fmt
    *experts, rows, columns = item.shape
    return MatrixSpec(
        item.name,
        ImageLayout.of(used, rows, columns),
        is_interleaved=_leaf(item.name) == "gate_up",
        num_experts=experts[0] if experts else None,
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
