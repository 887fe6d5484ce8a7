"""open_model: whatever a user may name as a model -> OpenedModel, or one clear error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ninfer.artifact.container import is_container
from ninfer.artifact.safetensors_file import open_safetensors
from ninfer.contract.errors import ModelFileError
from ninfer.convert.hf_checkpoint import CONFIG_NAME, open_hf_directory
from ninfer.convert.ninfer_artifact import open_artifact
from ninfer.convert.opened_model import OpenedModel

_GGUF_MAGIC: Final = b"GGUF"


def open_model(path: Path) -> OpenedModel:
    """Open an HF directory or a .ninfer file and check all of it but the weights' values.

    Raises ModelFileError.
    """
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.is_file():
            return _open_file(path)
        problem = "neither a directory nor a regular file"
        if not path.exists():
            problem = "no such file or directory"
        raise ModelFileError(path, None, problem)
    except OSError as error:
        place = Path(error.filename) if isinstance(error.filename, str) else path
        raise ModelFileError(place, None, error.strerror or str(error)) from None


def _open_directory(folder: Path) -> OpenedModel:
    if not os.path.lexists(folder / CONFIG_NAME):
        raise ModelFileError(folder, None, f"not a model directory: it has no {CONFIG_NAME}")
    return open_hf_directory(folder)


def _open_file(path: Path) -> OpenedModel:
    with path.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if magic == _GGUF_MAGIC:
        raise ModelFileError(path, None, "GGUF files are not supported")
    opened = open_safetensors(path)
    if not is_container(opened):
        raise ModelFileError(
            path, None, "a safetensors file that is no .ninfer artifact; name its directory instead"
        )
    return open_artifact(opened)
