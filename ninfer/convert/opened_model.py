"""An opened model: checked configuration and objects over mapped files, weights still unread.

Every object is a sequence of stored tensors whose elements follow each other in row-major order;
that covers fused parents, experts stacked from single matrices and squeezed axes alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ninfer.artifact.bindings import Binding, Use
from ninfer.artifact.checksum import Checksum
from ninfer.artifact.numeric_formats import CHUNK_ELEMENTS, FLOAT_FORMATS, FloatFormat
from ninfer.artifact.safetensors_file import SafetensorsFile, TensorEntry
from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError, ModelFileError
from ninfer.contract.model import (
    FrontendResources,
    ModelConfig,
    ModelObject,
    StoredTensor,
)
from ninfer.models.bindings import bindings_of, uses_of

COMPONENTS: Final = ("text", "mtp", "vision")


@dataclass(frozen=True, slots=True)
class Segment:
    """One stored tensor of an object. `checksum` is verified while it is read, if there is one."""

    file: SafetensorsFile
    entry: TensorEntry
    checksum: str | None = None

    @property
    def format(self) -> FloatFormat:
        return FLOAT_FORMATS[self.entry.dtype]

    @property
    def num_elements(self) -> int:
        return self.entry.num_bytes // self.format.item_bytes

    def chunks(self) -> Iterator[memoryview]:
        """The tensor's bytes piece by piece.

        Raises ModelFileError behind the last piece when the checksum is wrong or a weight is not
        finite; whoever reads must not trust the pieces before that.
        """
        checksum, is_finite = Checksum(), True
        for chunk in self.format.chunks(self.file.view(self.entry)):
            if self.checksum is not None:
                checksum.update(chunk)
            is_finite = is_finite and self.format.is_finite(chunk)
            yield chunk
        if self.checksum not in (None, checksum.text):
            raise self._error("checksum mismatch: the file is damaged")
        if not is_finite:
            raise self._error("a weight is NaN or infinite")

    def read(self, out: Float32Array) -> None:
        """Write all elements to `out` [num_elements]. Raises ModelFileError."""
        start = 0
        for chunk in self.chunks():
            stop = start + len(chunk) // self.format.item_bytes
            self.format.widen(chunk, out[start:stop])
            start = stop

    def _error(self, message: str) -> ModelFileError:
        return ModelFileError(self.file.path, self.entry.name, message)


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Where the elements of an object lie."""

    item: ModelObject
    segments: tuple[Segment, ...]

    @property
    def format(self) -> FloatFormat:
        """The format all segments share; F32, which holds them all, when they differ."""
        names = {segment.entry.dtype for segment in self.segments}
        return FLOAT_FORMATS[names.pop() if len(names) == 1 else "F32"]

    def read(self) -> Float32Array:
        """The object as float32. Raises ModelFileError."""
        values = np.empty(self.item.shape, np.float32)
        flat, start = values.reshape(-1), 0
        for segment in self.segments:
            stop = start + segment.num_elements
            segment.read(flat[start:stop])
            start = stop
        return values


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A ModelSource over safetensors files: an HF directory or an artifact.

    tied_head        a head that is stored although the model is tied; it must equal the embedding
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
    tied_head: Segment | None = field(repr=False, default=None)

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
        if component not in COMPONENTS:
            raise InvariantError(f"unknown component {component!r}")
        if component == "text":
            self.check_tied_head()
        for layout in self.layouts:
            if layout.item.component == component:
                yield layout.item, layout.read()

    def check_tied_head(self) -> None:
        """Raises ModelFileError when a stored head differs from the embedding it is tied to."""
        if self.tied_head is None:
            return
        embedding = self.layouts[0].segments[0]
        for ours, theirs in zip(_widened(embedding), _widened(self.tied_head), strict=True):
            if not np.array_equal(ours, theirs):
                raise ModelFileError(
                    self.tied_head.file.path,
                    self.tied_head.entry.name,
                    "differs from the embedding although tie_word_embeddings is true",
                )


def _widened(segment: Segment) -> Iterator[Float32Array]:
    scratch = np.empty(CHUNK_ELEMENTS, np.float32)
    for chunk in segment.chunks():
        values = scratch[: len(chunk) // segment.format.item_bytes]
        segment.format.widen(chunk, values)
        yield values
