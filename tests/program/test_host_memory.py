"""available_bytes over made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer.program.host_memory import available_bytes

MIB = 2**20
MEMINFO = "MemTotal:        2048000 kB\nMemFree:          102400 kB\nMemAvailable:    1024000 kB\n"
FREE = 1_024_000 * 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def version_2(root: Path, group: str, limit: str, usage: int, inactive_file: int = 0) -> None:
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{usage}\n")
    write(root, f"{folder}/memory.stat", f"anon 5\nfile 9\ninactive_file {inactive_file}\n")


def version_1(root: Path, group: str, limit: int, usage: int, inactive_file: int = 0) -> None:
    folder = f"sys/fs/cgroup/memory/{group}"
    write(root, f"{folder}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"{folder}/memory.usage_in_bytes", f"{usage}\n")
    write(root, f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_without_control_groups_it_is_what_meminfo_says(root: Path) -> None:
    assert available_bytes(root) == FREE


def test_a_version_2_limit_counts_less_its_use(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    version_2(root, "app", str(300 * MIB), 100 * MIB, inactive_file=30 * MIB)
    assert available_bytes(root) == 230 * MIB


def test_the_tightest_ancestor_wins(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/slice/app\n")
    version_2(root, "slice/app", str(500 * MIB), 0)
    version_2(root, "slice", str(400 * MIB), 350 * MIB)
    assert available_bytes(root) == 50 * MIB


def test_an_unlimited_group_takes_nothing_away(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    version_2(root, "app", "max", 100 * MIB)
    assert available_bytes(root) == FREE


def test_a_version_1_limit_counts_less_its_use(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box/app\n0::/\n")
    version_1(root, "box/app", 2**63 - 4096, 90 * MIB)
    version_1(root, "box", 200 * MIB, 90 * MIB, inactive_file=10 * MIB)
    assert available_bytes(root) == 120 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../../other"])
def test_a_path_outside_the_mount_means_the_mount_itself(root: Path, path: str) -> None:
    write(root, "proc/self/cgroup", f"4:memory:{path}\n")
    version_1(root, "", 64 * MIB, 14 * MIB)
    assert available_bytes(root) == 50 * MIB


def test_a_group_over_its_limit_has_nothing_left(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    version_2(root, "app", str(10 * MIB), 11 * MIB)
    assert available_bytes(root) == 0


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    """sysconf's own figure moves; it is bytes, not pages or kilobytes."""
    found = available_bytes(tmp_path)
    assert found is not None
    assert 16 * MIB < found < 2**50


def test_here_and_now_it_is_a_plausible_figure() -> None:
    found = available_bytes()
    assert found is not None
    assert 16 * MIB < found < 2**50
