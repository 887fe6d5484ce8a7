"""What belongs to a kernel source, and when its digest changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.contract.errors import InvariantError
from ninfer.kernels.sources import kernel_names, read_source


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    include = tmp_path / "include"
    include.mkdir()
    (tmp_path / "sum.cu").write_text('#include "outer.cuh"\n  # include <cuda_bf16.h>\n// code\n')
    (include / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    (include / "inner.cuh").write_text('#pragma once\n#include "outer.cuh"\nint inner;\n')
    (include / "unused.cuh").write_text("int unused;\n")
    return tmp_path


def digest(tree: Path, *toolchain: str, architecture: str = "sm_90a") -> str:
    source = read_source(tree / "sum.cu", tree / "include")
    return source.digest(architecture, *toolchain)


def test_headers_are_found_through_headers_and_each_once(tree: Path) -> None:
    source = read_source(tree / "sum.cu", tree / "include")
    assert sorted(name for name, _ in source.headers) == ["inner.cuh", "outer.cuh"]


@pytest.mark.parametrize("edited", ["sum.cu", "include/outer.cuh", "include/inner.cuh"])
def test_editing_anything_the_compiler_reads_changes_the_digest(tree: Path, edited: str) -> None:
    before = digest(tree)
    path = tree / edited
    path.write_text(path.read_text() + "// edited\n")
    assert digest(tree) != before


def test_an_unrelated_header_changes_nothing(tree: Path) -> None:
    before = digest(tree)
    (tree / "include" / "unused.cuh").write_text("int other;\n")
    assert digest(tree) == before


def test_architecture_and_toolchain_count(tree: Path) -> None:
    digests = {
        digest(tree),
        digest(tree, architecture="sm_80"),
        digest(tree, "12.9"),
        digest(tree, "13.0"),
        digest(tree, "12.9", "13000"),
    }
    assert len(digests) == 5


def test_text_moved_between_files_is_not_the_same_source(tree: Path) -> None:
    before = digest(tree)
    inner, outer = tree / "include" / "inner.cuh", tree / "include" / "outer.cuh"
    moved = "int inner;\n"
    inner.write_text(inner.read_text().replace(moved, ""))
    outer.write_text(outer.read_text() + moved)
    assert digest(tree) != before


def test_a_missing_source_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match=r"absent\.cu"):
        read_source(tmp_path / "absent.cu")


def test_every_family_is_listed() -> None:
    assert {"linear_pack", "linear_small_t"} <= set(kernel_names())
