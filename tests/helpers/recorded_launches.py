"""Launches without a device: arrays that are only shapes and addresses, and a library that records.

What a launch would have queued (entry, grid, parameters) is there to look at; nothing runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ninfer.kernels.library import DeviceLimits, KernelLibrary
from ninfer.kernels.sources import KERNELS_DIR, read_source

H200 = DeviceLimits("H200", "sm_90a", 132, 232448, 233472)


@dataclass(frozen=True, slots=True)
class ShapeOnly:
    """An array nobody may touch. strides in bytes, None for contiguous."""

    shape: tuple[int, ...]
    dtype: str = "uint16"
    address: int = 1 << 20
    strides: tuple[int, ...] | None = None

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        return {
            "shape": self.shape, "typestr": np.dtype(self.dtype).str,
            "data": (self.address, False), "strides": self.strides, "version": 3,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    family: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: NDArray[np.void]
    options: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name].item()


@dataclass(slots=True)
class _Function:
    library: RecordingLibrary
    family: str
    entry: str

    def reserve_shared(self, shared_bytes: int) -> None:
        if shared_bytes > self.library.limits.shared_bytes_per_block:
            raise AssertionError(f"{self.entry} asks for {shared_bytes} bytes")

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        by_shared = self.library.limits.shared_bytes_per_multiprocessor // (shared_bytes + 1024)
        return min(2048 // threads, by_shared)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: NDArray[np.void],
        **options: Any,
    ) -> None:
        launch = Launch(self.family, self.entry, grid, block, arguments.copy(), options)
        self.library.launches.append(launch)


@dataclass(slots=True)
class RecordingLibrary:
    limits: DeviceLimits = H200
    launches: list[Launch] = field(default_factory=list)

    def function(self, name: str, entry: str, *, directory: Path = KERNELS_DIR) -> _Function:
        """Fails for an entry that the .cu file does not write out."""
        text = read_source(directory / f"{name}.cu").text
        assert re.search(rf"\b{entry}\(", text), f"{name}.cu has no entry {entry}"
        return _Function(self, name, entry)

    @property
    def library(self) -> KernelLibrary:
        return cast(KernelLibrary, self)

    def only(self) -> Launch:
        (launch,) = self.launches
        return launch


def struct_bytes(family: str, struct: str) -> int:
    """The size that the .cu file or a header of it asserts for a parameter struct."""
    source = read_source(KERNELS_DIR / f"{family}.cu")
    text = "\n".join([source.text, *(header for _, header in source.headers)])
    found = re.search(rf"static_assert\(sizeof\({struct}\) == (\d+)", text)
    assert found is not None, f"{family}.cu asserts no size of {struct}"
    return int(found[1])
