"""The demo model with drafts answers as it does without: the same tokens, log probabilities, texts
and ends, with every kind of request, whoever drafts and however much of it is right. A sample of
what `bench/check_speculation.py` does at full size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ninfer.contract.drafting import DraftSource
from ninfer.contract.generation import FinishReason
from tests.helpers.guided_rig import GuidedAnswer, GuidedModel, answers, load_guided_model
from tests.helpers.speculation_matrix import (
    KINDS,
    Matrix,
    Setting,
    Source,
    Tally,
    cases,
)

pytestmark = pytest.mark.no_cover

COPY = "Repeat after me: the red fox, the red hen, the red fox, the red hen, the red fox."
STORY = "Tell me a story about a little penguin who is afraid of deep water."
SETTINGS = {
    "one token": Setting(1, 6, shift=3, has_draft_model=True, num_cancelled=2),
    "five tokens": Setting(5, 8, shift=1, has_draft_model=True, num_cancelled=1),
    "seven tokens, no module": Setting(7, 3),
}
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def model() -> GuidedModel:
    return load_guided_model()


@pytest.fixture(scope="module")
def matrix(model: GuidedModel) -> Matrix:
    matrix = Matrix(model, cases(len(KINDS), NUM_TOKENS))
    asyncio.run(matrix.ask_plain())
    return matrix


def test_the_cases_are_what_they_say(matrix: Matrix) -> None:
    found = matrix.plain
    assert all(item.error is None for item in found)
    reasons = {item.finish.reason for item in found if item.finish is not None}
    assert reasons >= {
        FinishReason.STOP_STRING,
        FinishReason.OUTPUT_LIMIT,
        FinishReason.STOP_TOKEN,
    }
    assert any(item.calls for item in found)
    assert any(item.reasoning for item in found)
    assert sum(len(item.tokens) == NUM_TOKENS for item in found) >= 8


@pytest.mark.parametrize("name", SETTINGS)
async def test_drafts_change_nothing(matrix: Matrix, name: str) -> None:
    setting, tally = SETTINGS[name], Tally()
    await matrix.check(setting, range(len(KINDS) if setting.has_draft_model else 8), tally)
    assert tally.differing == []
    assert tally.num_cancelled == setting.num_cancelled
    right, wrong, partly = (
        tally.drafts[source] for source in (Source.RIGHT, Source.WRONG, Source.PARTLY)
    )
    assert right.accepted > 0
    assert wrong.rounds > wrong.accepted == 0
    assert 0 < partly.accepted < partly.drafted
    assert right.accepted / right.drafted > partly.accepted / partly.drafted
    if setting.has_draft_model:
        assert tally.drafts[Source.MTP].model.accepted > 0


async def test_paused_requests_go_on_with_drafts(model: GuidedModel) -> None:
    """Sampled and counted, in far too few pages, with Snapshots and with replays."""

    async def ask(num_pages: int, host_blocks: int, draft_tokens: int) -> list[GuidedAnswer]:
        async with model.engine(
            num_pages=num_pages,
            host_blocks=host_blocks,
            draft_tokens=draft_tokens,
            has_draft_model=draft_tokens > 0,
        ) as engine:
            asked = [
                await model.request(
                    "Hi " * 25,
                    temperature=0.7,
                    presence_penalty=-0.5,
                    seed=seed,
                    top_logprobs=1,
                    ignore_eos=True,
                    max_tokens=74,
                )
                for seed in range(4)
            ]
            found = await answers(engine, asked)
            assert (engine.metrics.num_pauses > 0) == (num_pages == 8)
            assert (engine.metrics.drafts.accepted_total > 0) == (draft_tokens > 0)
            return found

    alone = [item.tokens for item in await ask(64, 0, 0)]
    for host_blocks in (0, 64):
        assert [item.tokens for item in await ask(8, host_blocks, 5)] == alone


async def test_the_module_guesses_most_tokens_of_an_answer(model: GuidedModel) -> None:
    """As its card says: the first of a draft is right nine times of ten, others are seldom."""
    async with model.engine(draft_tokens=3, has_draft_model=True) as engine:
        requests = [
            await model.request(text, max_tokens=60) for text in (STORY, "What is a river?")
        ]
        found = await answers(engine, requests)
        drafts = engine.metrics.drafts.by_source[DraftSource.MODEL]
        assert engine.metrics.drafts.accepted_at[0] > 0.85 * drafts.rounds_total
        num_tokens = sum(len(item.tokens) for item in found)
        assert num_tokens > 1.7 * engine.metrics.decode_rows_total


async def test_penalties_count_drafts(model: GuidedModel) -> None:
    """Repetition is drafted best, and is what penalties are for: they keep their effect."""

    async def ask(draft_tokens: int) -> list[list[int]]:
        async with model.engine(
            draft_tokens=draft_tokens, has_draft_model=draft_tokens > 0
        ) as engine:
            asked = [
                await model.request(COPY, frequency_penalty=penalty, ignore_eos=True, max_tokens=40)
                for penalty in (-2.0, 2.0)
            ]
            found = token_ids(await answers(engine, asked))
            assert (engine.metrics.drafts.accepted_total > 0) == (draft_tokens > 0)
            return found

    without = await ask(0)
    assert await ask(6) == without
    distinct = [len(set(ids)) for ids in without]
    assert distinct[0] < distinct[1]


def token_ids(found: Sequence[GuidedAnswer]) -> list[list[int]]:
    return [item.token_ids for item in found]


async def test_penalties_count_what_rounds_accept(model: GuidedModel) -> None:
    """Greedy, asked to repeat a word: both signs of the penalty bite, and do the same with drafts.
    Servers have lost it there (vllm-project/vllm#18902)."""

    async def told(**engine_options: object) -> list[list[int]]:
        async with model.engine(**engine_options) as engine:  # type: ignore[arg-type]
            requests = [
                await model.request(
                    COPY, max_tokens=40, ignore_eos=True, temperature=0.0, frequency_penalty=penalty
                )
                for penalty in (2.0, 0.0, -2.0)
            ]
            found = await answers(engine, requests)
            return [item.token_ids for item in found]

    plain = await told()
    assert len(set(map(tuple, plain))) == 3
    assert await told(draft_tokens=7) == plain
    assert await told(draft_tokens=3, has_draft_model=True) == plain
