"""NVRTC: a kernel source and an architecture to a cubin and what each entry of it uses.

Needs no device. The compiler's library is imported on the first call, never with this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.kernels.packages import missing_package
from ninfer.kernels.sources import OPTIONS, KernelSource

_ENTRY: Final = re.compile(r"Compiling entry function '([^']+)'")
_MEMORY: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS: Final = re.compile(r"Used (\d+) registers")


class KernelCompileError(InvariantError):
    """A kernel does not compile; `log` is the compiler's."""

    def __init__(self, source: str, architecture: str, log: str) -> None:
        super().__init__(f"kernel {source} does not compile for {architecture}: {log.strip()}")
        self.source = source
        self.architecture = architecture
        self.log = log

    def __reduce__(self) -> tuple[type[KernelCompileError], tuple[str, str, str]]:
        """Crosses process borders whole: kernels are built in a pool."""
        return type(self), (self.source, self.architecture, self.log)


@dataclass(frozen=True, slots=True)
class EntryUsage:
    """What ptxas reports for one entry; bytes are per thread."""

    entry: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def is_spilling(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    cubin: bytes
    usage: tuple[EntryUsage, ...]


def compiler_version() -> str:
    """Such as `12.9`. Raises DeviceError when there is no usable compiler."""
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def compile_source(source: KernelSource, architecture: str) -> CompiledKernel:
    """Compile for `architecture` (`sm_90a`). Raises KernelCompileError with the compiler's log."""
    compiled = _compile(source, architecture)
    if compiled.usage:
        return compiled
    # From 12.9 on a driver's cache may answer for the compiler, and then nothing is reported.
    compiled = _compile(source, architecture, b"--no-cache")
    if not compiled.usage:
        raise InvariantError(f"the compiler did not report what {source.name} uses")
    return compiled


def _compile(source: KernelSource, architecture: str, *more_options: bytes) -> CompiledKernel:
    nvrtc = _nvrtc()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            source.text.encode(), f"{source.name}.cu".encode(), len(names), texts, names
        ),
    )
    try:
        options = [f"-arch={architecture}".encode(), *_encoded_options(), *more_options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelCompileError(source.name, architecture, text)
        cubin = _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return CompiledKernel(cubin, parse_usage(text))


def parse_usage(log: str) -> tuple[EntryUsage, ...]:
    """Read ptxas' verbose report. Raises InvariantError when an entry's figures are missing."""
    usage: list[EntryUsage] = []
    for part in re.split(r"(?=Compiling entry function)", log):
        entry = _ENTRY.search(part)
        if entry is None:
            continue
        memory, registers = _MEMORY.search(part), _REGISTERS.search(part)
        if memory is None or registers is None:
            raise InvariantError(f"the compiler did not report what {entry[1]} uses")
        stack, stores, loads = (int(group) for group in memory.groups())
        usage.append(EntryUsage(entry[1], int(registers[1]), stack, stores, loads))
    return tuple(usage)


def _encoded_options() -> list[bytes]:
    options = [option.encode() for option in OPTIONS]
    try:
        from cuda import pathfinder
    except ImportError as error:
        raise missing_package("the CUDA headers'", error) from error
    toolkit = pathfinder.find_nvidia_header_directory("cudart")
    return options if toolkit is None else [*options, f"-I{toolkit}".encode()]


def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise missing_package("the CUDA compiler's", error) from error
    module: ModuleType = nvrtc
    return module


def _read(nvrtc: ModuleType, size_of: Any, read: Any, program: Any) -> bytes:
    buffer = bytes(int(_checked(nvrtc, size_of(program))))
    _checked(nvrtc, read(program, buffer))
    return buffer


def _checked(nvrtc: ModuleType, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"the CUDA compiler failed: {status}")
    return values[0] if len(values) == 1 else tuple(values)
