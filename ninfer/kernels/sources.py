"""The .cu files and what belongs to one: the headers it reaches and the digest of all of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ninfer.contract.errors import InvariantError

KERNELS_DIR: Final = Path(__file__).resolve().parent
INCLUDE_DIR: Final = KERNELS_DIR / "include"
OPTIONS: Final = ("-std=c++17", "--ptxas-options=-v")
"""The same for every kernel. No fast math: it flushes the subnormals of bf16 and e4m3."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One .cu file with the headers of ours that it includes, directly or not.

    headers   (name as included, text) in the order first met; the toolkit's own headers are not
              among them, the compiler's version stands for those
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]

    def digest(self, architecture: str, *toolchain: str) -> str:
        """Over all the compiler reads and is told, and its versions if given; 32 hex digits."""
        hasher = hashlib.sha256()
        parts = [architecture, *toolchain, *OPTIONS, self.name, self.text]
        for name, text in sorted(self.headers):
            parts += [name, text]
        for part in parts:
            data = part.encode()
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        return hasher.hexdigest()[:32]


def kernel_names(directory: Path = KERNELS_DIR) -> tuple[str, ...]:
    """Every kernel family: the stems of the .cu files."""
    return tuple(sorted(path.stem for path in directory.glob("*.cu")))


def read_source(path: Path, include_dir: Path = INCLUDE_DIR) -> KernelSource:
    """Read a .cu file and all of ours that it includes. Raises InvariantError if there is none."""
    if not path.is_file():
        raise InvariantError(f"no kernel source {path.name}")
    text = path.read_text()
    headers: dict[str, str] = {}
    pending = [text]
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            header = include_dir / name
            if name not in headers and header.is_file():
                headers[name] = header.read_text()
                pending.append(headers[name])
    return KernelSource(path.stem, text, tuple(headers.items()))
