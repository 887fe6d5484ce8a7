"""Compile every kernel family for a list of architectures, in parallel processes, without a device.

What it writes is what KernelLibrary's `cubin_dir` reads, so that an image needs no compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ninfer.contract.errors import OptionError
from ninfer.kernels.compile_pool import compile_all
from ninfer.kernels.compiler import CompiledKernel, EntryUsage
from ninfer.kernels.cubin_store import CubinStore
from ninfer.kernels.sources import KERNELS_DIR, kernel_names, read_source

ARCHITECTURES: Final = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_120a")
"""What every kernel must compile for."""
BuildProgress: TypeAlias = Callable[[str, int, int], None]


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
    progress: BuildProgress = lambda _name, _done, _total: None,
) -> tuple[BuiltCubin, ...]:
    """Build what `out_dir` does not hold yet; every family times every architecture comes back.

    `progress(kernel and architecture, done, total)` is called for each one that was compiled.
    Interrupted, it leaves whole files only. Raises OptionError for an unknown architecture,
    KernelCompileError for the first kernel that fails and OSError where nothing can be written.
    """
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise OptionError(
                "--arch", f"{architecture!r} is not one of {', '.join(ARCHITECTURES)}"
            )
    store = CubinStore(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    sources = [read_source(directory / f"{name}.cu") for name in kernel_names(directory)]
    pairs = [(source, architecture) for architecture in architectures for source in sources]
    keys = [source.digest(architecture) for source, architecture in pairs]
    kernels: dict[int, CompiledKernel] = {}
    for index, (source, architecture) in enumerate(pairs):
        kernel = store.load(source.name, architecture, keys[index])
        if kernel is not None:
            kernels[index] = kernel
    missing = [index for index in range(len(pairs)) if index not in kernels]
    tasks = [pairs[index] for index in missing]
    with closing(compile_all(tasks, jobs or os.cpu_count() or 1)) as compiled:
        for done, (task, kernel) in enumerate(compiled, start=1):
            name, architecture = tasks[task][0].name, tasks[task][1]
            store.save(name, architecture, keys[missing[task]], kernel)
            kernels[missing[task]] = kernel
            progress(f"{name} {architecture}", done, len(tasks))
    return tuple(
        BuiltCubin(
            source.name,
            architecture,
            store.path_of(source.name, architecture, keys[index]),
            kernels[index].usage,
        )
        for index, (source, architecture) in enumerate(pairs)
    )
