"""Processors of the process, from files made for the purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ninfer.program.host_cpus import default_threads, usable_cpus


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
        ("100000 0", 8),
    ],
)
def test_a_quota_of_version_two_lowers_the_count(tmp_path: Path, quota: str, cpus: int) -> None:
    write(tmp_path / "sys/fs/cgroup/cpu.max", quota + "\n")
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("-1", 8)])
def test_a_quota_of_version_one_lowers_the_count(tmp_path: Path, quota: str, cpus: int) -> None:
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota + "\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cpus(tmp_path) == cpus


@pytest.mark.usefixtures("eight_cpus")
def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 8


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 2), (64, 63)])
def test_one_processor_is_left_to_the_event_loop(cpus: int, threads: int) -> None:
    assert default_threads(cpus) == threads
