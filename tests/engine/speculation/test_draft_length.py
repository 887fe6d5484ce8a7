"""DraftLength: long drafts for those that guess well, few for those that do not."""

from __future__ import annotations

import random

import pytest

from ninfer.engine.speculation.draft_length import PROBE_ROUNDS, DraftLength


def lengths(length: DraftLength, share: float, num_rounds: int, num_rows: int = 1) -> list[int]:
    """Drafts of a text in which so large a share of guesses is right."""
    rng, drafted = random.Random(3), []
    for _ in range(num_rounds):
        size = length.next(num_rows)
        drafted.append(size)
        right = 0
        while right < size and rng.random() < share:
            right += 1
        length.note(size, right)
    return drafted


@pytest.mark.parametrize("max_tokens", [1, 3, 8])
def test_right_guesses_lead_to_full_length(max_tokens: int) -> None:
    drafted = lengths(DraftLength(max_tokens), 1.0, 30)
    assert set(drafted[10:]) == {max_tokens}
    assert max(drafted) == max_tokens


def test_wrong_guesses_lead_to_a_token_now_and_then() -> None:
    drafted = lengths(DraftLength(8), 0.0, 100)[-4 * PROBE_ROUNDS :]
    assert max(drafted) == 1
    assert sum(drafted) == 4


def test_a_row_comes_back() -> None:
    length = DraftLength(8)
    lengths(length, 0.0, 60)
    assert lengths(length, 1.0, 300)[-1] == 8


def test_a_full_batch_drafts_less() -> None:
    alone, together = DraftLength(8), DraftLength(8)
    few = sum(lengths(alone, 0.6, 200))
    assert sum(lengths(together, 0.6, 200, num_rows=8)) < few / 2


def test_guesses_behind_a_wrong_one_do_not_count() -> None:
    one, many = DraftLength(8), DraftLength(8)
    one.note(2, 1)
    many.note(8, 1)
    assert one.rate == many.rate
