"""What clients are told of when to ask again."""

from __future__ import annotations

import pytest

from ninfer.contract.errors import Unavailable
from ninfer.contract.generation import Failed
from ninfer.engine.retry_estimate import until_ends_s
from tests.helpers.engine_rig import EngineRig, capacity, read, running_engine, spin


@pytest.mark.parametrize(
    ("ages_s", "mean_s", "num_ends", "expected"),
    [
        ([], None, 1, 1.0),
        ([], 40.0, 1, 1.0),
        ([0.0], None, 1, 1.0),
        ([24.0], None, 1, 24.0),
        ([24.0], 2.0, 1, 24.0),
        ([10.0], 40.0, 1, 30.0),
        ([0.0] * 4, 40.0, 1, 10.0),
        ([0.0] * 4, 40.0, 3, 30.0),
        ([24.0, 24.0], None, 1, 12.0),
        ([900.0] * 4, None, 1, 60.0),
    ],
)
def test_estimate(
    ages_s: list[float], mean_s: float | None, num_ends: int, expected: float
) -> None:
    assert until_ends_s(ages_s, mean_s, num_ends) == pytest.approx(expected)


def refused_for_s(rig: EngineRig) -> float | None:
    with pytest.raises(Unavailable) as caught:
        rig.engine.submit(rig.request())
    assert caught.value.code == "server_overloaded"
    return caught.value.retry_after_s


async def test_a_busy_lane_of_a_fresh_engine_is_not_free_at_once() -> None:
    async with running_engine(capacity(lanes=1), max_pending=1, queue_timeout_s=100.0) as rig:
        gate = rig.close_gate()
        handles = [rig.engine.submit(rig.request()) for _ in range(2)]
        await spin()
        assert refused_for_s(rig) == 1.0
        rig.clock.advance(24.0)
        assert refused_for_s(rig) == 24.0
        rig.clock.advance(66.0)
        assert refused_for_s(rig) == 10.0, "the one that waits gives up before"
        gate.open()
        for handle in handles:
            await read(handle)


async def test_who_waited_in_vain_stands_behind_the_others() -> None:
    async with running_engine(capacity(lanes=1), queue_timeout_s=100.0) as rig:
        gate = rig.close_gate()
        running = rig.engine.submit(rig.request(max_tokens=9))
        short = rig.engine.submit(rig.request(queue_timeout_s=5.0))
        others = [rig.engine.submit(rig.request()) for _ in range(2)]
        await spin()
        rig.clock.advance(6.0)
        gate.step()
        end = (await read(short)).terminal
        assert isinstance(end, Failed)
        assert isinstance(end.error, Unavailable)
        assert end.error.retry_after_s == pytest.approx(18.0)
        gate.open()
        for handle in (running, *others):
            await read(handle)
