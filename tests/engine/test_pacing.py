from __future__ import annotations

import pytest

from ninfer.contract.cache import CHUNK_GRANULE
from ninfer.engine.pacing import PrefillPace


def test_without_a_target_there_is_no_limit() -> None:
    pace = PrefillPace(None)
    pace.note(1000, 5.0)
    assert pace.chunk_limit() is None


def test_first_chunk_beside_streams_is_the_shortest_that_measures() -> None:
    assert PrefillPace(0.2).chunk_limit() == CHUNK_GRANULE


def test_limit_is_what_fits_into_the_gap() -> None:
    pace = PrefillPace(0.2)
    pace.note(1000, 0.5)
    assert pace.chunk_limit() == 400
    assert pace.tokens_s == pytest.approx(2000.0)


def test_measure_follows_the_newest_chunks() -> None:
    pace = PrefillPace(0.2)
    pace.note(1000, 0.5)
    for _ in range(20):
        pace.note(1000, 1.0)
    limit = pace.chunk_limit()
    assert limit is not None
    assert 195 <= limit <= 205


def test_short_chunks_say_nothing() -> None:
    pace = PrefillPace(0.2)
    pace.note(CHUNK_GRANULE - 1, 9.0)
    assert pace.tokens_s is None
    pace.note(CHUNK_GRANULE, 0.1)
    assert pace.tokens_s == pytest.approx(CHUNK_GRANULE / 0.1)


def test_time_that_stands_still_gives_no_limit() -> None:
    pace = PrefillPace(0.2)
    pace.note(1000, 0.0)
    assert pace.chunk_limit() is None
    assert pace.tokens_s is None
