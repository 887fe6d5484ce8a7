"""NVRTC without a device: usage figures, errors, and that a spill is seen."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.kernels import compiler
from ninfer.kernels.compiler import (
    CompiledKernel,
    KernelCompileError,
    compile_source,
    compiler_version,
    parse_usage,
)
from ninfer.kernels.sources import KernelSource

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(float* x) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 64; ++j) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum += a[i] * a[(i * 7 + j) % 64];
    x[(j + 64) * 1024 + threadIdx.x] = sum;
  }
}
"""
MODEST = 'extern "C" __global__ void modest(float* x) { x[threadIdx.x] += scale(); }\n'


def test_a_spilling_kernel_is_seen_as_such() -> None:
    usage = compile_source(KernelSource("spilling", SPILLING, ()), "sm_90a").usage
    assert [entry.entry for entry in usage] == ["spilling"]
    assert usage[0].is_spilling
    assert usage[0].spill_store_bytes > 0
    assert usage[0].registers == 64


def test_headers_are_compiled_from_memory() -> None:
    text = '#include "scale.cuh"\n' + MODEST
    header = ("scale.cuh", "__device__ float scale() { return 2.f; }\n")
    kernel = compile_source(KernelSource("modest", text, (header,)), "sm_80")
    assert kernel.cubin.startswith(b"\x7fELF")
    assert not kernel.usage[0].is_spilling


def test_an_error_names_kernel_and_architecture_and_carries_the_log() -> None:
    with pytest.raises(KernelCompileError, match="modest does not compile for sm_80") as caught:
        compile_source(KernelSource("modest", MODEST, ()), "sm_80")
    assert "scale" in caught.value.log


@pytest.mark.parametrize("name", ["cuda.bindings", "cuda"])
def test_an_install_without_the_compiler_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "cuda.bindings.nvrtc", raising=False)
    with pytest.raises(DeviceError, match=r'pip install -e "\.\[cuda12\]"'):
        compile_source(KernelSource("modest", MODEST, ()), "sm_80")


def test_an_unknown_architecture_is_a_compile_error() -> None:
    with pytest.raises(KernelCompileError, match="sm_1"):
        compile_source(KernelSource("modest", MODEST, ()), "sm_1")


def test_usage_of_several_entries() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, 356 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 1 barriers, 356 bytes cmem[0]
"""
    first, second = parse_usage(log)
    assert (first.registers, first.stack_bytes) == (32, 16)
    assert (first.spill_store_bytes, first.spill_load_bytes) == (4, 8)
    assert first.is_spilling
    assert (second.entry, second.registers, second.is_spilling) == ("second", 8, False)


def test_a_report_without_figures_is_not_taken_for_no_spills() -> None:
    with pytest.raises(InvariantError, match="first"):
        parse_usage("ptxas info    : Compiling entry function 'first' for 'sm_80'\n")


def test_the_compiler_has_a_version() -> None:
    major, minor = compiler_version().split(".")
    assert int(major) >= 12
    assert int(minor) >= 0


@pytest.mark.parametrize("is_cached_for_good", [False, True])
def test_what_a_cache_answers_without_a_report_is_compiled(
    is_cached_for_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_once = compiler._compile

    def compile_cached(
        source: KernelSource, architecture: str, *more_options: bytes
    ) -> CompiledKernel:
        compiled = compile_once(source, architecture, *more_options)
        is_cached = is_cached_for_good or b"--no-cache" not in more_options
        return dataclasses.replace(compiled, usage=()) if is_cached else compiled

    monkeypatch.setattr(compiler, "_compile", compile_cached)
    source = KernelSource("spilling", SPILLING, ())
    if is_cached_for_good:
        with pytest.raises(InvariantError, match="did not report what spilling uses"):
            compile_source(source, "sm_90a")
    else:
        assert compile_source(source, "sm_90a").usage[0].is_spilling
