"""/generate: raw text or token ids in, text and token ids out; no template, no reasoning split."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ninfer.contract.chat import Frontend
from ninfer.contract.generation import (
    Admitted,
    Finish,
    Finished,
    GenerationRequest,
    OutputDelta,
    Timings,
    Usage,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import GeneratedToken
from ninfer.gateway.answer_parts import (
    cache_object,
    finish_reason,
    finite_logprob,
    require_logprobs,
    timings_object,
)
from ninfer.gateway.choices import Choices, LiveEvent, build_requests
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields
from ninfer.gateway.native_request import NativePrompt, NativeRequest, parse_native_request
from ninfer.gateway.request_ids import new_id
from ninfer.gateway.sse import DONE_FRAME, OpenAIStreamStyle, data_frame


async def generate(exchange: Exchange) -> web.StreamResponse:
    """Raises RequestError, Unavailable and what the engine reports before a stream has begun."""
    model = exchange.lifecycle.require_model()
    vocab_size, session = model.frontend.vocab_size, exchange.session_id

    def parse(fields: Fields) -> NativeRequest:
        return parse_native_request(fields, vocab_size, session)

    request = await exchange.read(parse)
    # All are prepared before the first is submitted: a bad one costs the others nothing.
    prepared = [await _prepare(model.frontend, prompt) for prompt in request.prompts]
    requests: list[GenerationRequest] = []
    outputs: list[NativeOutput] = []
    for prompt, tokens in zip(request.prompts, prepared, strict=True):
        engine_id = new_id("gen-")
        requests += build_requests(model, engine_id, tokens, prompt.params, request.num_choices)
        outputs += [
            NativeOutput(prompt.answer_id or engine_id, request, model.frontend)
            for _ in range(request.num_choices)
        ]
    async with Choices(model.engine, requests, exchange.log_end) as choices:
        if request.stream:
            return await _stream(exchange, request, outputs, choices)
        return await _collect(exchange, request, outputs, choices)


async def _prepare(frontend: Frontend, prompt: NativePrompt) -> PreparedPrompt:
    if isinstance(prompt.value, str):
        return await frontend.prepare_text(prompt.value, prompt.path)
    return frontend.prepare_ids(prompt.value, prompt.path)


async def _collect(
    exchange: Exchange, request: NativeRequest, outputs: list[NativeOutput], choices: Choices
) -> web.StreamResponse:
    async for index, event in choices:
        outputs[index].add(event)
    answers = [output.answer() for output in outputs]
    return exchange.json(answers if _is_list(request) else answers[0])


async def _stream(
    exchange: Exchange, request: NativeRequest, outputs: list[NativeOutput], choices: Choices
) -> web.StreamResponse:
    """Frames of a cumulative stream replace each other, so a reader that is behind skips some."""
    index, event = await anext(choices)
    outputs[index].add(event)
    async with exchange.stream(OpenAIStreamStyle()) as stream:
        async for index, event in choices:
            output = outputs[index]
            output.add(event)
            is_skipped = isinstance(event, Admitted)
            if stream.is_behind and not request.incremental:
                is_skipped = not isinstance(event, Finished)
                if not is_skipped:
                    await stream.catch_up()
            if not is_skipped:
                await stream.send((data_frame(_frame(request, output, index)),))
        await stream.catch_up()
        await stream.send((DONE_FRAME,))
    return stream.response


def _frame(request: NativeRequest, output: NativeOutput, index: int) -> dict[str, Any]:
    answer = output.step() if request.incremental else output.answer()
    if _is_list(request):
        answer["index"] = index
    return answer


def _is_list(request: NativeRequest) -> bool:
    return request.is_batch or request.num_choices > 1


@dataclass(slots=True)
class _Pieces:
    """Text, token ids and logprobs of a stretch of output."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]]] = field(default_factory=list)


class NativeOutput:
    """One choice's output: `answer` has all of it, `step` what came since the last `step`."""

    def __init__(self, answer_id: str, request: NativeRequest, frontend: Frontend) -> None:
        self._answer_id = answer_id
        self._frontend = frontend
        self._wants_logprobs = request.wants_logprobs
        self._wants_text = request.text_in_logprobs
        self._start_s = asyncio.get_running_loop().time()
        self._pieces = _Pieces()
        self._usage = Usage(0)
        self._finish: Finish | None = None
        self._timings: Timings | None = None

    def add(self, event: LiveEvent) -> None:
        self._usage = event.usage
        if isinstance(event, Admitted):
            return
        for delta in event.deltas:
            self._add_delta(delta)
        if isinstance(event, Finished):
            self._finish, self._timings = event.finish, event.timings

    def answer(self) -> dict[str, Any]:
        return {
            "text": "".join(self._pieces.texts),
            "output_ids": self._pieces.token_ids,
            "meta_info": self._meta_info(),
        }

    def step(self) -> dict[str, Any]:
        answer = self.answer()
        self._pieces = _Pieces()
        return answer

    def _add_delta(self, delta: OutputDelta) -> None:
        self._pieces.texts.append(delta.text)
        for token in delta.tokens:
            self._pieces.token_ids.append(token.token_id)
            if self._wants_logprobs:
                self._add_logprobs(token)

    def _add_logprobs(self, token: GeneratedToken) -> None:
        logprobs = require_logprobs(token)
        self._pieces.token_logprobs.append(self._triple(token.token_id, logprobs.logprob))
        self._pieces.top_logprobs.append(
            [self._triple(token_id, logprob) for token_id, logprob in logprobs.top]
        )

    def _triple(self, token_id: int, logprob: float) -> list[Any]:
        text = self._frontend.token_text(token_id) if self._wants_text else None
        return [finite_logprob(logprob), token_id, text]

    def _meta_info(self) -> dict[str, Any]:
        usage = self._usage
        meta: dict[str, Any] = {
            "id": self._answer_id,
            "finish_reason": self._finish_object(),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "cache": None if usage.cache is None else cache_object(usage.cache),
            "e2e_latency": asyncio.get_running_loop().time() - self._start_s,
        }
        if self._timings is not None:
            meta["timings"] = timings_object([self._timings], usage.completion_tokens)
        if self._wants_logprobs:
            meta["output_token_logprobs"] = self._pieces.token_logprobs
            meta["output_top_logprobs"] = self._pieces.top_logprobs
        return meta

    def _finish_object(self) -> dict[str, Any] | None:
        if self._finish is None:
            return None
        if finish_reason(self._finish) == "stop":
            return {"type": "stop", "matched": self._finish.matched}
        return {"type": "length", "length": self._usage.completion_tokens}
