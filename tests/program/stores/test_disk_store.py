"""DiskStore: what was written is found and read by the next process; whatever is wrong with a file
is a miss and a line in the log; the bound holds."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.arrays import ByteArray
from ninfer.program.stores import checkpoint_file, disk_store
from ninfer.program.stores.checkpoint_file import CheckpointFileError, CheckpointHeader
from ninfer.program.stores.disk_store import SUFFIX, DiskLayout, DiskStore, StoredFile, Written

BLOCK_BYTES = 96
LAYOUT = DiskLayout("model", BLOCK_BYTES, 2)
FILE_BYTES = 4096 + 4 * BLOCK_BYTES
NOTE = {"tokens": [1, 2, 3], "kind": "turn_closure", "text": "ä"}


def blocks_of(seed: int, count: int = 4) -> list[ByteArray]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8))


@contextmanager
def opened(
    folder: Path, max_bytes: int = 100 * FILE_BYTES, layout: DiskLayout = LAYOUT
) -> Iterator[DiskStore]:
    store = DiskStore(folder, max_bytes, layout)
    try:
        yield store
    finally:
        store.close()


async def write(store: DiskStore, seed: int) -> Written:
    """A checkpoint of two pages and a state of two blocks."""
    written = await store.write(100, 2, blocks_of(seed), {**NOTE, "seed": seed})
    assert written is not None
    return written


async def read(store: DiskStore, file: StoredFile) -> list[ByteArray] | None:
    targets = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(4)]
    return targets if await store.read(file, targets) else None


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def everything_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_whole(path: Path, targets: list[ByteArray]) -> None:
    checkpoint_file.read_header(path)
    checkpoint_file.read_blocks(path, LAYOUT.binding, targets)


async def stored_file(folder: Path) -> Path:
    """One checkpoint on disk, written by a process that is gone."""
    with opened(folder) as store:
        await write(store, 1)
    (path,) = files_in(folder)
    return path


async def test_what_was_written_is_found_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as store:
        assert store.found == ()
        written = [await write(store, seed) for seed in (1, 2)]
        assert store.used_bytes == 2 * FILE_BYTES
    with opened(tmp_path / "new" / "folder") as store:
        assert [file.name for file in store.found] == [item.file.name for item in written]
        for seed, file in enumerate(store.found, start=1):
            assert (file.frontier, file.num_pages, file.num_bytes) == (100, 2, FILE_BYTES)
            assert file.note == {**NOTE, "seed": seed}
            got = await read(store, file)
            assert got is not None
            assert np.array_equal(got, blocks_of(seed))
        assert store.used_bytes == 2 * FILE_BYTES


async def test_the_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "cache"):
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, FILE_BYTES - 1), flip=st.integers(1, 255))
def test_damage_anywhere_in_what_counts_is_a_miss(place: int, flip: int) -> None:
    """Only the zeros between header and blocks count for nothing."""
    header = CheckpointHeader(
        LAYOUT.binding,
        100,
        2,
        BLOCK_BYTES,
        tuple(checkpoint_file.block_digest(block) for block in blocks_of(1)),
        NOTE,
    )
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"ninfer-test-{os.getpid()}{SUFFIX}"
    try:
        checkpoint_file.write(path, header, blocks_of(1))
        content = bytearray(path.read_bytes())
        length = int.from_bytes(content[8:16], "little")
        content[place] ^= flip
        path.write_bytes(content)
        targets = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(4)]
        if 32 + length <= place < 4096:
            read_whole(path, targets)
            assert np.array_equal(targets, blocks_of(1))
            return
        with pytest.raises(CheckpointFileError):
            read_whole(path, targets)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("size", [0, 7, 31, 100, 4096, FILE_BYTES - 1, FILE_BYTES + 1])
async def test_a_file_of_another_size_is_not_used(
    tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = await stored_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes((content + b"x")[:size])
    with opened(tmp_path) as store:
        assert store.found == ()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert path.name in caplog.text


@pytest.mark.parametrize(
    "layout",
    [
        dataclasses.replace(LAYOUT, fingerprint="other"),
        dataclasses.replace(LAYOUT, block_bytes=BLOCK_BYTES * 2),
        dataclasses.replace(LAYOUT, num_state_blocks=3),
    ],
)
async def test_files_of_other_models_and_formats_are_not_used_but_counted(
    tmp_path: Path, layout: DiskLayout, caplog: pytest.LogCaptureFixture
) -> None:
    path = await stored_file(tmp_path)
    with opened(tmp_path, layout=layout) as store:
        assert store.found == ()
        assert store.used_bytes == FILE_BYTES
    assert "files of another model or of other formats" in caplog.text
    assert caplog.text.rstrip().endswith("not used: 1")
    assert path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frontier": 200}, "contradicts itself"),
        ({"frontier": 0}, "contradicts itself"),
        ({"num_pages": 3}, "contradicts itself"),
        ({"digests": ("00",) * 3}, "bytes, not"),
    ],
)
async def test_headers_that_contradict_themselves_are_not_used(
    tmp_path: Path, change: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = await stored_file(tmp_path)
    header = dataclasses.replace(checkpoint_file.read_header(path), **change)  # type: ignore[arg-type]
    checkpoint_file.write(path, header, blocks_of(1))
    with opened(tmp_path) as store:
        assert store.found == ()
    assert message in caplog.text


async def test_another_format_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_file, "FORMAT", 2)
        await stored_file(tmp_path)
    with opened(tmp_path) as store:
        assert store.found == ()
    assert "format 2, not 1" in caplog.text


async def test_damage_after_the_scan_is_found_at_the_fetch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = await stored_file(tmp_path)
    with opened(tmp_path) as store:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert await read(store, store.found[0]) is None
        path.unlink()
        assert await read(store, store.found[0]) is None
    assert "block 3 is damaged" in caplog.text
    assert len(caplog.records) == 2


async def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, 3 * FILE_BYTES + 5) as store:
        files = [(await write(store, seed)).file for seed in (1, 2, 3)]
        for age, file in zip((30, 20, 10), files, strict=True):
            os.utime(tmp_path / file.name, (1e9 - age, 1e9 - age))
        assert await read(store, files[0]) is not None
        written = await write(store, 4)
        assert written.removed == {files[1].name}
        assert store.used_bytes == 3 * FILE_BYTES
    names = {path.name for path in files_in(tmp_path)}
    assert names == {files[0].name, files[2].name, written.file.name}
    with opened(tmp_path) as store:
        assert [file.note["seed"] for file in store.found] == [3, 1, 4]


async def test_files_that_another_process_put_out_are_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = (await write(store, 1)).file
        (tmp_path / first.name).unlink()
        assert (await write(store, 2)).removed == {first.name}


async def test_two_processes_share_one_folder(tmp_path: Path) -> None:
    """Each stays below the bound with the other's files, and neither harms the other's."""
    bound = 5 * FILE_BYTES
    with opened(tmp_path, bound) as one, opened(tmp_path, bound) as other:
        alive: dict[str, tuple[int, StoredFile]] = {}
        for round_number in range(6):
            jobs = [write(one, 2 * round_number), write(other, 2 * round_number + 1)]
            for seed, written in enumerate(await asyncio.gather(*jobs), 2 * round_number):
                alive[written.file.name] = (seed, written.file)
        present = files_in(tmp_path)
        # Both may look at the folder before either has written.
        assert 1 <= len(present) <= 6
        for path in present:
            seed, file = alive[path.name]
            for store in (one, other):
                got = await read(store, file)
                assert got is not None
                assert np.array_equal(got, blocks_of(seed))
    assert not [name for name in everything_in(tmp_path) if name.startswith(".")]


async def test_what_is_larger_than_the_bound_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, FILE_BYTES) as store:
        assert store.has_room(4)
        assert not store.has_room(5)
        await write(store, 1)
        assert await store.write(100, 2, blocks_of(2), {"much": "x" * 5000}) is None
        assert len(files_in(tmp_path)) == 1
    assert "the bound is" in caplog.text


async def test_a_full_disk_is_no_failure_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", refuse)
            assert await store.write(100, 2, blocks_of(1), NOTE) is None
        assert everything_in(tmp_path) == []
        await write(store, 2)
    assert "was not stored: [Errno 28]" in caplog.text


async def test_discarded_files_are_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        file = (await write(store, 1)).file
        store.discard(file)
        assert store.used_bytes == 0
    assert everything_in(tmp_path) == []


async def test_what_others_keep_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("x" * FILE_BYTES)
    young = tmp_path / ".ninfer-0123.partial"
    young.write_text("being written")
    old = tmp_path / ".ninfer-4567.partial"
    old.write_text("left by a process that was killed")
    os.utime(old, (1e9, 1e9))
    with opened(tmp_path, FILE_BYTES) as store:
        assert store.used_bytes == 0
        await write(store, 1)
        await write(store, 2)
    assert foreign.exists()
    assert young.exists()
    assert not old.exists()
    assert len(files_in(tmp_path)) == 1


async def test_the_scan_ends_in_time_with_the_newest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        for seed in range(5):
            file = (await write(store, seed)).file
            os.utime(tmp_path / file.name, (1e9 + seed, 1e9 + seed))
    ticks = iter(range(100))
    monkeypatch.setattr(disk_store, "SCAN_S", 3.0)
    store = DiskStore(tmp_path, 100 * FILE_BYTES, LAYOUT, clock=lambda: next(ticks))
    store.close()
    assert [file.note["seed"] for file in store.found] == [3, 4]
    assert store.used_bytes == 5 * FILE_BYTES
    assert "3 files in" in caplog.text


def test_a_folder_that_cannot_be_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file", FILE_BYTES, LAYOUT)
