"""Every kernel compiles for every architecture without a device, and none spills."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from ninfer.contract.errors import OptionError
from ninfer.kernels.build import ARCHITECTURES, BuiltCubin, build_cubins
from ninfer.kernels.compiler import KernelCompileError, compiler_version
from ninfer.kernels.cubin_store import CubinStore
from ninfer.kernels.sources import KERNELS_DIR, kernel_names, read_source

# One fixture compiles everything, which takes minutes on two processors.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

KEPT: Final = "NINFER_TEST_CUBINS"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuiltCubin, ...]:
    """Compiled now, or found in the folder that NINFER_TEST_CUBINS names.

    There they are kept by compiler and by the digest of all that it reads and is told.
    """
    folder = os.environ.get(KEPT)
    if folder is None:
        return build_cubins(ARCHITECTURES, tmp_path_factory.mktemp("cubins"))
    return build_cubins(ARCHITECTURES, Path(folder) / compiler_version())


def test_every_kernel_is_built_for_every_architecture(built: tuple[BuiltCubin, ...]) -> None:
    pairs = {(cubin.name, cubin.architecture) for cubin in built}
    assert pairs == {(name, arch) for name in kernel_names() for arch in ARCHITECTURES}
    assert all(cubin.path.is_file() and cubin.usage for cubin in built)


def test_no_entry_spills_registers(built: tuple[BuiltCubin, ...]) -> None:
    spilling = [
        (cubin.architecture, entry) for cubin in built for entry in cubin.usage if entry.is_spilling
    ]
    assert spilling == []


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "one.cu").write_text('extern "C" __global__ void one(int* x) { *x = 1; }\n')
    out = tmp_path / "out"
    (first,) = build_cubins(["sm_80"], out, directory=tmp_path)
    stamp = first.path.stat().st_mtime_ns
    (again,) = build_cubins(["sm_80"], out, directory=tmp_path)
    assert again == first
    assert again.path.stat().st_mtime_ns == stamp
    (tmp_path / "one.cu").write_text('extern "C" __global__ void one(int* x) { *x = 2; }\n')
    (edited,) = build_cubins(["sm_80"], out, directory=tmp_path)
    assert edited.path != first.path


def test_built_files_are_found_by_the_digest_of_the_sources(
    built: tuple[BuiltCubin, ...],
) -> None:
    cubin = next(item for item in built if item.name == "linear_pack")
    source = read_source(KERNELS_DIR / f"{cubin.name}.cu")
    store = CubinStore(cubin.path.parent)
    found = store.load(cubin.name, cubin.architecture, source.digest(cubin.architecture))
    assert found is not None
    assert found.usage == cubin.usage


def test_a_kernel_that_does_not_compile_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void bad() { undefined(); }\n')
    with pytest.raises(KernelCompileError, match="undefined"):
        build_cubins(["sm_80"], tmp_path / "out", directory=tmp_path)


def test_an_unknown_architecture_is_an_option_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="sm_61"):
        build_cubins(["sm_61"], tmp_path)
