"""The `system_fingerprint` of a loaded model: a hash of what its outputs depend on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from ninfer.contract.model import ModelSource
from ninfer.options import EngineOptions

_SAMPLE_BYTES: Final = 1 << 20
OUTPUT_OPTIONS: Final = (
    "executor",
    "device",
    "weights",
    "kv_dtype",
    "max_context",
    "prefill_chunk",
    "cpu_threads",
)
"""Of the engine's options those that can change what a request outputs. The rest, the context
cache among it, changes when."""


def fingerprint_of(source: ModelSource, options: EngineOptions) -> str:
    """`fp_` and 16 hex digits. Of each weight file the size, first and last MiB are hashed: files
    of many gigabytes must not be read twice at start."""
    digest = hashlib.sha256()
    digest.update(json.dumps(source.hf_config, sort_keys=True).encode())
    digest.update(repr([getattr(options, name) for name in OUTPUT_OPTIONS]).encode())
    for tensor in source.tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
    for path in sorted({tensor.path for tensor in source.tensors}):
        _add_file(digest, path)
    return f"fp_{digest.hexdigest()[:16]}"


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        num_bytes = file.seek(0, 2)
        digest.update(str(num_bytes).encode())
        for start in (0, max(0, num_bytes - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
