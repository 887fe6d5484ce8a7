"""What a checkpoint file is bound to: a hash of all that decides the numbers in it.

Covered: the configuration, every tensor's name, type and shape, the size of each weight file and
SAMPLES stretches of SAMPLE_BYTES spread evenly over it, how the executor stores weights and KV.
Not covered: bytes between the samples (a file that differs in a few weights only can go unnoticed;
one trained or quantised anew cannot), names and paths, templates (checkpoints are of token ids).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from ninfer.contract.model import StoredTensor

SAMPLES: Final = 64
SAMPLE_BYTES: Final = 1 << 16


class Fingerprinted(Protocol):
    """A model, or a draft model."""

    @property
    def config(self) -> object: ...

    @property
    def tensors(self) -> Sequence[StoredTensor]: ...


def model_fingerprint(source: Fingerprinted, numbers: str) -> str:
    """32 hex digits. `numbers` names the executor and its formats. Raises OSError."""
    digest = hashlib.sha256(f"{numbers}\n{source.config!r}\n".encode())
    for tensor in source.tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    for path in sorted({tensor.path for tensor in source.tensors}):
        _add_file(digest, path)
    return digest.hexdigest()[:32]


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(f"{size}\n".encode())
        last = max(0, size - SAMPLE_BYTES)
        for start in sorted({last * index // (SAMPLES - 1) for index in range(SAMPLES)}):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
