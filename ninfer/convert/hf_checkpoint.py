"""HF model directories: config.json, safetensors and frontend files -> OpenedModel.

Everything is checked from headers alone: every parameter is there once with the right shape and a
dtype we read, and nothing is left over.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ninfer.artifact.json_document import Fields, parse_object
from ninfer.artifact.small_file import read_bytes, read_object
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import LogicalParameter, ModelConfig, ModelObject
from ninfer.contract.printable import printable
from ninfer.convert.float_tensors import find_floats, float_segment
from ninfer.convert.hf_names import (
    HEAD_NAME,
    IGNORED_SUFFIXES,
    MTP_PREFIX,
    StoredShape,
    expert_shapes,
    stored_shape,
    text_prefix,
    vision_name,
)
from ninfer.convert.opened_model import ObjectLayout, OpenedModel
from ninfer.convert.quantised_tensors import UNUSED_SUFFIXES, QuantisedTensors
from ninfer.convert.resources import RESOURCE_FILES, parse_resources
from ninfer.convert.segments import FloatSegment, Segment
from ninfer.convert.shards import Checkpoint, open_checkpoint
from ninfer.models.config import parse_config
from ninfer.models.parameters import model_objects
from ninfer.models.quantisation import Quantisation, parse_modelopt_file, parse_quantisation

CONFIG_NAME: Final = "config.json"
MODELOPT_NAME: Final = "hf_quant_config.json"
_FOREIGN: Final = MappingProxyType(
    {
        ".weight_scale_inv": "block FP8",
        ".weight_scale_2": "ModelOpt NVFP4",
        ".weight_packed": "compressed-tensors",
        ".weight_scale": "compressed-tensors or ModelOpt",
        ".qweight": "GPTQ or AWQ",
    }
)
"""Tensors that only quantised checkpoints have, and what they tell."""

_logger = logging.getLogger(__name__)


def open_hf_directory(folder: Path) -> OpenedModel:
    """Raises ModelFileError."""
    config_path = folder / CONFIG_NAME
    config_text = read_bytes(config_path)
    raw = parse_object(config_text, config_path)
    config = parse_config(raw, config_path)
    resource_files = _read_resource_files(folder)
    checkpoint = open_checkpoint(folder)
    quantised = QuantisedTensors(checkpoint, _read_quantisation(folder, Fields(config_path, raw)))
    if not any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors):
        # Fine-tuning tools drop the module and keep the key.
        config = replace(config, num_mtp_layers=0)
    binder = Binder(checkpoint, config, text_prefix(checkpoint.tensors), quantised)
    layouts = (*binder.model_layouts(), *binder.vision_layouts())
    tied_head = binder.tied_head()
    unused_scales = binder.check_unexpected(layouts)
    if unused_scales:
        _logger.info(
            "%s: %d scales of activations and of the KV cache are not used", folder, unused_scales
        )
    return OpenedModel(
        path=folder,
        name=_name_of(folder),
        kind="safetensors",
        config=config,
        hf_config=raw,
        config_text=config_text,
        resources=parse_resources(resource_files, folder),
        resource_files=resource_files,
        layouts=layouts,
        tensors=tuple(file.stored(entry) for file, entry in checkpoint.tensors.values()),
        tied_head=tied_head,
        unused_scales=unused_scales,
    )


def _name_of(folder: Path) -> str:
    """The directory's own name, also when it is given as `.`; fit to be shown."""
    name = os.path.basename(os.path.abspath(folder)) or "model"
    return printable(name.encode("utf-8", "replace").decode("utf-8"))


def _read_resource_files(folder: Path) -> dict[str, bytes]:
    # A link that leads nowhere is a damaged model, not one without the file.
    names = [name for name in RESOURCE_FILES if os.path.lexists(folder / name)]
    return {name: read_bytes(folder / name) for name in names}


def _read_quantisation(folder: Path, config: Fields) -> Quantisation | None:
    """config.json's word counts before ModelOpt's own file."""
    quantisation = parse_quantisation(config)
    path = folder / MODELOPT_NAME
    if quantisation is None and os.path.lexists(path):
        return parse_modelopt_file(Fields(path, read_object(path)))
    return quantisation


@dataclass(frozen=True, slots=True)
class Binder:
    """Finds the stored tensors of a model's objects."""

    checkpoint: Checkpoint
    config: ModelConfig
    prefix: str
    quantised: QuantisedTensors

    def model_layouts(self) -> tuple[ObjectLayout, ...]:
        """Layouts of the text and MTP objects. Raises ModelFileError."""
        return tuple(self._layout(item) for item in model_objects(self.config))

    def vision_layouts(self) -> tuple[ObjectLayout, ...]:
        """One object for every stored vision tensor."""
        found = [(vision_name(name), name) for name in self.checkpoint.tensors]
        pairs = sorted(
            ((ours, stored) for ours, stored in found if ours is not None),
            key=lambda pair: _natural_key(pair[0]),
        )
        return tuple(self._vision_layout(ours, stored) for ours, stored in pairs)

    def tied_head(self) -> FloatSegment | None:
        """The stored head of a tied model, if there is one."""
        if not self.config.tie_word_embeddings or HEAD_NAME not in self.checkpoint.tensors:
            return None
        shape = self.config.vocab_size, self.config.hidden_size
        return find_floats(self.checkpoint, (HEAD_NAME, shape))

    def check_unexpected(self, layouts: Iterable[ObjectLayout]) -> int:
        """How many scales are not used. Raises ModelFileError for the first tensor that belongs to
        nothing."""
        used = {
            entry.name
            for layout in layouts
            for segment in layout.segments
            for entry in segment.entries
        }
        unused_scales = 0
        for name, (file, _) in self.checkpoint.tensors.items():
            if name in used or self._is_ignored(name):
                continue
            if self.quantised.quantisation is None or not name.endswith(UNUSED_SUFFIXES):
                raise ModelFileError(file.path, name, self._unexpected(name))
            unused_scales += 1
        return unused_scales

    def _unexpected(self, name: str) -> str:
        scheme = next((text for suffix, text in _FOREIGN.items() if name.endswith(suffix)), None)
        if scheme is not None and self.quantised.quantisation is None:
            return f"unexpected tensor of {scheme}: {CONFIG_NAME} has no quantization_config"
        return f"unexpected tensor: not part of {self.config.architecture} with this configuration"

    def _is_ignored(self, name: str) -> bool:
        if name.startswith(MTP_PREFIX):
            return self.config.num_mtp_layers == 0
        if name == HEAD_NAME:
            return self.config.tie_word_embeddings
        return name.endswith(IGNORED_SUFFIXES)

    def _layout(self, item: ModelObject) -> ObjectLayout:
        wanted = [pair for part in item.parts for pair in self._stored_shapes(part)]
        is_by_expert = len(item.shape) == 3 and len(wanted[0][1]) == 2
        return ObjectLayout(item, tuple(self._segment(pair) for pair in wanted), is_by_expert)

    def _stored_shapes(self, part: LogicalParameter) -> Iterable[StoredShape]:
        whole = stored_shape(part, self.prefix)
        if self.quantised.has(whole[0]):
            return (whole,)
        experts = expert_shapes(part, self.prefix)
        first = next(experts, None)
        if first is None:
            return (whole,)
        if not self.quantised.has(first[0]):
            raise ModelFileError(
                self.checkpoint.path, whole[0], f"missing tensor (and there is no {first[0]})"
            )
        return expert_shapes(part, self.prefix)

    def _segment(self, wanted: StoredShape) -> Segment:
        return self.quantised.find(wanted) or find_floats(self.checkpoint, wanted)

    def _vision_layout(self, ours: str, stored: str) -> ObjectLayout:
        file, entry = self.checkpoint.tensors[stored]
        if not entry.shape:
            raise ModelFileError(file.path, stored, "a scalar is no weight of the vision tower")
        part = LogicalParameter(ours, entry.shape)
        item = ModelObject(ours, entry.shape, (part,), "vision")
        return ObjectLayout(item, (float_segment(file, entry),))


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which block 2 comes before block 10."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
