"""KernelLibrary: compiled kernels of one device, handed out by entry name and launched.

    cubin_dir (precompiled) -> cache_dir (compiled here before) -> NVRTC -> cache_dir
      -> module in the device's context -> KernelFunction -> launch on a stream

It uses the CUDA driver through its Python bindings, imported when a library is opened. Streams
and addresses are plain integers, so arrays of any owner fit. Owns modules, never memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.kernels.compiler import CompiledKernel, compile_source, compiler_version
from ninfer.kernels.cubin_store import CubinStore, default_cache_dir
from ninfer.kernels.packages import missing_package
from ninfer.kernels.sources import KERNELS_DIR, read_source

_ARCHITECTURE_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What kernels are planned by.

    shared_bytes_per_block            most dynamic shared memory a block may ask for
    shared_bytes_per_multiprocessor   what the resident blocks share; each takes 1 KiB more
    """

    name: str
    architecture: str
    num_multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int


class KernelFunction:
    """One entry of a loaded module."""

    def __init__(self, driver: ModuleType, entry: str, handle: Any) -> None:
        self._driver = driver
        self._handle = handle
        self.entry = entry

    def reserve_shared(self, shared_bytes: int) -> None:
        """Allow launches with up to so much dynamic shared memory."""
        attribute = (
            self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        )
        _checked(
            self._driver, self._driver.cuFuncSetAttribute(self._handle, attribute, shared_bytes)
        )

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        """How many blocks of this shape fit on one multiprocessor."""
        count = _checked(
            self._driver,
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._handle, threads, shared_bytes
            ),
        )
        return int(count)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: NDArray[np.void],
        *,
        stream: int,
        shared_bytes: int = 0,
        programmatic: bool = False,
    ) -> None:
        """Queue the kernel on `stream`; returns before it has run.

        arguments      the entry's one parameter, a struct [] passed by value; copied before return
        programmatic   may start before the kernel ahead of it in the stream has ended: only for
                       entries that call wait_for_previous_kernel
        """
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(stream)
        attributes = [_programmatic_attribute(driver)] if programmatic else []
        config.attrs = attributes
        config.numAttrs = len(attributes)
        pointers = np.array([arguments.ctypes.data], dtype=np.uint64)
        _checked(
            driver, driver.cuLaunchKernelEx(config, self._handle, int(pointers.ctypes.data), 0)
        )


class KernelLibrary:
    """The kernels of the current device; one a process and device. Not thread-safe."""

    def __init__(
        self,
        driver: ModuleType,
        limits: DeviceLimits,
        *,
        cache: CubinStore,
        built: CubinStore | None,
    ) -> None:
        self._driver = driver
        self._cache = cache
        self._built = built
        self._modules: dict[Path, Any] = {}
        self._functions: dict[tuple[Path, str], KernelFunction] = {}
        self.limits = limits

    @classmethod
    def open(
        cls,
        *,
        cache_dir: Path | None = None,
        cubin_dir: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> KernelLibrary:
        """The library of the calling thread's device (its first one by default).

        Raises DeviceError when there is no driver or no device.
        """
        driver = _driver()
        device = _current_device(driver)
        cache = CubinStore(cache_dir or default_cache_dir(dict(environ)))
        built = CubinStore(cubin_dir) if cubin_dir is not None else None
        return cls(driver, _limits(driver, device), cache=cache, built=built)

    def function(self, name: str, entry: str, *, directory: Path = KERNELS_DIR) -> KernelFunction:
        """Entry `entry` of family `name`; compiles and loads it on first use.

        Raises KernelCompileError, DeviceError, or InvariantError for an unknown entry.
        """
        path = directory / f"{name}.cu"
        key = (path, entry)
        if key not in self._functions:
            self._functions[key] = self._load_function(path, entry)
        return self._functions[key]

    def _load_function(self, path: Path, entry: str) -> KernelFunction:
        if path not in self._modules:
            cubin = self._cubin(path).cubin
            self._modules[path] = _checked(self._driver, self._driver.cuModuleLoadData(cubin))
        status, handle = self._driver.cuModuleGetFunction(self._modules[path], entry.encode())
        if status == self._driver.CUresult.CUDA_ERROR_NOT_FOUND:
            raise InvariantError(f"kernel family {path.stem} has no entry {entry}")
        _checked(self._driver, (status, handle))
        return KernelFunction(self._driver, entry, handle)

    def _cubin(self, path: Path) -> CompiledKernel:
        source = read_source(path)
        architecture = self.limits.architecture
        if self._built is not None:
            built = self._built.load(source.name, architecture, source.digest(architecture))
            if built is not None:
                return built
        key = source.digest(architecture, compiler_version(), str(self._driver_version()))
        kernel = self._cache.load(source.name, architecture, key)
        if kernel is None:
            kernel = compile_source(source, architecture)
            self._cache.save(source.name, architecture, key, kernel)
        return kernel

    def _driver_version(self) -> int:
        return int(_checked(self._driver, self._driver.cuDriverGetVersion()))


def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise missing_package("the CUDA driver's", error) from error
    module: ModuleType = driver
    try:
        _checked(module, module.cuInit(0))
    except RuntimeError as error:
        raise DeviceError(f"no CUDA driver ({error})") from error
    return module


def _current_device(driver: ModuleType) -> Any:
    """The device of the thread's context; without one, device 0's primary context becomes it."""
    context = _checked(driver, driver.cuCtxGetCurrent())
    if int(context) == 0:
        device = _checked(driver, driver.cuDeviceGet(0))
        context = _checked(driver, driver.cuDevicePrimaryCtxRetain(device))
        _checked(driver, driver.cuCtxSetCurrent(context))
    return _checked(driver, driver.cuCtxGetDevice())


def _limits(driver: ModuleType, device: Any) -> DeviceLimits:
    names = driver.CUdevice_attribute

    def read(attribute: Any) -> int:
        return int(_checked(driver, driver.cuDeviceGetAttribute(attribute, device)))

    capability = (
        read(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        read(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    )
    return DeviceLimits(
        name=_checked(driver, driver.cuDeviceGetName(256, device)).split(b"\0")[0].decode(),
        architecture=_ARCHITECTURE_SPECIFIC.get(capability, "sm_{}{}".format(*capability)),
        num_multiprocessors=read(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        shared_bytes_per_block=read(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        shared_bytes_per_multiprocessor=read(
            names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        ),
    )


def _programmatic_attribute(driver: ModuleType) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _checked(driver: ModuleType, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
