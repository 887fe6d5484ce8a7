"""Tokens a second over a sliding window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer.engine.token_rate import WINDOW_S, TokenRate


def test_a_rate_is_the_mean_of_whole_seconds_and_falls_to_zero() -> None:
    rate = TokenRate()
    assert rate.per_second(100.0) == 0
    rate.note(30, 100.2)
    rate.note(20, 100.9)
    assert rate.per_second(100.95) == 0, "the second is not over"
    assert rate.per_second(101.0) == 50 / WINDOW_S
    assert rate.per_second(100.0 + WINDOW_S) == 50 / WINDOW_S
    assert rate.per_second(101.0 + WINDOW_S) == 0
    rate.note(1, 101.0 + WINDOW_S)
    assert rate.per_second(102.0 + WINDOW_S) == 1 / WINDOW_S, "old seconds are forgotten"


@given(st.lists(st.tuples(st.integers(1, 99), st.floats(0, 25)), max_size=50), st.floats(0, 30))
def test_it_counts_just_what_lies_in_the_window(
    steps: list[tuple[int, float]], wait_s: float
) -> None:
    rate, noted, now = TokenRate(), [], 0.0
    for count, pause_s in steps:
        now += pause_s
        rate.note(count, now)
        noted.append((count, int(now)))
    end = int(now + wait_s)
    inside = sum(count for count, second in noted if end - WINDOW_S <= second < end)
    assert rate.per_second(now + wait_s) == inside / WINDOW_S
