"""Directories of DFlash and DFlash2 draft models: config.json and safetensors -> OpenedDflash.

Names are those of the published files: no prefix in front of `layers.`, the two codebooks and the
convolutions' base kernels without `.weight`. Everything is checked from headers alone: every tensor
is there with the right shape and dtype, and nothing is left over. A tensor `d2t` [Vd] says how far
the token of each head row lies above the row's own number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.artifact.json_document import parse_object
from ninfer.artifact.small_file import read_bytes
from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import ModelFileError
from ninfer.contract.model import LogicalParameter, ModelObject, StoredTensor
from ninfer.convert.float_tensors import find_floats, stored_tensor
from ninfer.convert.hf_checkpoint import CONFIG_NAME
from ninfer.convert.hf_names import HEAD_NAME, IGNORED_SUFFIXES, stored_name
from ninfer.convert.opened_model import ObjectLayout
from ninfer.convert.shards import Checkpoint, open_checkpoint
from ninfer.models.dflash_config import DflashConfig, parse_dflash_config
from ninfer.models.dflash_parameters import dflash_objects

TokenMap = NDArray[np.int64]

_EMBEDDING_NAME: Final = "embed_tokens.weight"
_MAP_NAME: Final = "d2t"
_IGNORED: Final = ("t2d", _MAP_NAME, "verifier_norm.weight", "verifier_lm_head.weight")
"""The inverse map, and what training took from the target."""
_MASK_FILE: Final = "mask_embedding.pt"
_INTEGERS: Final = MappingProxyType({"I32": "<i4", "I64": "<i8"})
_NAMES: Final = MappingProxyType(
    {
        "selector.predecessors": "candidate_selector.predecessor_codebook",
        "selector.successors": "candidate_selector.successor_codebook",
        "selector.hidden": "candidate_selector.hidden_projection.weight",
    }
)
_CONV_NAMES: Final = MappingProxyType({"base": "base_kernel", "kernel": "kernel_projection.weight"})


@dataclass(frozen=True, slots=True, eq=False)
class OpenedDflash:
    """A checked draft model over mapped files, weights still unread.

    token_ids   [Vd] the token of each row of its own head; None: rows are tokens
    tensors     what decides its numbers, for a fingerprint
    """

    path: Path
    config: DflashConfig
    layouts: tuple[ObjectLayout, ...]
    token_ids: TokenMap | None
    tensors: tuple[StoredTensor, ...]

    @property
    def objects(self) -> tuple[ModelObject, ...]:
        return tuple(layout.item for layout in self.layouts)

    def read_float32(self) -> Iterator[tuple[ModelObject, Float32Array]]:
        """Materialise it, object by object. Raises ModelFileError for non-finite weights."""
        for layout in self.layouts:
            yield layout.item, layout.read()


def open_dflash(folder: Path) -> OpenedDflash:
    """Raises ModelFileError."""
    config_path = folder / CONFIG_NAME
    if not folder.is_dir() or not os.path.lexists(config_path):
        raise ModelFileError(folder, None, f"not a model directory: it has no {CONFIG_NAME}")
    config = parse_dflash_config(parse_object(read_bytes(config_path), config_path), config_path)
    if os.path.lexists(folder / _MASK_FILE):
        raise ModelFileError(folder / _MASK_FILE, None, "a mask embedding apart is not supported")
    checkpoint = open_checkpoint(folder)
    objects = dflash_objects(
        config,
        has_embedding=_EMBEDDING_NAME in checkpoint.tensors,
        has_head=HEAD_NAME in checkpoint.tensors or config.head_vocab_size < config.vocab_size,
    )
    layouts = tuple(_layout(checkpoint, item) for item in objects)
    _check_unexpected(checkpoint, layouts, config)
    return OpenedDflash(
        folder,
        config,
        layouts,
        _token_ids(checkpoint, config),
        tuple(file.stored(entry) for file, entry in checkpoint.tensors.values()),
    )


def _layout(checkpoint: Checkpoint, item: ModelObject) -> ObjectLayout:
    segments = (find_floats(checkpoint, (_name(part), part.shape)) for part in item.parts)
    return ObjectLayout(item, tuple(segments))


def _name(part: LogicalParameter) -> str:
    if part.name in _NAMES:
        return _NAMES[part.name]
    stem, _, leaf = part.name.rpartition(".")
    return f"{stem}.{_CONV_NAMES[leaf]}" if leaf in _CONV_NAMES else stored_name(part.name, "")


def _check_unexpected(
    checkpoint: Checkpoint, layouts: tuple[ObjectLayout, ...], config: DflashConfig
) -> None:
    used = {_name(part) for layout in layouts for part in layout.item.parts}
    for name, (file, _) in checkpoint.tensors.items():
        if name not in used and name not in _IGNORED and not name.endswith(IGNORED_SUFFIXES):
            raise ModelFileError(
                file.path,
                name,
                f"unexpected tensor: not part of {config.architecture} with this configuration",
            )


def _token_ids(checkpoint: Checkpoint, config: DflashConfig) -> TokenMap | None:
    if config.head_vocab_size == config.vocab_size:
        return None
    file, entry = stored_tensor(checkpoint, (_MAP_NAME, (config.head_vocab_size,)))
    if entry.dtype not in _INTEGERS:
        raise ModelFileError(
            file.path,
            _MAP_NAME,
            f"dtype {entry.dtype} is not supported ({', '.join(_INTEGERS)} are)",
        )
    offsets = np.frombuffer(file.view(entry), _INTEGERS[entry.dtype]).astype(np.int64)
    token_ids = np.arange(offsets.size) + offsets
    if token_ids.min() < 0 or token_ids.max() >= config.vocab_size:
        raise ModelFileError(file.path, _MAP_NAME, f"leads outside 0 to {config.vocab_size - 1}")
    if np.unique(token_ids).size != token_ids.size:
        raise ModelFileError(file.path, _MAP_NAME, "leads to one token from two rows")
    return token_ids
