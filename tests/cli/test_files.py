"""Files named on the command line: only regular ones, whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from ninfer.cli import input_files, turn_reader
from ninfer.cli.input_files import read_json, read_text
from ninfer.cli.output_files import check_writable, write_file
from ninfer.cli.turn_reader import PipeReader
from ninfer.contract.errors import OptionError, OutputError


def put(path: Path, data: bytes) -> None:
    write_file("--out", path, lambda file: file.write(data))


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
    with pytest.raises(OutputError, match="not a regular file"):
        put(pipe, b"new")
    with pytest.raises(OutputError, match="not a regular file"):
        check_writable("--out", pipe)
    with pytest.raises(OptionError, match="not a regular file"):
        read_text("--text", str(pipe))
    assert pipe.is_fifo()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
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


def test_json_that_is_wrong_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text('"a\tb"')
    with pytest.raises(OptionError, match="Invalid control character at line 1, column 3"):
        read_json("--tools", str(path))


def test_a_loop_of_links_is_a_typed_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OutputError, match="--out: cannot write"):
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


def test_places_that_cannot_be_written_are_found_before_the_work(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file", tmp_path, tmp_path / ("a" * 300)):
        with pytest.raises(OutputError, match="--out: cannot write") as caught:
            check_writable("--out", path)
        assert caught.value.target == "--out"


@pytest.mark.parametrize("kind", ["file", "stdin"])
def test_input_has_a_limit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "LIMIT_BYTES", 8)
    path = tmp_path / "text"
    for data, is_refused in ((b"12345678", False), ("1234567é".encode(), True)):
        path.write_bytes(data)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        name = "-" if kind == "stdin" else str(path)
        if is_refused:
            with pytest.raises(OptionError, match=f"--text: {name} is longer than 64 MiB"):
                read_text("--text", name)
        else:
            assert read_text("--text", name) == data.decode()


def test_stdin_is_as_strict_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), errors="replace"))
    with pytest.raises(OptionError, match=r"--text: - is not UTF-8 \(byte 1\)"):
        read_text("--text", "-")


async def test_a_turn_from_a_runaway_program_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_reader, "LIMIT_BYTES", 12)
    reader = PipeReader(io.StringIO('123456789012\n"""\n12345678901'))
    with pytest.raises(OptionError, match="stdin: a turn is longer"):
        await reader.read()
    reader = PipeReader(io.StringIO('12345678901\n"""\n12345\n67"""'))
    assert await reader.read() == "12345678901"
    with pytest.raises(OptionError, match="stdin: a turn is longer"):
        await reader.read()
