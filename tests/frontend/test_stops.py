"""Stop strings over characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer.frontend.stops import ROOT, StopMatch, StopMatcher


def test_first_stop_to_end_wins_and_the_longest_of_a_tie() -> None:
    matcher = StopMatcher(["bc", "abc", "abcde"])
    assert matcher.feed(ROOT, "xabcde", 0, 6)[1] == StopMatch("abc", 4)


def test_a_refuted_beginning_may_hide_another_stop() -> None:
    matcher = StopMatcher(["abab!", "ba?"])
    assert matcher.feed(ROOT, "aba?", 0, 4)[1] == StopMatch("ba?", 4)


def test_depth_counts_the_longest_possible_beginning() -> None:
    matcher = StopMatcher(["aab"])
    node, match = matcher.feed(ROOT, "xaaa", 0, 4)
    assert match is None
    assert matcher.depth(node) == 2


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5)


@given(STOPS, st.text("abc", max_size=14), st.integers(0, 14))
def test_matches_a_plain_search_however_the_text_is_cut(
    stops: list[str], text: str, cut: int
) -> None:
    matcher = StopMatcher(stops)
    middle = min(cut, len(text))
    node, match = matcher.feed(ROOT, text, 0, middle)
    if match is None:
        node, match = matcher.feed(node, text, middle, len(text))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if match is None:
        assert not ends
        held = max(n for n in range(5) if any(text.endswith(s[:n]) for s in stops if len(s) > n))
        assert matcher.depth(node) == held
    else:
        assert (match.end, -len(match.stop), match.stop) == min(ends)
