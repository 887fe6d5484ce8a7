"""Scores of prompts over HTTP on the demo model: the numbers of `ninfer score`, in any company."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from ninfer.cli.loading import load_model, open_named_model
from ninfer.contract.generation import GenerationRequest, Progress
from ninfer.contract.sampling import PromptScores, PromptScoring
from ninfer.engine.core import Engine
from ninfer.engine.score import CausalScorer
from ninfer.ops import prompt_logprobs
from ninfer.options import EngineOptions, SamplingOptions
from tests.helpers.cached_engine import cached_capacity, load_cached_model, random_ids
from tests.helpers.served_model import RunningServer, served_demo_model

OPTIONS = EngineOptions(max_concurrency=3, max_context=1024, prefill_chunk=128, executor="cpu")
IM_END = 4085
ROUNDING = 1e-4
"""Borders between chunks differ, and with them the order of sums in float32."""


class Client:
    def __init__(self, server: RunningServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self._session = session

    async def post(self, path: str, **fields: Any) -> Any:
        async with self._session.post(self.server.url + path, json=fields) as response:
            body = await response.json()
            assert response.status == 200, body
            return body

    async def complete(self, **fields: Any) -> list[dict[str, Any]]:
        body = await self.post("/v1/completions", **fields)
        choices: list[dict[str, Any]] = body["choices"]
        return choices

    @property
    def prompt_tokens_computed(self) -> int:
        return self.server.engine.metrics.prompt_tokens_total


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served_demo_model(OPTIONS) as server, aiohttp.ClientSession() as session:
        yield Client(server, session)


def token_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 4000, count).tolist()
    return ids


async def scored(prompts: Sequence[list[int]]) -> list[list[float | None]]:
    """By the scorer behind `ninfer score`, on a Program of its own."""
    model = load_model(open_named_model(None), OPTIONS, SamplingOptions(), lambda *_: None)
    try:
        scorer = CausalScorer(model.program)
        results = [await scorer.score(ids, window=1024, stride=1024) for ids in prompts]
    finally:
        model.program.close()
    return [[None if nll is None else -nll for nll in result.token_nlls] for result in results]


def assert_same(got: Sequence[float | None], want: Sequence[float | None]) -> None:
    assert [value is None for value in got] == [value is None for value in want]
    assert [value for value in got if value is not None] == pytest.approx(
        [value for value in want if value is not None], abs=ROUNDING
    )


async def test_echoed_prompts_have_the_scores_of_the_scorer(client: Client) -> None:
    """Of several chunks, in one batch, beside a stream and beside each other."""
    prompts = [token_ids(count, seed=count) for count in (1, 2, 128, 129, 200)]
    other = asyncio.create_task(
        client.complete(prompt=token_ids(20), max_tokens=60, temperature=0, ignore_eos=True)
    )
    choices = await client.complete(prompt=prompts, max_tokens=1, echo=True, logprobs=1)
    (alone,) = await client.complete(
        prompt=token_ids(20), max_tokens=60, temperature=0, ignore_eos=True, cache="off"
    )
    assert (await other)[0]["text"] == alone["text"]
    for choice, expected in zip(choices, await scored(prompts), strict=True):
        lists = choice["logprobs"]
        assert_same(lists["token_logprobs"][: len(expected)], expected)
        assert len(lists["tokens"]) == len(expected) + 1
        assert {len(values) for values in lists.values()} == {len(expected) + 1}


async def test_what_a_harness_reads(client: Client) -> None:
    """Scores of a continuation, and whether it is what greedy decoding would have said; the last
    place is the generated token's, also when that is the end of the text."""
    context = "The sky is"
    (greedy,) = await client.complete(prompt=context, max_tokens=3, temperature=0, logprobs=1)
    num_context = (await client.post("/tokenize", prompt=context))["count"]
    for bias in ({}, {str(IM_END): 100}):
        choice: dict[str, Any] = {}
        for continuation, is_greedy in ((greedy["text"], True), (" of an old hat", False)):
            (choice,) = await client.complete(
                prompt=context + continuation, max_tokens=1, echo=True, logprobs=1,
                temperature=0, logit_bias=bias,
            )  # fmt: skip
            lists = choice["logprobs"]
            own = lists["token_logprobs"][num_context:-1]
            best = [max(top.values()) for top in lists["top_logprobs"][num_context:-1]]
            assert len(own) == len(lists["tokens"]) - num_context - 1 > 0
            assert (own == best) is is_greedy
            assert "".join(lists["tokens"][:-1]) == context + continuation
        assert (choice["logprobs"]["tokens"][-1] == "<|im_end|>") is bool(bias)
        assert choice["finish_reason"] == ("stop" if bias else "length")


async def test_every_way_to_ask_gives_the_same_scores(client: Client) -> None:
    ids = token_ids(200)
    (whole,) = await client.complete(prompt=ids, max_tokens=0, echo=True, logprobs=3)
    expected = whole["logprobs"]["token_logprobs"]
    assert whole["finish_reason"] == "length"
    for start in (0, 150, 199):
        native = await client.post(
            "/generate", input_ids=ids, return_logprob=True, logprob_start_len=start,
            top_logprobs_num=3, sampling_params={"max_new_tokens": 0},
        )  # fmt: skip
        meta = native["meta_info"]
        triples = meta["input_token_logprobs"]
        assert [triple[1] for triple in triples] == ids[start:]
        assert_same([triple[0] for triple in triples], [None, *expected[start + 1 :]])
        assert [len(tops) for tops in meta["input_top_logprobs"][1:]] == [3] * (199 - start)
        assert meta["finish_reason"] == {"type": "length", "length": 0}


async def test_scores_do_not_change_with_the_cache_or_the_choices(client: Client) -> None:
    ids = token_ids(400)
    first, again = [
        (await client.complete(prompt=ids, max_tokens=2, echo=True, logprobs=0, n=2, seed=1))
        for _ in range(2)
    ]
    for choices in (first, again):
        lists = [choice["logprobs"]["token_logprobs"][:400] for choice in choices]
        assert lists[0] == lists[1] == first[0]["logprobs"]["token_logprobs"][:400]
    assert [choice["text"] for choice in again] == [choice["text"] for choice in first]
    usage = (await client.post("/generate", input_ids=ids, return_logprob=True,
        logprob_start_len=399, sampling_params={"max_new_tokens": 1}))["meta_info"]  # fmt: skip
    assert usage["cached_tokens"] == 399
    assert usage["input_token_logprobs"][0][0] is None


async def scores_from(engine: Engine, request: GenerationRequest) -> PromptScores:
    parts: list[PromptScores] = []
    async with engine.submit(request) as handle:
        async for event in handle:
            if isinstance(event, Progress):
                parts += event.prompt_scores
    return prompt_logprobs.joined(parts)


@pytest.mark.parametrize("host_blocks", [0, 64])
async def test_scores_are_the_same_bits_when_memory_is_short(host_blocks: int) -> None:
    """A prompt that is paused in its middle for an older request that grows."""
    model = load_cached_model("qwen3_5-dense")
    limits = dataclasses.replace(
        cached_capacity(max_context=256, num_pages=6, cache_slots=0, host_blocks=host_blocks),
        prefill_chunk=2,
    )

    def scored_request() -> GenerationRequest:
        plain = model.request(random_ids(5, 240), max_tokens=2)
        return dataclasses.replace(plain, scoring=PromptScoring(1, 3))

    async with model.running(limits, is_cached=False) as running:
        alone = await scores_from(running.engine, scored_request())
    async with model.running(limits) as running:
        older = model.request(random_ids(6, 60), max_tokens=190)
        _, together = await asyncio.gather(
            running.ask(older), scores_from(running.engine, scored_request())
        )
        assert running.engine.metrics.num_pauses > 0
    for name in ("first", "logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))


async def test_a_prompt_with_several_answers_is_computed_once(client: Client) -> None:
    before = client.prompt_tokens_computed
    answers = await client.post(
        "/generate", input_ids=token_ids(900), sampling_params={"n": 4, "max_new_tokens": 2}
    )
    assert client.prompt_tokens_computed - before == 900 + 3
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in answers)
    assert cached == [0, 899, 899, 899]
    before = client.prompt_tokens_computed
    text = "Why is the sky blue? " * 100
    chat = await client.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": text}], n=4, max_tokens=2
    )
    num_prompt = chat["usage"]["prompt_tokens"]
    assert client.prompt_tokens_computed - before <= num_prompt + 3 * 16


async def test_no_output_at_all(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, fields in (
        ("/v1/completions", {"prompt": "hi", "max_tokens": 0}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 0, "echo": True, "n": 2}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 0}),
    ):
        body = await client.post(path, **fields)
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
        assert body["usage"]["completion_tokens"] == 0


async def test_tokenized_conversations_are_what_chat_prefills(client: Client) -> None:
    fields: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief. <|im_end|>"},
            {"role": "user", "content": "What is 2 + 2?"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    tokens = (await client.post("/tokenize", **fields))["tokens"]
    chat = await client.post("/v1/chat/completions", **fields, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    text = (await client.post("/apply-template", **fields))["prompt"]
    assert (await client.post("/detokenize", tokens=tokens))["prompt"] == text
    assert tokens.count(IM_END) == 2, "the client's mark is no control token"
