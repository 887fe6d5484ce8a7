"""Who fills a mask: the loop what is quick, threads what was slow or is new."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from ninfer.contract.errors import NInferError
from ninfer.contract.units import SampleRow
from ninfer.program.executors.cuda_masks import QUICK_S, MaskFiller
from tests.helpers import executor_driver as driver


class WatchedMask:
    """Writes its number; notes which thread asked, and takes its time."""

    is_active = True

    def __init__(self, number: int, seconds: float = 0.0) -> None:
        self.number = number
        self.seconds = seconds
        self.threads: list[bool] = []
        self.order: list[int] = []

    def fill(self, words: np.typing.NDArray[np.uint32]) -> None:
        self.threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(self.seconds)
        words[:] = self.number

    def forced(self) -> tuple[int, ...]:
        return ()

    def failure(self) -> NInferError:
        raise AssertionError


def rows(*masks: WatchedMask | None) -> list[SampleRow]:
    return [dataclasses.replace(driver.sample_row(1), mask=mask) for mask in masks]


@pytest.fixture(name="words")
def _words() -> np.typing.NDArray[np.uint32]:
    return np.zeros((6, 4), np.uint32)


async def test_quick_masks_are_filled_where_they_are_asked_for(
    words: np.typing.NDArray[np.uint32],
) -> None:
    filler, mask = MaskFiller(words), WatchedMask(7)
    try:
        for _ in range(200):
            await filler.fill(rows(None, mask))
        assert mask.threads[0] is False, "nothing is known yet"
        assert mask.threads.count(True) > 100
        assert words[1].tolist() == [7] * 4
        assert not words[0].any()
    finally:
        filler.close()


async def test_a_slow_mask_sends_all_to_threads_for_a_while(
    words: np.typing.NDArray[np.uint32],
) -> None:
    filler, quick = MaskFiller(words), WatchedMask(1)
    try:
        for _ in range(200):
            await filler.fill(rows(quick))
        assert quick.threads.count(True) > 100
        await filler.fill(rows(WatchedMask(2, seconds=20 * QUICK_S)), is_new=True)
        await filler.fill(rows(quick))
        assert quick.threads[-1] is False
        quick.threads.clear()
        for _ in range(300):
            await filler.fill(rows(quick))
        assert quick.threads.count(True) > 100
    finally:
        filler.close()


async def test_new_masks_and_many_masks_go_to_threads(
    words: np.typing.NDArray[np.uint32],
) -> None:
    filler = MaskFiller(words)
    masks = [WatchedMask(number, seconds=0.4 * QUICK_S) for number in range(1, 7)]
    try:
        for _ in range(200):
            await filler.fill(rows(WatchedMask(9)))
        await filler.fill(rows(masks[0]), is_new=True)
        assert masks[0].threads == [False]
        await filler.fill(rows(*masks))
        assert [mask.threads[-1] for mask in masks] == [False] * 6, "together they are not quick"
        assert words[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    finally:
        filler.close()


async def test_masks_of_one_request_are_filled_in_order_by_one_thread(
    words: np.typing.NDArray[np.uint32],
) -> None:
    order: list[tuple[int, int]] = []

    class Ordered(WatchedMask):
        def fill(self, words: np.typing.NDArray[np.uint32]) -> None:
            time.sleep(1e-4)
            order.append((threading.get_ident(), self.number))
            super().fill(words)

    filler = MaskFiller(words)
    masks = [Ordered(number) for number in range(6)]
    try:
        await filler.fill(rows(*masks), 3, is_new=True)
    finally:
        filler.close()
    for request in (masks[:3], masks[3:]):
        numbers = {mask.number for mask in request}
        own = [item for item in order if item[1] in numbers]
        assert [number for _, number in own] == sorted(numbers)
        assert len({thread for thread, _ in own}) == 1
