"""write_artifact: an opened model -> one .ninfer file.

Objects keep the format they are stored in: numbers their dtype, codes and scales their bits. Plain
parts of different dtypes are stored as F32, which holds all of them exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from ninfer.artifact.container import (
    PENDING_CHECKSUM,
    RESOURCE_PREFIX,
    Contents,
    ObjectRecord,
)
from ninfer.artifact.container_writer import PlannedTensor, write_container
from ninfer.contract.errors import InvariantError, OptionError, OutputError
from ninfer.contract.model import ModelSource
from ninfer.convert.artifact_planes import planned_tensors
from ninfer.convert.hf_checkpoint import CONFIG_NAME, MODELOPT_NAME
from ninfer.convert.opened_model import OpenedModel
from ninfer.convert.resources import RESOURCE_FILES
from ninfer.convert.shards import INDEX_NAME

_SOURCE_NAMES: Final = frozenset({CONFIG_NAME, INDEX_NAME, MODELOPT_NAME, *RESOURCE_FILES})


def write_artifact(
    source: ModelSource, out: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write `source` (as `open_model` gives it) to `out`, whole or not at all.

    `progress(done_bytes, total_bytes)` is called as the file grows. An existing `out` is replaced
    unless it belongs to the source (OptionError, naming `--out`). Raises OutputError for what the
    file system refuses and ModelFileError for what `read_float32` does.
    """
    if not isinstance(source, OpenedModel):
        raise InvariantError(f"cannot convert a {type(source).__name__}")
    try:
        _check_out(source, out)
    except OSError as error:
        raise OutputError(out, f"cannot write: {error.strerror or error}") from None
    source.check_tied_head()
    objects = [(layout.item, planned_tensors(layout)) for layout in source.layouts]
    contents = Contents(
        name=source.name,
        config_text=source.config_text.decode(),
        objects={
            tensor.name: ObjectRecord(item.component, PENDING_CHECKSUM)
            for item, tensors in objects
            for tensor in tensors
        },
        bindings=source.bindings,
        uses=source.uses,
        resources=dict.fromkeys(source.resource_files, PENDING_CHECKSUM),
    )
    tensors = [
        *(tensor for _, planned in objects for tensor in planned),
        *(_planned_resource(name, data) for name, data in source.resource_files.items()),
    ]
    write_container(out, contents, tensors, progress or _no_progress)


def _check_out(source: OpenedModel, out: Path) -> None:
    if not out.parent.is_dir():
        raise OutputError(out, f"cannot write: there is no directory {out.parent}")
    if out.is_dir():
        raise OutputError(out, "cannot write: is a directory")
    if not out.exists():
        return
    files = {source.path, *(tensor.path for tensor in source.tensors)}
    if source.path.is_dir():
        files |= {source.path / name for name in _SOURCE_NAMES}
    if any(file.exists() and out.samefile(file) for file in files):
        raise OptionError("--out", f"{out} is a file of the model being converted")


def _planned_resource(name: str, data: bytes) -> PlannedTensor:
    return PlannedTensor(
        name=RESOURCE_PREFIX + name,
        dtype="U8",
        shape=(len(data),),
        num_bytes=len(data),
        chunks=lambda: iter((memoryview(data),)),
    )


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    """Nobody is watching."""
