"""MemoryDisk: a DiskStore without files, threads or time, whose failures are drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import numpy as np

from ninfer.contract.arrays import ByteArray
from ninfer.program.stores.disk_store import DiskStore, StoredFile, Written


class MemoryDisk(DiskStore):
    """Holds at most `max_files`; the oldest goes first. One read or write in `failures` fails."""

    def __init__(self, seed: int, *, max_files: int, failures: float) -> None:
        self.found = ()
        self._random = random.Random(seed)
        self._max_files = max_files
        self._failures = failures
        self._files: dict[str, tuple[StoredFile, list[ByteArray]]] = {}
        self._num_names = 0

    @property
    def max_bytes(self) -> int:
        return self._max_files

    @property
    def used_bytes(self) -> int:
        return len(self._files)

    def has_room(self, num_blocks: int) -> bool:
        return self._max_files > 0

    async def write(
        self,
        frontier: int,
        num_pages: int,
        blocks: Sequence[ByteArray],
        note: Mapping[str, object],
    ) -> Written | None:
        await asyncio.sleep(0)
        if self._random.random() < self._failures:
            return None
        removed = list(self._files)[: max(0, len(self._files) + 1 - self._max_files)]
        for name in removed:
            del self._files[name]
        self._num_names += 1
        file = StoredFile(f"f{self._num_names}", 1, frontier, num_pages, note)
        self._files[file.name] = file, [np.array(block) for block in blocks]
        return Written(file, frozenset(removed))

    async def read(self, file: StoredFile, targets: Sequence[ByteArray]) -> bool:
        await asyncio.sleep(0)
        if file.name not in self._files or self._random.random() < self._failures:
            return False
        for target, block in zip(targets, self._files[file.name][1], strict=True):
            target[:] = block
        return True

    def discard(self, file: StoredFile) -> None:
        self._files.pop(file.name, None)

    def close(self) -> None:
        return None
