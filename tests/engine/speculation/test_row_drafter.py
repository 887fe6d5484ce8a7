"""RowDrafter: the better of two sources, judged by what came, drafted or not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.engine.speculation.drafter import NO_GUESS
from ninfer.engine.speculation.row_drafter import (
    AGREEMENTS,
    PROBE_ROUNDS,
    CommonRates,
    RowDrafter,
)
from tests.helpers.scripted_session import ScriptedSession

RNG = random.Random(5)
FRESH = [RNG.randrange(1000, 100_000) for _ in range(4000)]
"""A text that repeats nothing."""


def drafter_of(
    prompt: list[int], max_tokens: int = 4, common: CommonRates | None = None
) -> RowDrafter:
    request = GenerationRequest(
        request_id="r",
        prompt=PreparedPrompt(np.array(prompt, np.int32)),
        sampling=SamplingParams(),
        session=ScriptedSession(),
        max_tokens=1000,
    )
    return RowDrafter(request, max_tokens, common)


def answer(
    drafter: RowDrafter, text: list[int], num_right: int, room: int = 4
) -> list[tuple[DraftSource, float]]:
    """A plain step for each token of `text`, with a proposal whose first tokens are right; the
    sources of the guesses and what they were thought to be worth."""
    seen = []
    for place in range(1, len(text) - room):
        coming = text[place : place + room]
        proposal = (*coming[:num_right], *(0 for _ in coming[num_right:]))
        guess = drafter.guess(text[:place], proposal, room)
        seen.append((guess.source, sum(guess.worths)))
    return seen


def test_the_text_and_the_room_are_followed() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    guess = drafter.guess([4], (), 3)
    assert (guess.token_ids, guess.source) == ((5, 6, 7), DraftSource.NGRAM)
    assert drafter.guess([4, 5], (), 0) is NO_GUESS
    assert drafter.guess([4, 5], (), 9).token_ids == (6, 7, 8, 9)
    assert drafter.guess([4, 5, 77], (), 4) is NO_GUESS


def test_worths_fall_from_place_to_place() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    worths = drafter.guess([], (), 4).worths
    assert len(worths) == 4
    assert 1.0 > worths[0] > worths[1] > worths[2] > worths[3] > 0.0


def test_long_agreement_is_trusted_more() -> None:
    text = FRESH[:60]
    found = [
        sum(drafter_of([*text, 7, *text[20 : 20 + size]]).guess([], (), 4).worths)
        for size in range(2, 20)
    ]
    assert found == sorted(found)
    assert found[-1] > 5 * found[0]
    assert len(set(found)) == len(AGREEMENTS)


def test_the_better_source_drafts() -> None:
    copied = drafter_of(FRESH[:60])
    assert copied.guess(FRESH[:30], (1, 2, 3, 4), 4).source is DraftSource.NGRAM
    barely = drafter_of([1, 2, 3, 9, 9, 8])
    assert barely.guess([1, 2], (5, 6), 4).source is DraftSource.MODEL
    assert barely.guess([1, 2], (5, 6), 4).token_ids == (5, 6)


def test_a_source_is_judged_while_it_does_not_draft() -> None:
    """Plain steps look at the first place of each proposal, and the others follow."""
    good, bad = drafter_of([1]), drafter_of([1])
    right = answer(good, FRESH[:80], 4)
    wrong = answer(bad, FRESH[:80], 0)
    assert right[0] == wrong[0]
    assert right[-1][1] > 2.0 > 0.2 > wrong[-1][1]


def test_guesses_behind_a_wrong_one_do_not_count() -> None:
    short, long = drafter_of([1], 8), drafter_of([1], 8)
    for proposal, drafter in (((5,), short), ((5, 6, 7, 8, 9, 1, 2, 3), long)):
        drafter.guess([], proposal, 8)
        drafter.guess([9, 6, 7, 8, 9, 1, 2, 3], (), 8)
    assert short.hope(8) == long.hope(8)


def test_places_that_are_right_less_often_are_worth_less() -> None:
    drafter = drafter_of([1])
    text = FRESH[:400]
    for place in range(1, 390, 2):
        coming = text[place : place + 4]
        drafter.guess(text[:place], (coming[0], 0, 0, 0), 4)
    first, second, *_ = drafter.hope(4).worths
    assert first > 0.9
    assert second < 0.2


def test_a_row_that_copies_asks_for_no_proposals() -> None:
    drafter = drafter_of(FRESH[:60])
    assert drafter.guess(FRESH[:30], (), 4).source is DraftSource.NGRAM
    assert drafter.hope(4).worths == ()
    drafter.guess([*FRESH[:30], 7], (), 4)
    assert len(drafter.hope(4).worths) == 4
    assert len(drafter.hope(2).worths) == 2
    assert drafter.hope(-1).worths == ()


@pytest.mark.parametrize("num_rounds", [PROBE_ROUNDS - 1, PROBE_ROUNDS, PROBE_ROUNDS + 3])
def test_proposals_are_probed_when_there_were_none_for_long(num_rounds: int) -> None:
    drafter = drafter_of([1])
    for place in range(num_rounds):
        drafter.guess(FRESH[:place], (), 4)
    assert drafter.hope(4).is_probe == (num_rounds >= PROBE_ROUNDS)
    drafter.guess(FRESH[:num_rounds], (3,), 4)
    assert not drafter.hope(4).is_probe


def test_requests_begin_with_what_those_before_them_learned() -> None:
    common = CommonRates()
    first = drafter_of([1], common=common).hope(4)
    assert drafter_of([1]).hope(4) == first
    for start in range(0, 1000, 100):
        answer(drafter_of([1], common=common), FRESH[start : start + 100], 1)
    worths = drafter_of([1], common=common).hope(4).worths
    assert worths[0] > first.worths[0]
    assert drafter_of([1]).hope(4) == first


def test_one_request_changes_little_for_others() -> None:
    common = CommonRates()
    bad = drafter_of([1], common=common)
    answer(bad, FRESH[:20], 0)
    (own, *_), (others, *_) = bad.hope(4).worths, drafter_of([1], common=common).hope(4).worths
    assert own < 0.2 < 0.4 < others
