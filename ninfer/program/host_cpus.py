"""How many processors this process may keep busy, and how many the CPU executor takes of them."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """At least 1: the process's affinity, lowered by its control group's quota (v1 or v2)."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _quota_cpus(root / "sys/fs/cgroup")
    return max(1, count if quota is None else min(count, int(quota)))


def default_threads(cpus: int) -> int:
    """One processor stays free for the event loop: a product whose threads share a processor with
    it waits for the slowest of them at every step (measured on two busy processors: 11 tokens/s
    with two threads, 117 with one)."""
    return max(1, cpus - 1)


def _quota_cpus(base: Path) -> float | None:
    """Processors' worth of time, or None without a limit."""
    words = _words(base / "cpu.max")
    if not words:
        words = _words(base / "cpu/cpu.cfs_quota_us") + _words(base / "cpu/cpu.cfs_period_us")
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
