"""Compile every kernel family for a list of architectures, in parallel processes, without a device.

What it writes is what KernelLibrary's `cubin_dir` reads, so that an image needs no compiler.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ninfer.contract.errors import OptionError
from ninfer.kernels.compiler import EntryUsage, compile_source
from ninfer.kernels.cubin_store import CubinStore
from ninfer.kernels.sources import KERNELS_DIR, kernel_names, read_source

ARCHITECTURES: Final = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_120a")
"""What every kernel must compile for."""


@dataclass(frozen=True, slots=True)
class BuiltCubin:
    name: str
    architecture: str
    path: Path
    usage: tuple[EntryUsage, ...]


def build_cubins(
    architectures: Sequence[str],
    out_dir: Path,
    *,
    jobs: int | None = None,
    directory: Path = KERNELS_DIR,
) -> tuple[BuiltCubin, ...]:
    """Build what `out_dir` does not hold yet; every family times every architecture comes back.

    Raises OptionError for an unknown architecture, KernelCompileError for the first kernel that
    fails.
    """
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise OptionError(
                "--arch", f"{architecture!r} is not one of {', '.join(ARCHITECTURES)}"
            )
    tasks = [
        (directory, name, arch, out_dir)
        for arch in architectures
        for name in kernel_names(directory)
    ]
    return tuple(_run(tasks, jobs or os.cpu_count() or 1))


def _run(tasks: Sequence[tuple[Path, str, str, Path]], jobs: int) -> Iterator[BuiltCubin]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=max(1, min(jobs, len(tasks))), mp_context=context) as pool:
        yield from pool.map(_build_one, *zip(*tasks, strict=True))


def _build_one(directory: Path, name: str, architecture: str, out_dir: Path) -> BuiltCubin:
    source = read_source(directory / f"{name}.cu")
    key = source.digest(architecture)
    store = CubinStore(out_dir)
    kernel = store.load(name, architecture, key)
    if kernel is None:
        kernel = compile_source(source, architecture)
        store.save(name, architecture, key, kernel)
    path = store.path_of(name, architecture, key)
    return BuiltCubin(name, architecture, path, kernel.usage)
