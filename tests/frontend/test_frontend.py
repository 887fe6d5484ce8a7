"""ModelFrontend as Gateway and CLI see it, on the demo model's files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from blockbuster import BlockBuster

from ninfer.contract.cache import CacheMode, CacheRequest
from ninfer.contract.chat import Frontend, GenerationParams, ToolRules, ToolSpec
from ninfer.contract.errors import ModelFileError, RequestError
from ninfer.contract.generation import Finish, FinishReason, GenerationRequest
from ninfer.contract.model import FrontendResources
from ninfer.contract.sampling import GeneratedToken, PromptScoring, SamplingParams
from ninfer.frontend.frontend import UNLIMITED_TOKENS, ModelFrontend
from ninfer.frontend.host_work import MAX_LARGE_AT_ONCE
from ninfer.options import SamplingOptions
from tests.helpers.blocking import no_blocking_calls
from tests.helpers.demo_frontend import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    RESOURCES,
    THINK,
    THINK_END,
    chat,
    demo_config,
    demo_frontend,
    demo_tokenizer,
    turn,
)

FRONTEND = demo_frontend()
TOKENIZER = demo_tokenizer()


@pytest.fixture(autouse=True)
def _no_blocking() -> Iterator[BlockBuster]:
    with no_blocking_calls() as blockbuster:
        yield blockbuster


def build(
    frontend: ModelFrontend = FRONTEND, *, prompt_ids: tuple[int, ...] = (1, 2), **params: Any
) -> GenerationRequest:
    prompt = frontend.prepare_ids(prompt_ids)
    return frontend.build_request("r", prompt, GenerationParams(**params), now=100.0)


def test_what_a_request_asks_of_the_cache_arrives() -> None:
    asked = CacheRequest(CacheMode.OFF, "session", "salt")
    assert build(cache=asked).cache == asked
    assert build().cache == CacheRequest()


def answer(request: GenerationRequest, *ids: int) -> tuple[str, str, Finish | None, int]:
    """(reasoning, content, finish, reasoning tokens) after `ids`, one by one."""
    texts = {"reasoning": "", "content": ""}
    finish = None
    for token_id in ids:
        preview = request.session.preview([GeneratedToken(token_id)], None)
        request.session.commit(preview)
        for delta in preview.deltas:
            texts[delta.channel] += delta.text
        finish = preview.finish
        if finish is not None:
            break
    for delta in request.session.flush():
        texts[delta.channel] += delta.text
    return texts["reasoning"], texts["content"], finish, request.session.reasoning_tokens


def test_it_is_a_frontend() -> None:
    frontend: Frontend = FRONTEND
    assert (frontend.vocab_size, frontend.has_tokenizer, frontend.has_chat_template) == (
        4096,
        True,
        True,
    )


LONG_REFUSED = (
    "{% if messages[0].content|length > 99 %}{{ raise_exception('no') }}{% endif %}"
    "{{ messages[0].content }}"
)


class TestSampling:
    def test_model_defaults_hold_when_nobody_asks(self) -> None:
        sampling = dataclasses.replace(build().sampling, seed=0)
        assert sampling == SamplingParams(temperature=0.7, top_k=20, top_p=0.9)

    def test_request_wins_over_options_and_they_over_the_model(self) -> None:
        frontend = demo_frontend(SamplingOptions(temperature=0.2, top_k=5, min_p=0.1, seed=3))
        sampling = build(frontend, temperature=1.5).sampling
        assert sampling == SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.1, seed=3)

    def test_without_any_default_sampling_is_neutral(self) -> None:
        sampling = build(demo_frontend(generation_config={})).sampling
        assert dataclasses.replace(sampling, seed=0) == SamplingParams(temperature=1.0)

    def test_greedy_model_config_yields_to_a_request(self) -> None:
        frontend = demo_frontend(generation_config={"do_sample": False, "top_p": 0.5})
        assert build(frontend).sampling.is_greedy
        assert build(frontend, temperature=0.8).sampling.temperature == 0.8

    @pytest.mark.parametrize(
        ("asked", "used"), [(0, 0.0), (9e-6, 0.0), (1e-5, 0.01), (0.001, 0.01), (0.5, 0.5)]
    )
    def test_tiny_temperatures(self, asked: float, used: float) -> None:
        assert build(temperature=asked).sampling.temperature == used

    @pytest.mark.parametrize(("asked", "used"), [(-1, 0), (0, 0), (7, 7), (4096, 0), (10**6, 0)])
    def test_top_k_off(self, asked: int, used: int) -> None:
        assert build(top_k=asked).sampling.top_k == used

    @pytest.mark.parametrize(("asked", "used"), [(None, None), (0, 0), (20, 20), (5000, 4096)])
    def test_alternatives_end_with_the_vocabulary(
        self, asked: int | None, used: int | None
    ) -> None:
        assert build(top_logprobs=asked).sampling.top_logprobs == used

    def test_every_unseeded_request_has_its_own_seed(self) -> None:
        seeds = {build().sampling.seed for _ in range(20)}
        assert len(seeds) == 20
        assert all(0 <= seed < 2**64 for seed in seeds)

    def test_negative_seed_is_its_64_bits(self) -> None:
        assert build(seed=-1).sampling.seed == 2**64 - 1
        assert build(seed=0).sampling.seed == 0

    @pytest.mark.parametrize(
        ("param", "value"),
        [("logit_bias", ((4096, 1.0),)), ("logit_bias", ((-1, 1.0),)), ("stop_token_ids", (5000,))],
    )
    def test_ids_outside_the_vocabulary(self, param: str, value: Any) -> None:
        with pytest.raises(RequestError) as caught:
            build(**{param: value})
        assert (caught.value.code, caught.value.param) == ("invalid_value", param)


class TestScoring:
    def test_what_there_is_to_score(self) -> None:
        assert build().scoring is None
        assert build(scoring=PromptScoring(1, 3)).scoring == PromptScoring(1, 3)
        assert build(scoring=PromptScoring(1, 9999)).scoring == PromptScoring(1, 4096)
        assert build(scoring=PromptScoring(2, 3)).scoring is None
        assert build(prompt_ids=(1,), scoring=PromptScoring(1, 3)).scoring is None

    def test_stop_token_is_reported_on_request(self) -> None:
        session = build(reports_stop_token=True).session
        (delta,) = session.preview([GeneratedToken(IM_END)], None).deltas
        assert (delta.text, [token.token_id for token in delta.tokens]) == ("", [IM_END])


async def test_marks_of_a_text_are_parsed_or_plain() -> None:
    text = "a<|im_end|>b<think>"
    parsed = (await FRONTEND.prepare_text(text)).token_ids.tolist()
    plain = (await FRONTEND.prepare_text(text, parses_special=False)).token_ids.tolist()
    assert {IM_END, THINK} <= set(parsed)
    assert not {IM_END, THINK} & set(plain)
    assert b"".join(map(FRONTEND.token_bytes, plain)).decode() == text
    unmarked = (await FRONTEND.prepare_text("no marks", parses_special=False)).token_ids
    assert unmarked.tolist() == TOKENIZER.encode("no marks")


class TestLimits:
    def test_budget_and_deadline(self) -> None:
        assert build().max_tokens == UNLIMITED_TOKENS
        assert build(max_tokens=0).max_tokens == 0
        assert build(demo_frontend(SamplingOptions(max_tokens=9))).max_tokens == 9
        assert build().deadline_s is None
        assert build(timeout_s=2.5).deadline_s == 102.5

    def test_ids_that_end_are_suppressed_until_the_minimum(self) -> None:
        assert build().suppressed_ids == ()
        request = build(min_tokens=3, stop_token_ids=(7,))
        assert (request.min_tokens, request.suppressed_ids) == (3, (7, END_OF_TEXT, IM_END))
        assert build(min_tokens=3, stop_token_ids=(7,), ignore_eos=True).suppressed_ids == (7,)

    def test_eos_of_the_model_config_serves_when_generation_config_has_none(self) -> None:
        assert build(demo_frontend(generation_config={}), min_tokens=1).suppressed_ids == (IM_END,)

    def test_eos_ids_nothing_can_generate_are_left_out(self) -> None:
        frontend = demo_frontend(generation_config={"eos_token_id": [5, 151645]})
        assert build(frontend, min_tokens=1).suppressed_ids == (5,)


class TestOutput:
    HI = TOKENIZER.encode("Hi.")

    def test_eos_is_hidden(self) -> None:
        result = answer(build(), *self.HI, IM_END, *self.HI)
        assert result == ("", "Hi.", Finish(FinishReason.STOP_TOKEN, IM_END), 0)

    def test_ignored_eos_goes_on(self) -> None:
        request = build(ignore_eos=True)
        assert answer(request, *self.HI, IM_END, *self.HI)[1:3] == ("Hi.Hi.", None)

    def test_special_tokens_are_shown_on_request(self) -> None:
        request = build(skip_special_tokens=False)
        assert answer(request, IM_START, *self.HI)[1] == "<|im_start|>Hi."

    def test_thinking_by_ids(self) -> None:
        newline = TOKENIZER.encode("\n\n")
        ids = (*newline, THINK_END, *newline, *self.HI)
        opened = build(prompt_ids=(IM_START, THINK))
        assert answer(opened, *self.HI, *ids)[:2] == ("Hi.", "Hi.")
        generated = build()
        reasoning_tokens = 1 + len(self.HI) + len(newline) + 1
        assert answer(generated, THINK, *self.HI, *ids) == ("Hi.", "Hi.", None, reasoning_tokens)

    def test_raw_endpoints_see_everything_as_content(self) -> None:
        request = build(prompt_ids=(THINK,), split_reasoning=False)
        assert answer(request, *self.HI, THINK_END)[:2] == ("", "Hi.</think>")

    def test_stop_strings_with_options(self) -> None:
        ids = TOKENIZER.encode("one two three")
        finish = Finish(FinishReason.STOP_STRING, "two")
        assert answer(build(stop=("two",)), *ids)[1:3] == ("one ", finish)
        kept = build(stop=("two",), include_stop_string=True)
        assert answer(kept, *ids)[1] == "one two"
        late = build(stop=("t",), min_tokens=len(TOKENIZER.encode("one two")))
        assert answer(late, *ids)[1] == "one two "
        thinking = build(prompt_ids=(THINK,), stop=("two",), stop_in_reasoning=True)
        assert answer(thinking, *ids)[:3] == ("one", "", finish)

    def test_stop_string_with_a_lone_surrogate_is_usable(self) -> None:
        assert answer(build(stop=("\ud83d",)), *TOKENIZER.encode("a\ufffdb"))[1] == "a"

    def test_padded_vocabulary_decodes_to_nothing(self) -> None:
        frontend = demo_frontend(vocab_size=5000)
        assert (frontend.token_bytes(4999), frontend.token_text(4999)) == (b"", "")
        assert answer(build(frontend), *self.HI, 4999, *self.HI)[1] == "Hi.Hi."

    def test_token_text_replaces_broken_bytes(self) -> None:
        first_of_two = next(i for i in range(4083) if FRONTEND.token_bytes(i) == b"\xc4")
        assert FRONTEND.token_text(first_of_two) == "\ufffd"
        assert FRONTEND.token_text(THINK) == "<think>"


class TestPrompts:
    async def test_chat_text_and_tokens_agree(self) -> None:
        prompt = chat(turn("user", "Hello"))
        ids = (await FRONTEND.prepare_chat(prompt)).token_ids.tolist()
        assert ids == TOKENIZER.encode(await FRONTEND.render_chat(prompt))
        assert (await FRONTEND.prepare_text("Hello")).token_ids.tolist() == TOKENIZER.encode(
            "Hello"
        )

    async def test_long_prompt_leaves_the_loop_running(self) -> None:
        long_context = dataclasses.replace(demo_config(), max_position_embeddings=262_144)
        frontend = ModelFrontend(long_context, RESOURCES, SamplingOptions())
        prompt = chat(turn("user", "one two <|im_end|> three " * 20_000))
        task = asyncio.create_task(frontend.prepare_chat(prompt))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert (await task).num_tokens > 100_000
        assert num_turns > 10

    async def test_large_prompts_are_prepared_in_two_threads_of_their_own(self) -> None:
        frontend, before = demo_frontend(), set(threading.enumerate())
        large = [frontend.prepare_text("one two " * 60_000) for _ in range(4)]
        large.append(frontend.prepare_chat(chat(*[turn("user", "one two ")] * 10_000)))
        assert {prompt.num_tokens > 50_000 for prompt in await asyncio.gather(*large)} == {True}
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert sum(name.startswith("large-prompt") for name in names) == MAX_LARGE_AT_ONCE

    async def test_frontend_of_a_context_refuses_what_does_not_fit(self) -> None:
        small = FRONTEND.for_context(10)
        for call in (
            small.prepare_text("a " * 50, "text"),
            small.prepare_chat(chat(turn("user", "a " * 50))),
        ):
            with pytest.raises(RequestError, match="maximum context length is 10 tokens"):
                await call
        with pytest.raises(RequestError) as caught:
            small.prepare_ids([-1] * 11, "input_ids[2]")
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "input_ids[2]"
        assert (await small.for_context(None).prepare_text("a " * 50)).num_tokens >= 50

    async def test_long_and_short_ways_are_one(self) -> None:
        tools = ({"type": "function", "function": {"name": "f", "description": "x" * 3000}},)
        for prompt in (chat(turn("user", "a"), tools=tools), chat(*[turn("user", "a")] * 200)):
            text = await FRONTEND.render_chat(prompt)
            prepared = await FRONTEND.prepare_chat(prompt)
            assert prepared.token_ids.tolist() == TOKENIZER.encode(text)

    async def test_errors_come_out_of_the_thread(self) -> None:
        frontend = demo_frontend(chat_template=LONG_REFUSED)
        with pytest.raises(RequestError, match="no"):
            await frontend.prepare_chat(chat(turn("user", "a" * 5000)))

    async def test_many_prompts_at_once(self) -> None:
        prompts = [chat(turn("user", f"{n} <think> " * 400)) for n in range(8)]
        together = await asyncio.gather(*map(FRONTEND.prepare_chat, prompts))
        for prompt, prepared in zip(prompts, together, strict=True):
            alone = await FRONTEND.prepare_chat(prompt)
            assert prepared.token_ids.tolist() == alone.token_ids.tolist()

    async def test_template_variables_of_the_server_and_of_the_request(self) -> None:
        frontend = FRONTEND.with_template_defaults({"enable_thinking": True})
        for kwargs, opens in (({}, True), ({"enable_thinking": False}, False)):
            prompt = chat(turn("user", "Hi."), template_kwargs=kwargs)
            assert (await frontend.prepare_chat(prompt)).opens_in_reasoning is opens
            text = await frontend.render_chat(prompt)
            assert text.endswith("<think>\n") is opens
        assert not (await FRONTEND.prepare_chat(chat(turn("user", "Hi.")))).opens_in_reasoning


class TestModelFiles:
    async def test_model_without_files_takes_ids(self) -> None:
        frontend = ModelFrontend(demo_config(), FrontendResources(), SamplingOptions())
        assert (frontend.has_tokenizer, frontend.has_chat_template) == (False, False)
        request = build(frontend, prompt_ids=(5, 6))
        assert answer(request, 7, IM_END)[2] == Finish(FinishReason.STOP_TOKEN, IM_END)
        with pytest.raises(RequestError) as caught:
            await frontend.prepare_text("a")
        assert caught.value.code == "tokenizer_unavailable"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokenizer_json": b"{"}, "tokenizer.json"),
            ({"chat_template": "{% if %}"}, "chat_template.jinja: line 1"),
            ({"generation_config": {"top_p": 2}}, "generation_config.json: top_p"),
            ({"tokenizer_config": {"eos_token": 5}}, "tokenizer_config.json: eos_token"),
        ],
    )
    def test_bad_files_name_themselves(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelFileError) as caught:
            demo_frontend(**changes)
        assert str(caught.value).startswith(message)

    async def test_constant_tokens_reach_the_template(self) -> None:
        frontend = demo_frontend(
            chat_template="{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}",
            tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": None},
        )
        prompt = chat(turn("user", "hi"))
        assert await frontend.render_chat(prompt) == "|<|im_end|>|hi"
        assert IM_END in (await frontend.prepare_chat(prompt)).token_ids


class TestTools:
    """Calls in answers to requests with tools."""

    TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

    def _answer(self, frontend: ModelFrontend, **params: Any) -> dict[str, str]:
        texts: dict[str, str] = {}
        request = build(frontend, **params)
        for token_id in [*TOKENIZER.encode(self.TEXT), IM_END]:
            preview = request.session.preview([GeneratedToken(token_id)], None)
            request.session.commit(preview)
            for delta in preview.deltas:
                texts[delta.channel] = texts.get(delta.channel, "") + delta.text
        return texts

    def _special_marks(self) -> ModelFrontend:
        """The demo model's frontend, but the marks of calls are special tokens."""
        data = json.loads(RESOURCES.tokenizer_json or b"")
        for token in data["added_tokens"]:
            token["special"] |= "tool_call" in token["content"]
        return demo_frontend(tokenizer_json=json.dumps(data).encode())

    def test_declared_call_leaves_the_content(self) -> None:
        rules = ToolRules(tools=(ToolSpec("f"),))
        for frontend in (FRONTEND, self._special_marks()):
            assert self._answer(frontend, tools=rules) == {"call": '{"a": 1}'}

    def test_call_is_text_without_tools(self) -> None:
        assert self._answer(FRONTEND) == {"content": self.TEXT}
        rules = ToolRules(tools=(ToolSpec("g"),))
        assert self._answer(FRONTEND, tools=rules) == {"content": self.TEXT}

    def test_no_call_may_begin_where_none_is_wanted(self) -> None:
        rules = ToolRules(tools=(ToolSpec("f"),), choice="none")
        bias = dict(build(tools=rules).sampling.logit_bias)
        (mark,) = TOKENIZER.encode("<tool_call>")
        assert bias == {mark: -math.inf}
        assert self._answer(FRONTEND, tools=rules) == {"content": self.TEXT}
