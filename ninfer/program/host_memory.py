"""How much memory this process may still take.

Linux: MemAvailable of /proc/meminfo, lowered by every control group (v1 or v2) the process is in.
Elsewhere: what sysconf says. Memory the kernel can take back at once (inactive file cache) counts
as free in a control group too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Where a version of control groups keeps its memory figures, below `sys/fs/cgroup`."""

    base: str
    limit: str
    usage: str
    reclaimable: str


_VERSION_1: Final = _GroupFiles(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_VERSION_2: Final = _GroupFiles("", "memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes, or None when the system does not say. `root` holds `proc` and `sys`."""
    free = _meminfo_bytes(root / "proc/meminfo")
    if free is None:
        free = _sysconf_bytes()
    figures = [*_group_bytes(root), *([] if free is None else [free])]
    return max(0, min(figures)) if figures else None


def _meminfo_bytes(path: Path) -> int | None:
    for line in _lines(path):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.removesuffix("kB")) * 1024
    return None


def _sysconf_bytes() -> int | None:
    """Free pages where the system counts them, else all of them."""
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if hasattr(os, "sysconf") and name in os.sysconf_names:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _group_bytes(root: Path) -> Iterator[int]:
    """What is left in each limited group from the process's own up to the root of the mount."""
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            files = _VERSION_1
        else:
            continue
        base = root / "sys/fs/cgroup" / files.base
        for group in _groups_of(base, PurePosixPath(path)):
            left = _left_bytes(group, files)
            if left is not None:
                yield left


def _groups_of(base: Path, path: PurePosixPath) -> Iterator[Path]:
    """A path the mount does not show (a container's, seen from inside) leaves the base alone."""
    parts = path.parts[1:]
    if ".." not in parts:
        for length in range(len(parts), 0, -1):
            yield base.joinpath(*parts[:length])
    yield base


def _left_bytes(group: Path, files: _GroupFiles) -> int | None:
    limit = _number(_lines(group / files.limit))
    usage = _number(_lines(group / files.usage))
    if limit is None or usage is None:
        return None
    stat = [line.split() for line in _lines(group / "memory.stat")]
    reclaimable = sum(int(words[1]) for words in stat if words[0] == files.reclaimable)
    return limit - usage + min(reclaimable, usage)


def _number(lines: list[str]) -> int | None:
    """None for a missing file and for `max`."""
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    """Empty when the file is not there or not ours to read."""
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
