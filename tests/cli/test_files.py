"""Files named on the command line: only regular ones, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ninfer.cli.input_files import read_json, read_text
from ninfer.cli.output_files import check_writable, write_file
from ninfer.contract.errors import OptionError


def put(path: Path, data: bytes) -> None:
    write_file("--out", path, lambda file: _write(file, data))


def _write(file: object, data: bytes) -> None:
    file.write(data)  # type: ignore[attr-defined]


def test_a_link_stays_and_its_target_keeps_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    put(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_pipe_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OptionError, match="not a regular file"):
        put(pipe, b"new")
    with pytest.raises(OptionError, match="not a regular file"):
        check_writable("--out", pipe)
    with pytest.raises(OptionError, match="not a regular file"):
        read_text("--text", str(pipe))
    assert pipe.is_fifo()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OptionError, match="No space left"):
        write_file("--out", path, fail)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_names_and_numbers_python_refuses_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no file name"):
        read_text("--text", "a\0b")
    with pytest.raises(OptionError, match="no file name"):
        check_writable("--out", Path("a\0b"))
    path = tmp_path / "long.json"
    path.write_text("[" + "9" * 5000 + "]")
    with pytest.raises(OptionError, match="number that is too long"):
        read_json("--ids", str(path))


def test_a_loop_of_links_is_a_typed_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OptionError, match="cannot write"):
        put(loop, b"new")


def test_an_interrupt_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupt(file: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file("--out", path, interrupt)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
