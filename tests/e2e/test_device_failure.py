"""A device that fails or hangs under a running server: everybody is told, nobody waits."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.ops.device_sampling import MAX_TOP
from ninfer.options import EngineOptions
from ninfer.program import cuda_loader
from ninfer.program.executors import cuda_device
from ninfer.program.executors.cuda import CudaExecutor
from tests.helpers.cuda_models import require_device
from tests.helpers.fake_cuda import FakeCuda, Launch
from tests.helpers.lost_device import FailureReport, lose_device

OPTIONS = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=2,
    max_context=1024,
    memory_budget=512 << 20,
    host_cache_bytes=2 << 20,
)


class TalkingCuda(FakeCuda):
    """A device that always chooses the same token."""

    def __init__(self) -> None:
        super().__init__()
        self.on_replay = self._repeat_results

    def queue(self, item: Any) -> None:
        super().queue(item)
        if self._capture is None and isinstance(item, Launch) and item.family == "sampling":
            results = np.zeros(3 + 2 * MAX_TOP, np.int32)
            results[:2] = (300, 1)
            self.write_results(results)

    def _repeat_results(self, graph: list[Any]) -> None:
        self.queued.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> TalkingCuda:
    """In place of the machine's own."""
    talking = TalkingCuda()
    monkeypatch.setattr(cuda_device, "unusable_reason", lambda _index=0: None)
    monkeypatch.setattr(cuda_loader, "open_device", lambda _options: talking)
    return talking


def check(report: FailureReport, reason: str) -> None:
    assert report.streamed >= 5
    assert "engine_unavailable" in report.last_event
    assert report.request_status == 503
    assert "engine has stopped" in report.request_error
    assert (report.health_status, report.health) == (503, "unavailable")
    assert reason in report.reason


async def test_a_lost_device_is_told_to_everybody(device: TalkingCuda) -> None:
    def fail(_server: object) -> None:
        device.fails_at = device.num_queued + 3

    check(await lose_device(OPTIONS, fail), "illegal memory access")
    assert device.is_closed


async def test_a_unit_that_never_ends_is_a_lost_device(
    device: TalkingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_loader, "CudaExecutor", partial(CudaExecutor, longest_unit_s=0.2))

    def hang(_server: object) -> None:
        device.polls = 1 << 40

    check(await lose_device(OPTIONS, hang), "the device has not ended a unit in 0.2 s")
    assert not device.is_closed, "giving memory back would wait for the device"


@pytest.mark.gpu
def test_an_illegal_access_on_the_device_is_told_to_everybody() -> None:
    """In a process of its own: its context is lost for good."""
    require_device()
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.lost_device"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(FailureReport(**json.loads(done.stdout)), "illegal")
