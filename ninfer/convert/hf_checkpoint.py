"""HF model directories: config.json, safetensors and frontend files -> OpenedModel.

Everything is checked from headers alone: every parameter is there once with the right shape and a
dtype we read, and nothing is left over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ninfer.artifact.json_document import parse_object
from ninfer.artifact.numeric_formats import FLOAT_FORMATS
from ninfer.artifact.safetensors_file import SafetensorsFile, TensorEntry
from ninfer.artifact.small_file import read_bytes
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import LogicalParameter, ModelConfig, ModelObject
from ninfer.contract.printable import printable
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
from ninfer.convert.opened_model import ObjectLayout, OpenedModel, Segment
from ninfer.convert.resources import RESOURCE_FILES, parse_resources
from ninfer.convert.shards import Checkpoint, open_checkpoint
from ninfer.models.config import parse_config
from ninfer.models.parameters import model_objects

CONFIG_NAME: Final = "config.json"
QUANTISED_SUFFIXES: Final = MappingProxyType(
    {
        ".weight_scale_inv": "block FP8",
        ".weight_scale_2": "ModelOpt NVFP4",
        ".weight_packed": "compressed-tensors (packed)",
        ".weight_scale": "compressed-tensors or ModelOpt",
        ".qweight": "GPTQ or AWQ",
    }
)
"""Tensors that only quantised checkpoints have, and what they tell."""


def open_hf_directory(folder: Path) -> OpenedModel:
    """Raises ModelFileError."""
    config_path = folder / CONFIG_NAME
    config_text = read_bytes(config_path)
    raw = parse_object(config_text, config_path)
    config = parse_config(raw, config_path)
    resource_files = _read_resource_files(folder)
    checkpoint = open_checkpoint(folder)
    _refuse_quantised(checkpoint, folder)
    if not any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors):
        # Fine-tuning tools drop the module and keep the key.
        config = replace(config, num_mtp_layers=0)
    binder = Binder(checkpoint, config, text_prefix(checkpoint.tensors))
    layouts = (*binder.model_layouts(), *binder.vision_layouts())
    tied_head = binder.tied_head()
    binder.check_unexpected(layouts)
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
    )


def _name_of(folder: Path) -> str:
    """The directory's own name, also when it is given as `.`; fit to be shown."""
    name = os.path.basename(os.path.abspath(folder)) or "model"
    return printable(name.encode("utf-8", "replace").decode("utf-8"))


def _read_resource_files(folder: Path) -> dict[str, bytes]:
    # A link that leads nowhere is a damaged model, not one without the file.
    names = [name for name in RESOURCE_FILES if os.path.lexists(folder / name)]
    return {name: read_bytes(folder / name) for name in names}


def _refuse_quantised(checkpoint: Checkpoint, folder: Path) -> None:
    for name, (file, _) in checkpoint.tensors.items():
        for suffix, scheme in QUANTISED_SUFFIXES.items():
            if name.endswith(suffix):
                raise ModelFileError(file.path, name, f"{scheme} checkpoints are not supported yet")
    if (folder / "hf_quant_config.json").exists():
        raise ModelFileError(
            folder / "hf_quant_config.json", None, "ModelOpt checkpoints are not supported yet"
        )


@dataclass(frozen=True, slots=True)
class Binder:
    """Finds the stored tensors of a model's objects."""

    checkpoint: Checkpoint
    config: ModelConfig
    prefix: str

    def model_layouts(self) -> tuple[ObjectLayout, ...]:
        """Layouts of the text and MTP objects. Raises ModelFileError."""
        return tuple(
            ObjectLayout(item, tuple(self._segments(item))) for item in model_objects(self.config)
        )

    def vision_layouts(self) -> tuple[ObjectLayout, ...]:
        """One object for every stored vision tensor."""
        found = [(vision_name(name), name) for name in self.checkpoint.tensors]
        pairs = sorted(
            ((ours, stored) for ours, stored in found if ours is not None),
            key=lambda pair: _natural_key(pair[0]),
        )
        return tuple(self._vision_layout(ours, stored) for ours, stored in pairs)

    def tied_head(self) -> Segment | None:
        """The stored head of a tied model, if there is one."""
        if not self.config.tie_word_embeddings or HEAD_NAME not in self.checkpoint.tensors:
            return None
        return self._segment((HEAD_NAME, (self.config.vocab_size, self.config.hidden_size)))

    def check_unexpected(self, layouts: Iterable[ObjectLayout]) -> None:
        """Raises ModelFileError for the first tensor that belongs to nothing."""
        used = {segment.entry.name for layout in layouts for segment in layout.segments}
        for name, (file, _) in self.checkpoint.tensors.items():
            if name not in used and not self._is_ignored(name):
                raise ModelFileError(
                    file.path,
                    name,
                    f"unexpected tensor: not part of {self.config.architecture} "
                    "with this configuration",
                )

    def _is_ignored(self, name: str) -> bool:
        if name.startswith(MTP_PREFIX):
            return self.config.num_mtp_layers == 0
        if name == HEAD_NAME:
            return self.config.tie_word_embeddings
        return name.endswith(IGNORED_SUFFIXES)

    def _segments(self, item: ModelObject) -> Iterator[Segment]:
        for part in item.parts:
            for wanted in self._stored_shapes(part):
                yield self._segment(wanted)

    def _stored_shapes(self, part: LogicalParameter) -> Iterable[StoredShape]:
        whole = stored_shape(part, self.prefix)
        if whole[0] in self.checkpoint.tensors:
            return (whole,)
        experts = expert_shapes(part, self.prefix)
        first = next(experts, None)
        if first is None:
            return (whole,)
        if first[0] not in self.checkpoint.tensors:
            raise ModelFileError(
                self.checkpoint.path, whole[0], f"missing tensor (and there is no {first[0]})"
            )
        return expert_shapes(part, self.prefix)

    def _segment(self, wanted: StoredShape) -> Segment:
        name, shape = wanted
        if name not in self.checkpoint.tensors:
            raise ModelFileError(self.checkpoint.path, name, "missing tensor")
        file, entry = self.checkpoint.tensors[name]
        if entry.shape != shape:
            raise ModelFileError(
                file.path, name, f"shape {list(entry.shape)}, the configuration says {list(shape)}"
            )
        return _float_segment(file, entry)

    def _vision_layout(self, ours: str, stored: str) -> ObjectLayout:
        file, entry = self.checkpoint.tensors[stored]
        if not entry.shape:
            raise ModelFileError(file.path, stored, "a scalar is no weight of the vision tower")
        part = LogicalParameter(ours, entry.shape)
        item = ModelObject(ours, entry.shape, (part,), "vision")
        return ObjectLayout(item, (_float_segment(file, entry),))


def _float_segment(file: SafetensorsFile, entry: TensorEntry) -> Segment:
    if entry.dtype not in FLOAT_FORMATS:
        raise ModelFileError(
            file.path,
            entry.name,
            f"dtype {entry.dtype} is not supported ({', '.join(FLOAT_FORMATS)} are)",
        )
    return Segment(file, entry)


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which block 2 comes before block 10."""
    pieces = re.split(r"(\d+)", name)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
