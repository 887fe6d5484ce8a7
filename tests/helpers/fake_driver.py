"""A stand-in for cuda.bindings.driver: remembers modules and launches, runs nothing."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from ninfer.kernels.library import DeviceLimits

H200 = DeviceLimits("fake H200", "sm_90a", 132, 232448, 233472)
ORIN = DeviceLimits("fake Orin", "sm_87", 16, 166912, 167936)


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_LAUNCH_FAILED = 719


@dataclass(slots=True)
class Launch:
    """What one cuLaunchKernelEx was given; `arguments` is the struct's first bytes."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    is_programmatic: bool
    arguments: bytes


@dataclass(slots=True)
class FakeDriver:
    """`entries` are the functions every module has; `argument_bytes` how much of them is kept."""

    entries: frozenset[str]
    argument_bytes: int = 8
    launch_result: Status = Status.CUDA_SUCCESS
    modules: list[bytes] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    shared_bytes: dict[str, int] = field(default_factory=dict)
    resident: int = 2
    CUresult: type[Status] = Status
    CUlaunchConfig: type[SimpleNamespace] = SimpleNamespace
    CUfunction_attribute: Any = field(
        default_factory=lambda: SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"
        )
    )
    CUlaunchAttributeID: Any = field(
        default_factory=lambda: SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="programmatic"
        )
    )

    def cuDriverGetVersion(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, 13000

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Status, int]:
        self.modules.append(cubin)
        return Status.CUDA_SUCCESS, len(self.modules)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Status, str]:
        if name.decode() not in self.entries:
            return Status.CUDA_ERROR_NOT_FOUND, ""
        return Status.CUDA_SUCCESS, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Status]:
        assert attribute == "shared"
        self.shared_bytes[function] = value
        return (Status.CUDA_SUCCESS,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: str, threads: int, shared_bytes: int
    ) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.resident

    def CUstream(self, address: int) -> int:
        return address

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(id=None, value=SimpleNamespace())

    def cuLaunchKernelEx(
        self, config: Any, function: str, parameters: int, extra: int
    ) -> tuple[Status]:
        (address,) = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_uint64 * 1)).contents
        ids = [attribute.id for attribute in config.attrs]
        assert config.numAttrs == len(ids)
        self.launches.append(
            Launch(
                function,
                (config.gridDimX, config.gridDimY, config.gridDimZ),
                (config.blockDimX, config.blockDimY, config.blockDimZ),
                config.sharedMemBytes,
                config.hStream,
                ids == ["programmatic"],
                ctypes.string_at(address, self.argument_bytes),
            )
        )
        return (self.launch_result,)
