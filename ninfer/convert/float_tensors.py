"""Tensors of plain numbers in a checkpoint: found by name, checked for shape and dtype."""

from __future__ import annotations

from ninfer.artifact.numeric_formats import FLOAT_FORMATS
from ninfer.artifact.safetensors_file import SafetensorsFile, TensorEntry
from ninfer.contract.errors import ModelFileError
from ninfer.convert.hf_names import StoredShape
from ninfer.convert.segments import FloatSegment
from ninfer.convert.shards import Checkpoint


def stored_tensor(
    checkpoint: Checkpoint, wanted: StoredShape
) -> tuple[SafetensorsFile, TensorEntry]:
    """The tensor of this name. Raises ModelFileError when it is missing or has another shape."""
    name, shape = wanted
    if name not in checkpoint.tensors:
        raise ModelFileError(checkpoint.path, name, "missing tensor")
    file, entry = checkpoint.tensors[name]
    if entry.shape != shape:
        raise ModelFileError(
            file.path, name, f"shape {list(entry.shape)}, the configuration says {list(shape)}"
        )
    return file, entry


def find_floats(checkpoint: Checkpoint, wanted: StoredShape) -> FloatSegment:
    """As stored_tensor; also raises ModelFileError for a dtype that weights may not have."""
    return float_segment(*stored_tensor(checkpoint, wanted))


def float_segment(file: SafetensorsFile, entry: TensorEntry) -> FloatSegment:
    """A tensor of any shape. Raises ModelFileError for a dtype that weights may not have."""
    if entry.dtype not in FLOAT_FORMATS:
        raise ModelFileError(
            file.path,
            entry.name,
            f"dtype {entry.dtype} is not supported ({', '.join(FLOAT_FORMATS)} are)",
        )
    return FloatSegment(file, entry)
