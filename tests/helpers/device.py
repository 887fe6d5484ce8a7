"""The device of the tests marked gpu: CuPy and the kernels, or a skip with its reason."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ninfer.kernels.library import KernelLibrary


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """`cp` is CuPy; `stream` a stream of its own, current while a test runs."""

    cp: Any
    kernels: KernelLibrary
    stream: Any


def open_device(cache_dir: Path) -> Device:
    """Skips without a device, or fails when NINFER_REQUIRE_GPU=1 promises one."""
    reason = _missing()
    if reason is not None:
        if os.environ.get("NINFER_REQUIRE_GPU") == "1":
            pytest.fail(f"NINFER_REQUIRE_GPU=1, but {reason}")
        pytest.skip(reason)
    import cupy

    cupy.cuda.Device(0).use()
    kernels = KernelLibrary.open(cache_dir=cache_dir)
    return Device(cupy, kernels, cupy.cuda.Stream(non_blocking=True))


def _missing() -> str | None:
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device ({error})"
    return None if count else "no CUDA device"
