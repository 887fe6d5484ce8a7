"""DiskStore: the folder of checkpoint files, bounded in bytes, shared with other processes.

Files appear whole or not at all (`checkpoint_file.py`) under names that no other process chooses,
so processes only meet when one puts a file out: the other finds it gone, which is a miss. The
folder itself is the truth about sizes and uses (a file's time of modification is its last use).
Files of other models count towards the bound too, and go when it is their turn.

All input and output but the scan at start runs in one thread. The scan reads headers, newest first,
for SCAN_S at most; what it did not reach is not used in this run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from ninfer.contract.arrays import ByteArray
from ninfer.contract.units import PAGE_TOKENS
from ninfer.program.stores import checkpoint_file
from ninfer.program.stores.checkpoint_file import CheckpointFileError, CheckpointHeader

SCAN_S: Final = 5.0
SUFFIX: Final = ".ninfer-checkpoint"
_PARTIAL_PREFIX: Final = ".ninfer-"
_PARTIAL_SUFFIX: Final = ".partial"
_PARTIAL_AGE_S: Final = 3600.0
"""A partial file that was not written to for so long was left by a process that is gone."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class _ForeignFileError(CheckpointFileError):
    """A whole file that other weights or formats have left."""


@dataclass(frozen=True, slots=True)
class DiskLayout:
    """What files must be like to be of use here.

    fingerprint     of the model and of all that decides its numbers
    block_bytes     a page in all layers
    num_state_blocks   blocks of a StateImage
    """

    fingerprint: str
    block_bytes: int
    num_state_blocks: int

    @property
    def binding(self) -> dict[str, object]:
        return {
            "fingerprint": self.fingerprint,
            "page_tokens": PAGE_TOKENS,
            "block_bytes": self.block_bytes,
            "num_state_blocks": self.num_state_blocks,
        }


@dataclass(frozen=True, slots=True, eq=False)
class StoredFile:
    """A file that can be fetched, as far as its header tells."""

    name: str
    num_bytes: int
    frontier: int
    num_pages: int
    note: Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A new file, and the names of files that were put out for it or were found gone."""

    file: StoredFile
    removed: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    num_bytes: int
    used_ns: int


class DiskStore:
    """Raises OSError at construction when the folder can neither be made nor read."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        layout: DiskLayout,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the folder (for its owner alone) and scans it; blocks meanwhile."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._layout = layout
        self._clock = clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._known: set[str] = set()
        self._used_bytes = 0
        self.found = tuple(self._scan())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ninfer-disk")

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def used_bytes(self) -> int:
        """Of all checkpoint files when the folder was last looked at."""
        return self._used_bytes

    def has_room(self, num_blocks: int) -> bool:
        """Whether a file of so many blocks fits an otherwise empty folder."""
        return checkpoint_file.least_bytes(num_blocks, self._layout.block_bytes) <= self._max_bytes

    async def write(
        self,
        frontier: int,
        num_pages: int,
        blocks: Sequence[ByteArray],
        note: Mapping[str, object],
    ) -> Written | None:
        """Store a checkpoint, and put out what was used least recently beyond the bound. None, with
        a line in the log, when it does not fit or the file system refuses."""
        return await self._in_thread(lambda: self._write(frontier, num_pages, blocks, note))

    async def read(self, file: StoredFile, targets: Sequence[ByteArray]) -> bool:
        """Fill the targets and mark the file as used. False, with a line in the log, when it is
        damaged, gone or cannot be read; the targets may hold anything then."""
        return await self._in_thread(lambda: self._read(file, targets))

    def discard(self, file: StoredFile) -> None:
        """Delete it soon; never fails."""
        self._used_bytes = max(0, self._used_bytes - file.num_bytes)
        self._thread.submit(self._forget, file.name)

    def close(self) -> None:
        """Wait for the thread; files stay."""
        self._thread.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _scan(self) -> Iterator[StoredFile]:
        """Usable files, the least recently used first. A line in the log for each damaged one, and
        one for all that belong to somebody else."""
        entries = self._entries()
        self._used_bytes = sum(entry.num_bytes for entry in entries)
        usable, until, num_foreign = [], self._clock() + SCAN_S, 0
        for index, entry in enumerate(reversed(entries)):
            if self._clock() >= until:
                count = len(entries) - index
                _logger.warning("cache: %d files in %s were not looked at", count, self._folder)
                break
            try:
                file = self._usable(entry)
            except _ForeignFileError:
                num_foreign += 1
                continue
            if file is not None:
                usable.append(file)
                self._known.add(file.name)
        if num_foreign:
            _logger.warning(
                "cache: files of another model or of other formats in %s, not used: %d",
                self._folder,
                num_foreign,
            )
        yield from reversed(usable)

    def _usable(self, entry: _Entry) -> StoredFile | None:
        """Raises _ForeignFileError."""
        try:
            header = checkpoint_file.read_header(self._folder / entry.name)
            self._check_header(header)
        except _ForeignFileError:
            raise
        except (OSError, CheckpointFileError) as error:
            _logger.warning("cache: %s is not used: %s", entry.name, error)
            return None
        return StoredFile(
            entry.name, entry.num_bytes, header.frontier, header.num_pages, header.note
        )

    def _check_header(self, header: CheckpointHeader) -> None:
        if header.binding != self._layout.binding:
            raise _ForeignFileError("it belongs to another model or to other formats")
        num_blocks = header.num_pages + self._layout.num_state_blocks
        if (
            header.frontier < 1
            or header.num_pages != -(-header.frontier // PAGE_TOKENS)
            or len(header.digests) != num_blocks
            or header.block_bytes != self._layout.block_bytes
        ):
            raise CheckpointFileError("its header contradicts itself")

    def _write(
        self,
        frontier: int,
        num_pages: int,
        blocks: Sequence[ByteArray],
        note: Mapping[str, object],
    ) -> Written | None:
        header = CheckpointHeader(
            binding=self._layout.binding,
            frontier=frontier,
            num_pages=num_pages,
            block_bytes=self._layout.block_bytes,
            digests=tuple(checkpoint_file.block_digest(block) for block in blocks),
            note=note,
        )
        name = f"{secrets.token_hex(12)}{SUFFIX}"
        needed = checkpoint_file.file_bytes(header)
        try:
            if needed > self._max_bytes:
                raise CheckpointFileError(f"{needed:,} bytes, the bound is {self._max_bytes:,}")
            self._put_out(needed)
            checkpoint_file.write(self._folder / name, header, blocks)
        except (OSError, CheckpointFileError) as error:
            _logger.warning("cache: a checkpoint was not stored: %s", error)
            return None
        present = {entry.name for entry in self._entries()}
        removed = frozenset(self._known - present)
        self._known = (self._known & present) | {name}
        return Written(StoredFile(name, needed, frontier, num_pages, note), removed)

    def _read(self, file: StoredFile, targets: Sequence[ByteArray]) -> bool:
        path = self._folder / file.name
        try:
            checkpoint_file.read_blocks(path, self._layout.binding, targets)
        except (OSError, CheckpointFileError) as error:
            _logger.warning("cache: %s was not fetched: %s", file.name, error)
            return False
        try:
            os.utime(path)
        except OSError as error:
            _logger.warning("cache: the use of %s was not noted: %s", file.name, error)
        return True

    def _put_out(self, needed: int) -> None:
        """Delete files, least recently used first, until `needed` bytes fit below the bound."""
        entries = self._entries()
        used = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if used + needed <= self._max_bytes:
                break
            self._unlink(entry.name)
            used -= entry.num_bytes
        self._used_bytes = used + needed

    def _forget(self, name: str) -> None:
        self._known.discard(name)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("cache: %s was not deleted: %s", name, error)

    def _entries(self) -> list[_Entry]:
        """Checkpoint files, least recently used first. Partial files of processes that are gone are
        deleted on the way."""
        entries = []
        with os.scandir(self._folder) as listing:
            for item in listing:
                is_partial = item.name.startswith(_PARTIAL_PREFIX) and item.name.endswith(
                    _PARTIAL_SUFFIX
                )
                if not is_partial and not item.name.endswith(SUFFIX):
                    continue
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError:
                    continue
                if not is_partial:
                    entries.append(_Entry(item.name, status.st_size, status.st_mtime_ns))
                elif time.time() - status.st_mtime > _PARTIAL_AGE_S:
                    self._unlink(item.name)
        return sorted(entries, key=lambda entry: (entry.used_ns, entry.name))
