"""Constrained answers of the demo model: valid, the same on a busy server, nobody disturbed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import jsonschema
import pytest

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.contract.errors import RequestError
from ninfer.contract.generation import FinishReason, GenerationRequest
from ninfer.options import EngineOptions
from tests.helpers.guided_rig import GuidedModel, answer, answers, constraint, load_guided_model
from tests.helpers.served_model import served_demo_model

pytestmark = pytest.mark.no_cover

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
}
TOOLS = ({"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},)


@pytest.fixture(scope="module")
def model() -> GuidedModel:
    return load_guided_model()


async def person(model: GuidedModel, seed: int, **fields: Any) -> GenerationRequest:
    fields = {"temperature": 0.0 if seed % 2 == 0 else 1.3, "seed": seed, **fields}
    text = "Tell me who you are. " * (1 + seed % 3)
    return await model.request(text, constraint=constraint("json_schema", PERSON), **fields)


async def test_answers_are_valid_and_independent_of_their_mates(model: GuidedModel) -> None:
    seeds = range(3)
    async with model.engine(lanes=1) as engine:
        alone = [await answer(engine, await person(model, seed)) for seed in seeds]
    for result in alone:
        jsonschema.validate(json.loads(result.content), PERSON)
        assert result.finish is not None
        assert result.finish.reason is FinishReason.STOP_TOKEN
    async with model.engine() as engine:
        requests = [await person(model, seed) for seed in seeds]
        requests += [await model.request("Tell me a story.", max_tokens=30)]
        together = await answers(engine, requests)
    assert [result.token_ids for result in together[:3]] == [item.token_ids for item in alone]


async def words(model: GuidedModel, seed: int) -> GenerationRequest:
    """The prompt nearly fills a page, the answer needs two more."""
    grammar = constraint("regex", "([a-z]{1,3} ){72}")
    return await model.request("Hi " * 25, constraint=grammar, seed=seed, max_tokens=80)


async def test_paused_requests_go_on_in_their_grammar(model: GuidedModel) -> None:
    async with model.engine(lanes=1) as engine:
        alone = [(await answer(engine, await words(model, seed))).token_ids for seed in range(4)]
    for host_blocks in (0, 64):
        async with model.engine(num_pages=8, host_blocks=host_blocks) as engine:
            together = await answers(engine, [await words(model, seed) for seed in range(4)])
            assert engine.metrics.num_pauses > 0
            assert (engine.metrics.num_replays > 0) == (host_blocks == 0)
        assert [result.token_ids for result in together] == alone


async def test_logprobs_are_those_of_the_model_itself(model: GuidedModel) -> None:
    async with model.engine() as engine:
        free, bound = await answers(
            engine,
            [
                await model.request("Is the sky blue?", top_logprobs=3, max_tokens=1),
                await model.request(
                    "Is the sky blue?", top_logprobs=3, constraint=constraint("choice", ["maybe"])
                ),
            ],
        )
    assert bound.content == "maybe"
    first, other = free.tokens[0].logprobs, bound.tokens[0].logprobs
    assert first is not None
    assert other is not None
    assert first.top == other.top


async def test_a_dead_end_ends_only_its_own_row(model: GuidedModel) -> None:
    (end,) = [token for token in range(4096) if model.frontend.token_bytes(token) == b"\n"]
    async with model.engine() as engine:
        dead, mate = await answers(
            engine,
            [
                await model.request(
                    "Hi", constraint=constraint("regex", "a\nb"), stop_token_ids=(end,)
                ),
                await model.request("Who are you?"),
            ],
        )
    assert isinstance(dead.error, RequestError)
    assert dead.error.code == "constraint_dead_end"
    assert dead.content == "a"
    assert mate.error is None
    assert mate.content


async def test_thought_then_an_answer_in_its_grammar(model: GuidedModel) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}},
              "required": ["answer"], "additionalProperties": False}  # fmt: skip
    async with model.engine() as engine:
        for budget in (None, 4):
            result = await answer(
                engine,
                await model.request(
                    "What is 3 plus 4?",
                    thinks=True,
                    thinking_budget=budget,
                    constraint=constraint("json_schema", schema),
                ),
            )
            assert result.reasoning.startswith("3 + 4")
            jsonschema.validate(json.loads(result.content), schema)
            assert ("time for thinking" in result.reasoning) == (budget is not None)
            assert result.usage.reasoning_tokens >= 4


async def test_forced_tokens_change_no_answer(model: GuidedModel) -> None:
    """With log probabilities asked for every token is drawn under its mask."""
    text = "The answer that I was told to give, word for word, is [0-9]{2}, and not more than that."
    cases: tuple[dict[str, Any], ...] = (
        {"thinks": True, "thinking_budget": 4, "max_tokens": 60},
        {"constraint": constraint("gbnf", f'root ::= "{text[:54]}" [0-9] "{text[64:]}"')},
    )
    async with model.engine() as engine:
        for fields in cases:
            drawn = await answer(
                engine, await model.request("What is 3 plus 4?", top_logprobs=0, **fields)
            )
            units = engine.metrics.num_decode_units
            forced = await answer(engine, await model.request("What is 3 plus 4?", **fields))
            assert (forced.content, forced.reasoning) == (drawn.content, drawn.reasoning)
            assert engine.metrics.num_decode_units - units < forced.usage.completion_tokens - 10


async def test_demanded_calls(model: GuidedModel) -> None:
    rules = ToolRules(tools=(ToolSpec("get_weather", WEATHER),), choice="required")
    async with model.engine() as engine:
        request = await model.request("Tell me a story.", declares=TOOLS, tools=rules)
        result = await answer(engine, request)
    ((name, arguments),) = result.calls
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), WEATHER)
    assert result.content == ""


async def test_a_bias_to_newlines_cannot_keep_an_answer_from_its_end(model: GuidedModel) -> None:
    texts = {token: model.frontend.token_bytes(token) for token in range(4096)}
    biases = tuple((token, 60.0) for token, text in texts.items() if set(text) == {ord("\n")})
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"enum": ["a", "b"]}}}
    async with model.engine() as engine:
        result = await answer(
            engine,
            await model.request(
                "Who?",
                constraint=constraint("json_schema", schema),
                logit_bias=biases,
            ),
        )
    jsonschema.validate(json.loads(result.content), schema)
    assert "\n" in result.content


async def test_over_http_bad_and_heavy_grammars_disturb_nobody() -> None:
    options = EngineOptions(executor="cpu", max_concurrency=4, max_context=512, cpu_threads=1)
    heavy = {"regex": "[ab]?" * 6500}
    bad = {"grammar": "root ::= undefined_rule"}
    user = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    async with served_demo_model(options) as server, aiohttp.ClientSession() as session:
        url = f"{server.url}/v1/chat/completions"

        async def post(**fields: Any) -> tuple[int, Any]:
            async with session.post(url, json={**user, "max_tokens": 60, **fields}) as response:
                return response.status, await response.json()

        story, person, *errors = await asyncio.gather(
            post(), post(response_format=form, max_tokens=120), post(**bad), post(**heavy)
        )
        again = await post()
        _, twice = await post(guided_regex="[a-z]{4}", n=2, temperature=1, seed=3)
        raw = {"prompt": "A", "max_tokens": 20, "guided_choice": ["left", "right"]}
        async with session.post(f"{server.url}/v1/completions", json=raw) as response:
            completion = await response.json()
        native = {"text": "A", "sampling_params": {"regex": "[0-9]{3}", "max_new_tokens": 9}}
        async with session.post(f"{server.url}/generate", json=native) as response:
            generated = await response.json()
    assert story[0] == person[0] == 200
    jsonschema.validate(json.loads(person[1]["choices"][0]["message"]["content"]), PERSON)
    assert [status for status, _ in errors] == [400, 400]
    codes = [body["error"]["code"] for _, body in errors]
    assert codes == ["invalid_grammar", "schema_too_complex"]
    assert again[1]["choices"] == story[1]["choices"]
    texts = [choice["message"]["content"] for choice in twice["choices"]]
    assert [len(text) for text in texts] == [4, 4]
    assert texts[0] != texts[1]
    assert completion["choices"][0]["text"] in ("left", "right")
    assert len(generated["text"]) == 3
    assert generated["text"].isdecimal()
