"""Nothing in the engine may block the loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.blocking import no_blocking_calls


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> Iterator[None]:
    with no_blocking_calls("ninfer"):
        yield
