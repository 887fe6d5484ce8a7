"""DeviceWatch: waiting for what is queued, and remembering that a device has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from ninfer.contract.errors import DeviceError
from ninfer.program.executors.cuda_driver import CudaDriver

LONGEST_UNIT_S: Final = 180.0
"""A unit that the device has not ended by then will never end."""


class DeviceWatch:
    """`is_stuck`: the device has not ended a unit, so that giving memory back would wait for
    ever."""

    def __init__(self, driver: CudaDriver, longest_unit_s: float) -> None:
        self._driver = driver
        self._longest_unit_s = longest_unit_s
        self._failure: DeviceError | None = None
        self._is_closed = False
        self.is_stuck = False

    async def passed(self, place: int = 0) -> None:
        """Poll until all up to the mark has run, with a turn of the loop between two looks. Raises
        DeviceError when that takes too long."""
        latest_s = monotonic() + self._longest_unit_s
        while not self._driver.has_passed(place):
            if monotonic() > latest_s:
                self.is_stuck = True
                raise DeviceError(
                    f"cuda: the device has not ended a unit in {self._longest_unit_s:g} s"
                )
            await asyncio.sleep(0)

    @contextmanager
    def using(self, what: str) -> Iterator[None]:
        """Remember a failure of the device; leave nothing queued when the unit is cut off. Raises
        DeviceError at once after a failure and after `close`."""
        if self._is_closed:
            raise DeviceError(f"cuda executor: {what} after close")
        if self._failure is not None:
            raise DeviceError(f"cuda executor: {what} after a failure: {self._failure}")
        try:
            self._driver.activate()
            yield
        except DeviceError as error:
            self._failure = error
            raise
        except asyncio.CancelledError:
            self._driver.synchronize()
            raise

    def close(self) -> None:
        self._is_closed = True
