"""Nothing in the gateway may block the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.helpers.blocking import no_blocking_calls
from tests.helpers.gateway_rig import PATIENT_LIMITS, Rig, running_gateway


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    with no_blocking_calls("ninfer"):
        yield


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_gateway(limits=PATIENT_LIMITS) as rig:
        yield rig
