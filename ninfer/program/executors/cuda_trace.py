"""TracedLibrary: a KernelLibrary whose functions report each launch and else do what they did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ninfer.kernels.library import KernelFunction, KernelLibrary
from ninfer.kernels.sources import KERNELS_DIR


class TracedLibrary(KernelLibrary):
    """`on_launch(family)` is called behind every launch.

    is_serial   every kernel waits for the one ahead of it to end
    """

    def __init__(
        self, inner: KernelLibrary, on_launch: Callable[[str], None], *, is_serial: bool = False
    ) -> None:
        self._inner = inner
        self._on_launch = on_launch
        self._is_serial = is_serial
        self.limits = inner.limits

    def function(self, name: str, entry: str, *, directory: Path = KERNELS_DIR) -> KernelFunction:
        inner = self._inner.function(name, entry, directory=directory)
        return _TracedFunction(inner, name, self._on_launch, is_serial=self._is_serial)


class _TracedFunction(KernelFunction):
    def __init__(
        self,
        inner: KernelFunction,
        family: str,
        on_launch: Callable[[str], None],
        *,
        is_serial: bool,
    ) -> None:
        self._inner = inner
        self._family = family
        self._on_launch = on_launch
        self._is_serial = is_serial
        self.entry = inner.entry

    def reserve_shared(self, shared_bytes: int) -> None:
        self._inner.reserve_shared(shared_bytes)

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        return self._inner.resident_blocks(threads, shared_bytes)

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
        self._inner.launch(
            grid,
            block,
            arguments,
            stream=stream,
            shared_bytes=shared_bytes,
            programmatic=programmatic and not self._is_serial,
        )
        self._on_launch(self._family)
