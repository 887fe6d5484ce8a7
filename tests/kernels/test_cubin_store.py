"""Compiled kernels on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.kernels.compiler import CompiledKernel, EntryUsage
from ninfer.kernels.cubin_store import CubinStore, default_cache_dir

KERNEL = CompiledKernel(b"\x7fELF" + bytes(range(256)), (EntryUsage("sum", 40, 8, 4, 12),))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = CubinStore(tmp_path / "deep" / "folder")
    path = store.save("sum", "sm_90a", "0123", KERNEL)
    assert path.is_file()
    assert store.load("sum", "sm_90a", "0123") == KERNEL
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "architecture", "key"),
    [("mul", "sm_90a", "0123"), ("sum", "sm_80", "0123"), ("sum", "sm_90a", "0124")],
)
def test_another_kernel_architecture_or_key_is_not_found(
    tmp_path: Path, name: str, architecture: str, key: str
) -> None:
    store = CubinStore(tmp_path)
    store.save("sum", "sm_90a", "0123", KERNEL)
    assert store.load(name, architecture, key) is None


@given(st.data())
def test_a_file_with_any_damage_counts_as_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = CubinStore(tmp_path_factory.mktemp("store"))
    path = store.save("sum", "sm_90a", "0123", KERNEL)
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="truncate"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1), label="length")])
    else:
        at = data.draw(st.integers(0, len(whole) - 1), label="byte")
        flipped = whole[at] ^ data.draw(st.integers(1, 255), label="bits")
        path.write_bytes(whole[:at] + bytes([flipped]) + whole[at + 1 :])
    assert store.load("sum", "sm_90a", "0123") is None


def test_saving_replaces_a_damaged_file(tmp_path: Path) -> None:
    store = CubinStore(tmp_path)
    store.path_of("sum", "sm_90a", "0123").write_bytes(b"junk")
    store.save("sum", "sm_90a", "0123", KERNEL)
    assert store.load("sum", "sm_90a", "0123") == KERNEL


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    store = CubinStore(tmp_path)
    store.path_of("sum", "sm_90a", "0123").mkdir()
    with pytest.raises(OSError, match="0123"):
        store.save("sum", "sm_90a", "0123", KERNEL)
    assert [item.is_dir() for item in tmp_path.iterdir()] == [True]


def test_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    given_dir = default_cache_dir({"XDG_CACHE_HOME": str(tmp_path)})
    assert given_dir == tmp_path / "ninfer" / "kernels"
    assert default_cache_dir({}) == Path.home() / ".cache" / "ninfer" / "kernels"
