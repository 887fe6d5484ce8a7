"""A browser for all tests, a tab for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.helpers.chromium import Tab, open_tab, running_chromium
from tests.helpers.gateway_rig import PATIENT_LIMITS, Rig, running_gateway


@pytest.fixture(scope="session")
def devtools_url() -> Iterator[str]:
    with running_chromium() as url:
        yield url


@pytest.fixture
async def tab(devtools_url: str) -> AsyncIterator[Tab]:
    """A page that complained to its console fails the test; one that expects it clears the list."""
    async with open_tab(devtools_url) as tab:
        yield tab
        assert tab.complaints == []


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway whose engine plays scripts."""
    async with running_gateway(limits=PATIENT_LIMITS) as rig:
        yield rig
