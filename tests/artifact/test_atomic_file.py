from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.artifact.atomic_file import atomic_file
from ninfer.contract.errors import OutputError


def test_a_finished_file_takes_its_place_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def write_half(path: Path, error: BaseException) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_file_system_refuses_is_a_typed_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "out", tmp_path):
        with (
            pytest.raises(OutputError, match="cannot write") as caught,
            atomic_file(path) as file,
        ):
            file.write(b"x")
        assert caught.value.target == path
    assert list(tmp_path.iterdir()) == []


def test_permissions_follow_the_umask_as_for_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with atomic_file(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
