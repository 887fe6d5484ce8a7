"""Two hundred clients of all protocols against eight lanes: every answer is right, nothing is left.

NINFER_LOAD_SECONDS is how long they go on. Nightly, with latencies on stdout:

    NINFER_LOAD_SECONDS=600 python -m pytest -s -n 0 tests/e2e/test_load.py
"""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Final

import pytest

from bench.common.load_clients import Report, right_answers, run_crowd
from bench.common.load_protocols import PROTOCOLS
from ninfer.contract.generation import EngineHealth
from ninfer.options import EngineOptions
from tests.helpers.gateway_rig import until
from tests.helpers.served_model import RunningServer, served_demo_model

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the test."""

NUM_CLIENTS: Final = 200
MAX_PENDING: Final = 170
"""Fewer than the clients, so that some are turned away."""
SECONDS: Final = float(os.environ.get("NINFER_LOAD_SECONDS", "16"))
OUTER_LIMIT_S: Final = 3600.0 + SECONDS
LEAKED_BYTES: Final = 16 * 2**20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def wait_until_idle(server: RunningServer) -> None:
    await until(lambda: not server.engine.status().outstanding, OUTER_LIMIT_S)
    await until(lambda: not server.gateway.counters.exchanges_active, OUTER_LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(OUTER_LIMIT_S)
async def test_every_request_ends_once_with_the_answer_it_has_alone() -> None:
    options = EngineOptions(
        max_concurrency=8,
        max_context=512,
        max_pending=MAX_PENDING,
        queue_timeout=OUTER_LIMIT_S,
        host_cache_bytes=0,
    )
    async with served_demo_model(options) as server:
        answers = await right_answers(server.url)
        await wait_until_idle(server)
        num_tasks, descriptors = len(asyncio.all_tasks()), num_descriptors()

        await run_crowd(server.url, NUM_CLIENTS // 4, SECONDS / 4, answers, Report())
        await wait_until_idle(server)
        warm_bytes = resident_bytes()

        report = Report()
        await run_crowd(server.url, NUM_CLIENTS, SECONDS * 3 / 4, answers, report, seed=1000)
        await wait_until_idle(server)

        print("\n" + "\n".join(report.lines()))
        kinds = ("stream", "whole", "slow", "leave", "vanish", "malformed", "half", "overloaded")
        assert all(report.outcomes[kind] > 0 for kind in kinds), report.outcomes
        assert set(report.total_s) == set(PROTOCOLS)
        await check_nothing_is_left(server)
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        await until(lambda: num_descriptors() <= descriptors)
        assert resident_bytes() - warm_bytes < LEAKED_BYTES


async def check_nothing_is_left(server: RunningServer) -> None:
    status = server.engine.status()
    assert (status.waiting, status.running, status.outstanding) == (0, 0, 0)
    assert status.health is EngineHealth.READY
    server.engine.flush_cache()
    await until(lambda: server.model.program.occupancy().pages_used == 0)
    server.model.program.check()
    occupancy = server.model.program.occupancy()
    assert (occupancy.lanes_used, occupancy.pages_used, occupancy.slots_used) == (0, 0, 0)
