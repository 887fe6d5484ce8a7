"""Compilers in processes of their own: results, errors, and processes that die."""

from __future__ import annotations

import os

import pytest

from ninfer.contract.errors import DeviceError
from ninfer.kernels.compile_pool import compile_all
from ninfer.kernels.compiler import CompiledKernel
from ninfer.kernels.sources import KernelSource

TASKS = [(KernelSource(f"kernel{index}", "", ()), "sm_80") for index in range(7)]


def echo(source: KernelSource, architecture: str) -> CompiledKernel:
    return CompiledKernel(f"{source.name} {architecture}".encode(), ())


def die(source: KernelSource, architecture: str) -> CompiledKernel:
    os._exit(9)


def fail(source: KernelSource, architecture: str) -> CompiledKernel:
    raise DeviceError("no compiler")


@pytest.mark.parametrize("jobs", [1, 3, 20])
def test_every_task_comes_back_once(jobs: int) -> None:
    results = dict(compile_all(TASKS, jobs, echo))
    assert {index: kernel.cubin for index, kernel in results.items()} == {
        index: f"kernel{index} sm_80".encode() for index in range(7)
    }


def test_nothing_to_do_starts_nothing() -> None:
    assert list(compile_all([], 4, echo)) == []


def test_an_error_of_a_compiler_is_raised_here() -> None:
    with pytest.raises(DeviceError, match="no compiler"):
        list(compile_all(TASKS, 2, fail))


def test_a_compiler_that_dies_is_named_with_its_task() -> None:
    with pytest.raises(DeviceError, match=r"kernel\d for sm_80 ended by itself \(exit code 9\)"):
        list(compile_all(TASKS, 2, die))
