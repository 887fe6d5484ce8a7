"""NgramDrafter: copies of what came next, in bounded memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ninfer.engine.speculation.ngram import SIZES, NgramDrafter


def drafter_of(token_ids: list[int], max_places: int = 1000) -> NgramDrafter:
    drafter = NgramDrafter(max_places)
    drafter.extend(token_ids)
    return drafter


def plain_draft(token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    """By looking through the whole text."""
    for size in SIZES:
        end = token_ids[-size:]
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == end:
                text = token_ids[start + size :]
                return tuple(text[index % len(text)] for index in range(num_tokens))
    return ()


def test_what_followed_the_same_words_is_drafted() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    assert drafter.draft(3).token_ids == (4, 5, 6)
    assert drafter.draft(0).token_ids == ()


def test_a_new_end_drafts_nothing() -> None:
    assert drafter_of([1, 2, 3, 4]).draft(4).token_ids == ()
    assert drafter_of([]).draft(4).token_ids == ()
    assert drafter_of([1, 1]).draft(4).token_ids == ()


def test_longer_agreement_wins_over_newer() -> None:
    drafter = drafter_of([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4])
    assert drafter.draft(1).token_ids == (50,)


def test_a_repetition_is_drafted_to_full_length() -> None:
    assert drafter_of([7, 8, 7, 8, 7, 8]).draft(5).token_ids == (7, 8, 7, 8, 7)
    assert drafter_of([5, 5, 5]).draft(4).token_ids == (5, 5, 5, 5)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8), st.integers(1, 20))
def test_it_finds_what_a_search_finds(tokens: list[int], num_tokens: int, cut: int) -> None:
    drafter = drafter_of(tokens[:cut])
    for token_id in tokens[cut:]:
        drafter.extend([token_id])
    assert drafter.draft(num_tokens).token_ids == plain_draft(tokens, num_tokens)


def test_memory_is_bounded_and_the_newest_is_kept() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50_000) for _ in range(5000)]
    drafter = drafter_of(text, max_places=100)
    for token_id in text[:300]:
        drafter.extend([token_id])
    drafter.extend(text[4:300])
    assert all(len(places) <= 100 for places in drafter._places.values())
    assert len(drafter._tokens) <= 200
    drafter.extend([*text[250:254]])
    assert drafter.draft(3).token_ids == tuple(text[254:257])
    drafter.extend([*text[10:14]])
    assert drafter.draft(3).token_ids == ()
