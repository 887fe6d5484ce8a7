"""The demo model with drafts answers as it does without: the same tokens, log probabilities, texts
and ends, with every setting, whoever drafts and however much of it is right."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.generation import FinishReason, GenerationRequest
from tests.helpers.guided_rig import (
    GuidedAnswer,
    GuidedModel,
    answers,
    constraint,
    load_guided_model,
)
from tests.helpers.oracle_drafter import oracles

pytestmark = pytest.mark.no_cover

VOCAB_SIZE = 4096
STORY = "Tell me a story about a little penguin who is afraid of deep water."
COPY = "Repeat after me: the red fox, the red hen, the red fox, the red hen, the red fox."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOLS = ({"type": "function", "function": {"name": "get_weather", "parameters": PERSON}},)


@dataclass(frozen=True)
class Case:
    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False
    declares: tuple[Any, ...] = ()


CASES = {
    "greedy": Case(STORY, {"top_logprobs": 2}),
    "sampled": Case(STORY, {"temperature": 1.0, "top_p": 0.9}),
    "counted": Case(
        COPY,
        {
            "temperature": 0.8,
            "min_p": 0.05,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.4,
            "repetition_penalty": 1.1,
            "top_logprobs": 3,
        },
    ),
    "never ends": Case("Hi", {"ignore_eos": True, "max_tokens": 70}),
    "cut": Case(STORY, {"temperature": 1.0, "max_tokens": 23}),
    "stop string": Case(STORY, {"stop": ("was very", "afraid of"), "ignore_eos": True}),
    "long enough": Case("Is the sky blue?", {"min_tokens": 30, "top_k": 50, "temperature": 1.2}),
    "bound": Case(
        "Who are you?", {"constraint": constraint("json_schema", PERSON), "temperature": 1.1}
    ),
    "thought": Case("What is 12 + 35?", {"thinking_budget": 12, "temperature": 0.7}, thinks=True),
    "bound thought": Case(
        "What is 9 + 8?",
        {"constraint": constraint("regex", "[a-z]{2,6} [0-9]+"), "thinking_budget": 9},
        thinks=True,
    ),
    "call": Case(
        "What is the weather in Rome?",
        {"tools": ToolRules(tools=(ToolSpec("get_weather", PERSON, is_strict=True),))},
        declares=TOOLS,
    ),
}


@pytest.fixture(scope="module")
def model() -> GuidedModel:
    return load_guided_model()


async def requests(model: GuidedModel) -> list[GenerationRequest]:
    """One a case; the seed tells which."""
    return [
        await model.request(
            case.text,
            thinks=case.thinks,
            declares=case.declares,
            **{"seed": index, "max_tokens": 50, **case.fields},
        )
        for index, case in enumerate(CASES.values())
    ]


@pytest.fixture(scope="module")
def plain(model: GuidedModel) -> list[GuidedAnswer]:
    async def ask() -> list[GuidedAnswer]:
        async with model.engine() as engine:
            return await answers(engine, await requests(model))

    return asyncio.run(ask())


def shown(found: Sequence[GuidedAnswer]) -> dict[str, Any]:
    return {
        name: (
            item.content,
            item.reasoning,
            item.calls,
            item.tokens,
            item.finish,
            item.error and item.error.code,
            item.usage.completion_tokens,
            item.usage.reasoning_tokens,
        )
        for name, item in zip(CASES, found, strict=True)
    }


def test_the_cases_are_what_they_say(plain: list[GuidedAnswer]) -> None:
    found = dict(zip(CASES, plain, strict=True))
    assert all(item.error is None for item in plain)
    reasons = {name: item.finish and item.finish.reason for name, item in found.items()}
    assert reasons["stop string"] is FinishReason.STOP_STRING
    assert reasons["cut"] is FinishReason.OUTPUT_LIMIT
    assert reasons["bound"] is FinishReason.STOP_TOKEN
    assert len(found["never ends"].tokens) == 70
    assert found["call"].calls
    assert found["thought"].reasoning


@pytest.mark.parametrize(("draft_tokens", "lanes"), [(1, 2), (8, 8)])
async def test_random_drafts_change_nothing(
    model: GuidedModel, plain: list[GuidedAnswer], draft_tokens: int, lanes: int
) -> None:
    """They know what is coming and are wrong from some place on."""
    drafters = oracles(
        lambda request: plain[request.sampling.seed].token_ids, VOCAB_SIZE, draft_tokens
    )
    async with model.engine(
        lanes=lanes, draft_tokens=draft_tokens, make_drafter=drafters
    ) as engine:
        assert shown(await answers(engine, await requests(model))) == shown(plain)
        drafts = engine.metrics.drafts
        assert drafts.accepted_at[draft_tokens - 1] > 0
        assert drafts.accepted_total < drafts.drafted_total


async def test_its_own_text_as_a_draft_changes_nothing(
    model: GuidedModel, plain: list[GuidedAnswer]
) -> None:
    async with model.engine(lanes=4, draft_tokens=4) as engine:
        assert shown(await answers(engine, await requests(model))) == shown(plain)
        assert engine.metrics.drafts.accepted_total > 0


async def test_paused_requests_go_on_with_drafts(model: GuidedModel) -> None:
    """Sampled and counted, in far too few pages, with Snapshots and with replays."""

    async def ask(num_pages: int, host_blocks: int, draft_tokens: int) -> list[GuidedAnswer]:
        async with model.engine(
            num_pages=num_pages, host_blocks=host_blocks, draft_tokens=draft_tokens
        ) as engine:
            asked = [
                await model.request(
                    "Hi " * 25,
                    temperature=0.7,
                    presence_penalty=-0.5,
                    seed=seed,
                    top_logprobs=1,
                    ignore_eos=True,
                    max_tokens=80,
                )
                for seed in range(4)
            ]
            found = await answers(engine, asked)
            assert (engine.metrics.num_pauses > 0) == (num_pages == 8)
            assert (engine.metrics.drafts.accepted_total > 0) == (draft_tokens > 0)
            return found

    alone = [item.tokens for item in await ask(64, 0, 0)]
    for host_blocks in (0, 64):
        assert [item.tokens for item in await ask(8, host_blocks, 8)] == alone


async def test_penalties_count_drafts(model: GuidedModel) -> None:
    """Repetition is drafted best, and is what penalties are for: they keep their effect."""

    async def ask(draft_tokens: int) -> list[list[int]]:
        async with model.engine(draft_tokens=draft_tokens) as engine:
            asked = [
                await model.request(COPY, frequency_penalty=penalty, ignore_eos=True, max_tokens=60)
                for penalty in (-2.0, 0.0, 2.0)
            ]
            found = [item.token_ids for item in await answers(engine, asked)]
            assert (engine.metrics.drafts.accepted_total > 0) == (draft_tokens > 0)
            return found

    without = await ask(0)
    assert await ask(6) == without
    distinct = [len(set(token_ids)) for token_ids in without]
    assert distinct[0] < distinct[1] < distinct[2]
