"""open_model: whatever a user may name as a model -> OpenedModel, or one clear error."""

from __future__ import annotations

from pathlib import Path

from ninfer.contract.errors import ModelFileError
from ninfer.convert.hf_checkpoint import CONFIG_NAME, open_hf_directory
from ninfer.convert.opened_model import OpenedModel


def open_model(path: Path) -> OpenedModel:
    """Open an HF directory or a .ninfer file and check all of it but the weights' values.

    Raises ModelFileError.
    """
    if path.is_dir():
        return _open_directory(path)
    raise ModelFileError(path, None, "no such file or directory")


def _open_directory(folder: Path) -> OpenedModel:
    if not (folder / CONFIG_NAME).exists():
        raise ModelFileError(folder, None, f"not a model directory: it has no {CONFIG_NAME}")
    return open_hf_directory(folder)
