"""The safetensors files of an HF directory, as one table of tensors.

An index, where there is one, decides which shards are read and which tensor lies in which.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ninfer.artifact.json_document import Fields
from ninfer.artifact.safetensors_file import SafetensorsFile, TensorEntry, open_safetensors
from ninfer.artifact.small_file import read_object
from ninfer.contract.errors import ModelFileError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """All tensors by name. `path` is what errors about absent tensors name."""

    path: Path
    tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Raises ModelFileError."""
    index = folder / INDEX_NAME
    if os.path.lexists(index):
        return _open_indexed(index)
    single = _single_file(folder)
    file = open_safetensors(single)
    return Checkpoint(single, {name: (file, entry) for name, entry in file.entries.items()})


def _single_file(folder: Path) -> Path:
    if os.path.lexists(folder / SINGLE_NAME):
        return folder / SINGLE_NAME
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFileError(folder, None, _nothing_found(folder))
    if len(files) > 1:
        raise ModelFileError(
            folder, None, f"{len(files)} safetensors files but no {INDEX_NAME} to say what they are"
        )
    return files[0]


def _nothing_found(folder: Path) -> str:
    for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf"):
        for file in folder.glob(pattern):
            return f"no safetensors weights; files like {file.name} are not supported"
    return "no safetensors weights in this directory"


def _open_indexed(index: Path) -> Checkpoint:
    weight_map = Fields(index, read_object(index)).child("weight_map")
    if not weight_map.values:
        raise ModelFileError(index, "weight_map", "names no tensors")
    shard_of = {tensor: weight_map.text(tensor) for tensor in weight_map.values}
    shards = [_open_shard(index, shard_of, name) for name in dict.fromkeys(shard_of.values())]
    tensors: dict[str, tuple[SafetensorsFile, TensorEntry]] = {}
    for file in shards:
        for name, entry in file.entries.items():
            if name in tensors:
                other = tensors[name][0].path.name
                raise ModelFileError(file.path, name, f"the tensor is in {other} as well")
            if name not in shard_of:
                raise ModelFileError(file.path, name, f"the tensor is not in {INDEX_NAME}")
            tensors[name] = file, entry
    _check_places(index, shard_of, tensors)
    return Checkpoint(index, tensors)


def _open_shard(index: Path, shard_of: Mapping[str, str], name: str) -> SafetensorsFile:
    tensor = next(tensor for tensor, shard in shard_of.items() if shard == name)
    if not _is_file_name(name):
        raise ModelFileError(index, f"weight_map.{tensor}", f"{name!r} is not a plain file name")
    if not (index.parent / name).exists():
        raise ModelFileError(index, f"weight_map.{tensor}", f"the shard {name} is missing")
    return open_safetensors(index.parent / name)


def _is_file_name(name: str) -> bool:
    """A name inside the directory itself that a file system can hold."""
    return Path(name).name == name != ".." and "\0" not in name and len(name.encode()) <= 255


def _check_places(
    index: Path,
    shard_of: Mapping[str, str],
    tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]],
) -> None:
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name][0].path.name != shard:
            raise ModelFileError(index, f"weight_map.{name}", f"the tensor is not in {shard}")
