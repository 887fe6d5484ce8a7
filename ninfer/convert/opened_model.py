"""An opened model: checked configuration and objects over mapped files, weights still unread.

Every object is a sequence of segments whose rows follow each other; that covers fused parents,
experts stacked from single matrices and squeezed axes alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ninfer.artifact.bindings import Binding, Use
from ninfer.artifact.numeric_formats import CHUNK_ELEMENTS, FLOAT_FORMATS, FloatFormat
from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import (
    FrontendResources,
    ModelConfig,
    ModelObject,
    StoredTensor,
)
from ninfer.contract.weights import AnyBand, EncodedBand, EncodedExperts, WeightBand, WeightEncoding
from ninfer.convert.segments import EncodedSegment, FloatSegment, Segment
from ninfer.models.bindings import bindings_of, uses_of
from ninfer.ops.float_codecs import HalfArray

COMPONENTS: Final = ("text", "mtp", "vision")


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Where the rows of an object lie.

    is_by_expert   every segment belongs to one expert, whose segments follow one another; else a
                   segment belongs to all experts, or there are none
    """

    item: ModelObject
    segments: tuple[Segment, ...]
    is_by_expert: bool = False

    @property
    def float_format(self) -> FloatFormat | None:
        """The format all segments share, or F32, which holds them all; None for codes."""
        segments = [segment for segment in self.segments if isinstance(segment, FloatSegment)]
        if len(segments) < len(self.segments):
            return None
        names = {segment.entry.dtype for segment in segments}
        return FLOAT_FORMATS[names.pop() if len(names) == 1 else "F32"]

    @property
    def bands(self) -> tuple[WeightBand, ...]:
        """A band's rows are FLOAT where its experts have different encodings."""
        return tuple(
            WeightBand(_shared_encoding(segments), self._rows_of(segments[0]))
            for segments in self.segments_by_band
        )

    def read(self) -> Float32Array:
        """The object as float32. Raises ModelFileError."""
        values = np.empty(self.item.shape, np.float32)
        first = 0
        if self._is_in_order:
            flat = values.reshape(-1)
            for segment in self.segments:
                segment.read(flat[first : first + segment.num_elements])
                first += segment.num_elements
            return values
        for index, band in enumerate(self.bands):
            values[:, first : first + band.num_rows] = self._read_floats(index, band)
            first += band.num_rows
        return values

    def read_numbers(self) -> Float32Array | HalfArray:
        """The object as bf16 codes when all of it is stored so, else as float32. Raises
        ModelFileError."""
        if self.float_format is not FLOAT_FORMATS["BF16"] or not self._is_in_order:
            return self.read()
        codes = np.empty(self.item.shape, np.uint16)
        flat, first = codes.reshape(-1), 0
        for segment in self.segments:
            if isinstance(segment, FloatSegment):
                segment.read_codes(flat[first : first + segment.num_elements])
            first += segment.num_elements
        return codes

    def read_bands(self) -> tuple[AnyBand, ...]:
        """The object as it is stored. Raises ModelFileError."""
        return tuple(self._read_band(index, band) for index, band in enumerate(self.bands))

    @property
    def _is_in_order(self) -> bool:
        """The segments follow one another as the object's elements do."""
        return self._num_experts is None or self.is_by_expert or len(self.segments) == 1

    @property
    def _num_experts(self) -> int | None:
        return self.item.shape[0] if len(self.item.shape) == 3 else None

    @property
    def segments_by_band(self) -> list[tuple[Segment, ...]]:
        """The segments of each band: one, or one for every expert."""
        count = self.item.shape[0] if self.is_by_expert else 1
        step = len(self.segments) // count
        return [self.segments[index::step] for index in range(step)]

    def _rows_of(self, segment: Segment) -> int:
        columns = self.item.shape[-1] if len(self.item.shape) > 1 else 1
        rows = segment.num_elements // columns
        is_stacked = self._num_experts is not None and not self.is_by_expert
        return rows // self.item.shape[0] if is_stacked else rows

    def _read_band(self, index: int, band: WeightBand) -> AnyBand:
        segments = self.segments_by_band[index]
        if band.encoding is WeightEncoding.FLOAT:
            return EncodedBand(band.encoding, self._read_floats(index, band))
        parts = [segment.read_band() for segment in segments if isinstance(segment, EncodedSegment)]
        return EncodedExperts(tuple(parts)) if self.is_by_expert else parts[0]

    def _read_floats(self, index: int, band: WeightBand) -> Float32Array:
        experts = () if self._num_experts is None else (self._num_experts,)
        columns = self.item.shape[-1:] if len(self.item.shape) > 1 else ()
        values = np.empty((*experts, band.num_rows, *columns), np.float32)
        flat, first = values.reshape(-1), 0
        for segment in self.segments_by_band[index]:
            segment.read(flat[first : first + segment.num_elements])
            first += segment.num_elements
        return values


def _shared_encoding(segments: Sequence[Segment]) -> WeightEncoding:
    encodings = {segment.encoding for segment in segments}
    return encodings.pop() if len(encodings) == 1 else WeightEncoding.FLOAT


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A ModelSource over safetensors files: an HF directory or an artifact.

    tied_head        a head that is stored although the model is tied; it must equal the embedding
    unused_scales    scales of activations and of the KV cache that the files hold
    resource_files   raw bytes of the frontend's files by name, as an artifact carries them
    config_text      config.json as it was
    """

    path: Path
    name: str
    kind: str
    config: ModelConfig
    hf_config: Mapping[str, Any] = field(repr=False)
    config_text: bytes = field(repr=False)
    resources: FrontendResources = field(repr=False)
    resource_files: Mapping[str, bytes] = field(repr=False)
    layouts: tuple[ObjectLayout, ...] = field(repr=False)
    tensors: tuple[StoredTensor, ...] = field(repr=False)
    tied_head: FloatSegment | None = field(repr=False, default=None)
    unused_scales: int = 0

    @property
    def objects(self) -> tuple[ModelObject, ...]:
        return tuple(layout.item for layout in self.layouts)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return bindings_of(self.config, self.objects)

    @property
    def uses(self) -> tuple[Use, ...]:
        return uses_of(self.config, self.objects)

    def read_float32(self, component: str = "text") -> Iterator[tuple[ModelObject, Float32Array]]:
        """Materialise one component, object by object.

        A tied head is not yielded. Raises ModelFileError for non-finite weights, wrong checksums
        and a stored head that contradicts the tie.
        """
        for layout in self._component(component):
            yield layout.item, layout.read()

    @property
    def bands(self) -> Mapping[str, tuple[WeightBand, ...]]:
        """How the rows of every object are stored."""
        return {layout.item.name: layout.bands for layout in self.layouts}

    def read_bands(
        self, encoded: Collection[str], component: str = "text"
    ) -> Iterator[tuple[ModelObject, tuple[AnyBand, ...]]]:
        """As read_float32, but the objects in `encoded` as they are stored; others are one band of
        numbers, bf16 codes (uint16) where all of an object is stored so."""
        for layout in self._component(component):
            if layout.item.name in encoded:
                yield layout.item, layout.read_bands()
            else:
                yield layout.item, (EncodedBand(WeightEncoding.FLOAT, layout.read_numbers()),)

    def check_tied_head(self) -> None:
        """Raises ModelFileError when a stored head differs from the embedding it is tied to."""
        if self.tied_head is None:
            return
        embedding = self.layouts[0].segments[0]
        if not isinstance(embedding, FloatSegment):
            raise self.tied_head.error(
                "a head of its own beside a quantised embedding it is tied to"
            )
        for ours, theirs in zip(_widened(embedding), _widened(self.tied_head), strict=True):
            if not np.array_equal(ours, theirs):
                raise self.tied_head.error(
                    "differs from the embedding although tie_word_embeddings is true"
                )

    def _component(self, component: str) -> Iterator[ObjectLayout]:
        if component not in COMPONENTS:
            raise InvariantError(f"unknown component {component!r}")
        if component == "text":
            self.check_tied_head()
        return (layout for layout in self.layouts if layout.item.component == component)


def _widened(segment: FloatSegment) -> Iterator[Float32Array]:
    scratch = np.empty(CHUNK_ELEMENTS, np.float32)
    for chunk in segment.chunks():
        values = scratch[: len(chunk) // segment.format.item_bytes]
        segment.format.widen(chunk, values)
        yield values
