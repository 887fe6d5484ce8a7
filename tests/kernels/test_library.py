"""KernelLibrary over a stand-in driver: where cubins come from, and what a launch asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.kernels.build import build_cubins
from ninfer.kernels.compiler import KernelCompileError
from ninfer.kernels.cubin_store import CubinStore
from ninfer.kernels.library import KernelLibrary
from tests.helpers.fake_driver import H200, FakeDriver, Status

SOURCE = 'extern "C" __global__ void one(const long long x) { }\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cu").write_text(SOURCE)
    return folder


def make_library(driver: FakeDriver, cache: Path, built: Path | None = None) -> KernelLibrary:
    return KernelLibrary(
        cast(Any, driver),
        H200,
        cache=CubinStore(cache),
        built=None if built is None else CubinStore(built),
    )


def make_driver() -> FakeDriver:
    return FakeDriver(frozenset({"one"}))


def test_a_kernel_is_compiled_once_and_then_comes_from_the_cache(
    sources: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first, second = make_driver(), make_driver()
    make_library(first, cache).function("one", "one", directory=sources)
    (path,) = cache.iterdir()
    stamp = path.stat().st_mtime_ns
    make_library(second, cache).function("one", "one", directory=sources)
    assert first.modules == second.modules
    assert [(item, item.stat().st_mtime_ns) for item in cache.iterdir()] == [(path, stamp)]


def test_a_damaged_cache_entry_is_compiled_again(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = make_driver(), make_driver()
    make_library(first, cache).function("one", "one", directory=sources)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    make_library(second, cache).function("one", "one", directory=sources)
    assert second.modules == first.modules
    assert path.read_bytes() == whole


def test_an_edited_source_is_compiled_anew(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    make_library(make_driver(), cache).function("one", "one", directory=sources)
    (sources / "one.cu").write_text(SOURCE.replace("{ }", "{ __syncthreads(); }"))
    make_library(make_driver(), cache).function("one", "one", directory=sources)
    assert len(list(cache.iterdir())) == 2


def test_precompiled_cubins_come_first(sources: Path, tmp_path: Path) -> None:
    (cubin,) = build_cubins(["sm_90a"], tmp_path / "built", directory=sources)
    driver, cache = make_driver(), tmp_path / "cache"
    make_library(driver, cache, tmp_path / "built").function("one", "one", directory=sources)
    assert not cache.exists()
    found = CubinStore(tmp_path / "built").load("one", "sm_90a", cubin.path.stem.split("-")[-1])
    assert found is not None
    assert driver.modules == [found.cubin]


def test_stale_precompiled_cubins_are_passed_over(sources: Path, tmp_path: Path) -> None:
    build_cubins(["sm_90a"], tmp_path / "built", directory=sources)
    (sources / "one.cu").write_text(SOURCE + "// edited\n")
    cache = tmp_path / "cache"
    library = make_library(make_driver(), cache, tmp_path / "built")
    library.function("one", "one", directory=sources)
    assert len(list(cache.iterdir())) == 1


def test_a_module_is_loaded_once(sources: Path, tmp_path: Path) -> None:
    driver = make_driver()
    library = make_library(driver, tmp_path)
    function = library.function("one", "one", directory=sources)
    assert library.function("one", "one", directory=sources) is function
    assert len(driver.modules) == 1


def test_an_unknown_entry_or_family_is_named(sources: Path, tmp_path: Path) -> None:
    library = make_library(make_driver(), tmp_path)
    with pytest.raises(InvariantError, match="one has no entry two"):
        library.function("one", "two", directory=sources)
    with pytest.raises(InvariantError, match=r"three\.cu"):
        library.function("three", "three", directory=sources)


def test_a_source_that_does_not_compile_is_an_error_and_leaves_no_file(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "one.cu").write_text("nonsense")
    cache = tmp_path / "cache"
    with pytest.raises(KernelCompileError, match="one"):
        make_library(make_driver(), cache).function("one", "one", directory=sources)
    assert not cache.exists()


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_launch_passes_shape_stream_and_the_struct(
    sources: Path, tmp_path: Path, programmatic: bool
) -> None:
    driver = make_driver()
    function = make_library(driver, tmp_path).function("one", "one", directory=sources)
    arguments = np.zeros((), np.dtype([("x", "<i8")]))
    arguments["x"] = -5
    function.launch(
        (7, 2, 1), (64, 1, 1), arguments, stream=99, shared_bytes=1024, programmatic=programmatic
    )
    (launch,) = driver.launches
    assert (launch.entry, launch.grid, launch.block) == ("one", (7, 2, 1), (64, 1, 1))
    assert (launch.shared_bytes, launch.stream) == (1024, 99)
    assert launch.is_programmatic is programmatic
    assert np.frombuffer(launch.arguments, "<i8")[0] == -5


def test_shared_memory_and_occupancy_go_to_the_driver(sources: Path, tmp_path: Path) -> None:
    driver = make_driver()
    function = make_library(driver, tmp_path).function("one", "one", directory=sources)
    function.reserve_shared(200_000)
    assert driver.shared_bytes == {"one": 200_000}
    assert function.resident_blocks(128, 200_000) == 2


def test_a_driver_error_is_a_device_error_with_its_name(sources: Path, tmp_path: Path) -> None:
    driver = make_driver()
    driver.launch_result = Status.CUDA_ERROR_LAUNCH_FAILED
    function = make_library(driver, tmp_path).function("one", "one", directory=sources)
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        function.launch((1, 1, 1), (1, 1, 1), np.zeros((), np.dtype([("x", "<i8")])), stream=0)
