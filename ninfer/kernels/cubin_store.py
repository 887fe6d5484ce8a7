"""Compiled kernels on disk. A file that is damaged or for other sources is as good as none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from ninfer.kernels.compiler import CompiledKernel, EntryUsage

_MAGIC: Final = b"NINFER-CUBIN-1\n"
_DIGEST_BYTES: Final = 32
_LENGTH_BYTES: Final = 8


def default_cache_dir(environ: dict[str, str]) -> Path:
    """`$XDG_CACHE_HOME/ninfer/kernels`, or the same under `~/.cache`."""
    root = environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path.home() / ".cache"
    return base / "ninfer" / "kernels"


class CubinStore:
    """A folder of files `<name>-<architecture>-<key>.cubin`, each with a checksum of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path_of(self, name: str, architecture: str, key: str) -> Path:
        return self.directory / f"{name}-{architecture}-{key}.cubin"

    def load(self, name: str, architecture: str, key: str) -> CompiledKernel | None:
        """None when there is no such file or its checksum does not fit."""
        try:
            data = self.path_of(name, architecture, key).read_bytes()
        except OSError:
            return None
        return _decode(data)

    def save(self, name: str, architecture: str, key: str, kernel: CompiledKernel) -> Path:
        """Write atomically: readers see the old file, none, or the whole new one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        target = self.path_of(name, architecture, key)
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=f".{name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_encode(kernel))
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return target


def _encode(kernel: CompiledKernel) -> bytes:
    usage = json.dumps([dataclasses.asdict(entry) for entry in kernel.usage]).encode()
    body = len(usage).to_bytes(_LENGTH_BYTES, "little") + usage + kernel.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> CompiledKernel | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    usage = json.loads(body[_LENGTH_BYTES:end])
    return CompiledKernel(body[end:], tuple(EntryUsage(**entry) for entry in usage))
