"""Requests of all kinds, asked with drafts of all kinds, compared with what they say without.

    cases(200, 200) -> plain answers (no drafts) -> check(setting, some of them) -> Tally

A case's seed is its index, so that whoever drafts for a request knows what it will say.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle, repeat
from typing import Any, Final, TypeAlias

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.drafting import DraftCounts
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.core import Engine
from ninfer.engine.speculation.drafter import Drafter, Guess, Hope, MakeDrafter
from ninfer.engine.speculation.row_drafter import RowDrafter
from tests.helpers.guided_rig import MAX_CONTEXT, GuidedAnswer, GuidedModel, answer, constraint
from tests.helpers.known_drafter import KnownDrafter

LEAST_PAGES: Final = MAX_CONTEXT // PAGE_TOKENS
"""One request can always stay."""
SUBJECTS: Final = (
    "a river", "a boat", "the moon", "a baker", "an old clock", "a penguin", "two friends", "snow",
    "a lost key", "a garden", "the sea", "a small dog", "a train", "a teacher", "rain", "a kite",
)  # fmt: skip
PERSON: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
LIST: Final = {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 4}
TOOLS: Final = ({"type": "function", "function": {"name": "get_weather", "parameters": PERSON}},)
CALLS: Final = ToolRules(tools=(ToolSpec("get_weather", PERSON, is_strict=True),))


@dataclass(frozen=True)
class Case:
    """`text` is what the user says; {} is a subject."""

    text: str
    fields: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False
    declares: tuple[Any, ...] = ()


STORY: Final = "Tell me a story about {}."
COPY: Final = "Repeat after me: {}, {}, the red fox, {}, the red hen, {}, the red fox."
_ENDLESS: Final[dict[str, Any]] = {"ignore_eos": True}
KINDS: Final = (
    Case(STORY, _ENDLESS),
    Case(COPY, _ENDLESS),
    Case(STORY, {**_ENDLESS, "temperature": 1.0}),
    Case("What is {}?", {**_ENDLESS, "temperature": 0.9, "top_p": 0.9}),
    Case(COPY, {**_ENDLESS, "temperature": 0.7, "frequency_penalty": 0.4, "top_logprobs": 2}),
    Case(STORY, {**_ENDLESS, "presence_penalty": -0.6, "repetition_penalty": 1.1}),
    Case("Write about {}.", {**_ENDLESS, "temperature": 1.3, "top_k": 30, "min_p": 0.05}),
    Case(STORY, {"min_tokens": 60, "temperature": 0.8, "top_logprobs": 3}),
    Case("Describe {}.", {**_ENDLESS, "logit_bias": ((12, 4.0), (300, -50.0), (77, 3.0))}),
    Case(STORY, {**_ENDLESS, "stop": (" said", " named", ". Then", " very"), "temperature": 0.6}),
    Case("Who likes {}?", {"constraint": constraint("json_schema", PERSON), "temperature": 1.1}),
    Case("List things like {}.", {"constraint": constraint("json_schema", LIST)}),
    Case(
        "Say something of {}.",
        {"constraint": constraint("regex", "([a-z]{2,6} ){8,20}"), "temperature": 0.8},
    ),
    Case("What is 12 + 35?", {"thinking_budget": 12, "temperature": 0.7}, thinks=True),
    Case(
        "Is {} good?",
        {"constraint": constraint("regex", "(yes|no), [a-z ]{3,30}"), "thinking_budget": 20},
        thinks=True,
    ),
    Case("What is the weather like for {}?", {"tools": CALLS}, declares=TOOLS),
    Case(STORY, {**_ENDLESS, "stop_token_ids": tuple(range(0, 4083, 53)), "min_tokens": 25}),
)


def cases(num_prompts: int, num_tokens: int) -> list[Case]:
    """Kind after kind, each time of another subject; neighbours of a kind that is drawn are asked
    with the same words and another seed, as the choices of one request are."""
    found = []
    for index in range(num_prompts):
        kind = KINDS[index % len(KINDS)]
        round_index = index // len(KINDS)
        subject = SUBJECTS[(round_index // 2) % len(SUBJECTS)]
        fields = {"max_tokens": num_tokens, **kind.fields, "seed": index}
        found.append(Case(kind.text.replace("{}", subject), fields, kind.thinks, kind.declares))
    return found


async def request_of(model: GuidedModel, case: Case) -> GenerationRequest:
    return await model.request(case.text, thinks=case.thinks, declares=case.declares, **case.fields)


class Source(Enum):
    """Who drafts for a request."""

    NGRAM = "ngram"
    MTP = "mtp"
    """the MTP module beside n-grams; n-grams alone where there is none"""
    RIGHT = "right"
    WRONG = "wrong"
    PARTLY = "partly right"


@dataclass(frozen=True, slots=True)
class Setting:
    """Case number i is drafted for by the source number i + shift."""

    draft_tokens: int
    lanes: int
    shift: int = 0
    has_draft_model: bool = False
    num_pages: int = 64
    host_blocks: int = 0
    num_cancelled: int = 0

    def source(self, index: int) -> Source:
        sources = tuple(Source)
        return sources[(index + self.shift) % len(sources)]


@dataclass(slots=True)
class Tally:
    """What was checked; `differing` are (setting, case) whose answers were not the plain ones."""

    num_requests: int = 0
    num_tokens: int = 0
    num_settings: int = 0
    num_pauses: int = 0
    num_cancelled: int = 0
    drafts: dict[Source, DraftCounts] = field(
        default_factory=lambda: dict.fromkeys(Source, DraftCounts())
    )
    ends: Counter[str] = field(default_factory=Counter)
    differing: list[tuple[Setting, int]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.num_requests += other.num_requests
        self.num_tokens += other.num_tokens
        self.num_settings += other.num_settings
        self.num_pauses += other.num_pauses
        self.num_cancelled += other.num_cancelled
        for source, counts in other.drafts.items():
            self.drafts[source] += counts
        self.ends += other.ends
        self.differing += other.differing


OpenEngine: TypeAlias = Callable[[Setting, MakeDrafter], AbstractAsyncContextManager[Engine]]
"""An engine of a setting's size, for as long as it is asked."""


def on_cpu(model: GuidedModel) -> OpenEngine:
    """Each time another executor."""

    def open_engine(
        setting: Setting, make_drafter: MakeDrafter
    ) -> AbstractAsyncContextManager[Engine]:
        return model.engine(
            lanes=setting.lanes,
            num_pages=setting.num_pages,
            host_blocks=setting.host_blocks,
            draft_tokens=setting.draft_tokens,
            has_draft_model=setting.has_draft_model,
            make_drafter=make_drafter,
        )

    return open_engine


class TextOnly:
    """A RowDrafter that is told of no proposals."""

    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self._drafter = RowDrafter(request, max_tokens)

    def guess(self, accepted: list[int], proposal: tuple[int, ...], room: int) -> Guess:
        return self._drafter.guess(accepted, (), room)

    def hope(self, room: int) -> Hope:
        return Hope()


class Matrix:
    """Cases with their plain answers, which `ask_plain` finds out. `open_engine` is by default
    `on_cpu`."""

    def __init__(
        self, model: GuidedModel, asked: Sequence[Case], open_engine: OpenEngine | None = None
    ) -> None:
        self._model = model
        self._cases = asked
        self._open_engine = on_cpu(model) if open_engine is None else open_engine
        self._vocab_size = model.source.config.vocab_size
        self.plain: list[GuidedAnswer] = []

    async def ask_plain(self, lanes: int = 8) -> None:
        setting = Setting(0, lanes, num_pages=8 * lanes)
        async with self._open_engine(setting, RowDrafter) as engine:
            requests = [await self._request(index) for index in range(len(self._cases))]
            self.plain = await asyncio.gather(*(answer(engine, each) for each in requests))

    async def check(self, setting: Setting, indices: Sequence[int], tally: Tally) -> None:
        """Ask the cases at once; those that are also cancelled are asked once more for that."""
        async with self._open_engine(setting, self._drafters(setting)) as engine:
            requests = [await self._request(index) for index in indices]
            cut = indices[: setting.num_cancelled]
            again = [(await self._request(index), index) for index in cut]
            found = await asyncio.gather(
                *(answer(engine, request) for request in requests),
                *(self._cut_off(engine, *each) for each in again),
            )
            tally.num_pauses += engine.metrics.num_pauses
        tally.num_settings += 1
        for index, item in zip(indices, found, strict=False):
            self._compare(setting, index, item, tally)
        for index, item in zip(cut, found[len(indices) :], strict=True):
            tally.num_cancelled += 1
            if item.tokens != self.plain[index].tokens[: len(item.tokens)]:
                tally.differing.append((setting, index))

    async def _request(self, index: int) -> GenerationRequest:
        return await request_of(self._model, self._cases[index])

    async def _cut_off(
        self, engine: Engine, request: GenerationRequest, index: int
    ) -> GuidedAnswer:
        """Cancelled somewhere inside."""
        after = random.Random(index).randint(0, len(self.plain[index].tokens) // 2)
        return await answer(engine, request, cancel_after=after)

    def _compare(self, setting: Setting, index: int, item: GuidedAnswer, tally: Tally) -> None:
        plain, source = self.plain[index], setting.source(index)
        tally.num_requests += 1
        tally.num_tokens += len(item.tokens)
        tally.ends[_end_of(item)] += 1
        if item.drafts is not None:
            tally.drafts[source] += item.drafts
        if shown(item) != shown(plain):
            tally.differing.append((setting, index))

    def _drafters(self, setting: Setting) -> MakeDrafter:
        def make(request: GenerationRequest, max_tokens: int) -> Drafter:
            index = request.sampling.seed
            right = {
                Source.RIGHT: repeat(max_tokens),
                Source.WRONG: repeat(0),
                Source.PARTLY: cycle(range(max_tokens + 1)),
            }.get(setting.source(index))
            if right is not None:
                coming = self.plain[index].token_ids
                return KnownDrafter(coming, max_tokens, self._vocab_size, right)
            if setting.source(index) is Source.NGRAM:
                return TextOnly(request, max_tokens)
            return RowDrafter(request, max_tokens)

        return make


def small_pool(lanes: int) -> int:
    """Pages in which so many requests cannot all stay; one always can."""
    return max(LEAST_PAGES, 3 * lanes // 2)


def _end_of(item: GuidedAnswer) -> str:
    if item.error is not None:
        return item.error.code
    reason = FinishReason.CANCELLED if item.finish is None else item.finish.reason
    return reason.value


def shown(item: GuidedAnswer) -> tuple[Any, ...]:
    """All that a client sees of it."""
    return (
        item.content,
        item.reasoning,
        item.calls,
        item.tokens,
        item.finish,
        item.error and item.error.code,
        item.usage.completion_tokens,
        item.usage.reasoning_tokens,
    )
