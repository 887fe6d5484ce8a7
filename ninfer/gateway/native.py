"""/generate: raw text or token ids in, text and token ids out; no template, no reasoning split."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
    Progress,
    Timings,
    Usage,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.answer_parts import (
    cache_object,
    finish_reason,
    timings_object,
)
from ninfer.gateway.answers import is_silent, pass_event
from ninfer.gateway.choices import Choices, LiveEvent, build_requests, score_once
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields, invalid_value
from ninfer.gateway.native_logprobs import LogprobTriples, ScoredPrompt
from ninfer.gateway.native_request import NativeRequest, parse_native_request
from ninfer.gateway.prompt_scores import check_num_scored
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
    prepared = [await prompt.raw.prepare(model.frontend) for prompt in request.prompts]
    _check_logprob_start(request, prepared)
    requests: list[GenerationRequest] = []
    outputs: list[NativeOutput] = []
    for prompt, tokens in zip(request.prompts, prepared, strict=True):
        engine_id = new_id("gen-")
        choices_of = build_requests(model, engine_id, tokens, prompt.params, request.num_choices)
        # A stream's choices end when they like, each with its own scores.
        requests += choices_of if request.stream else score_once(choices_of)
        outputs += _outputs(request, prompt.answer_id or engine_id, tokens, model.frontend)
    async with Choices(model.engine, requests, exchange) as choices:
        if request.stream:
            return await _stream(exchange, request, outputs, choices)
        return await _collect(exchange, request, outputs, choices)


def _outputs(
    request: NativeRequest, answer_id: str, tokens: PreparedPrompt, frontend: Frontend
) -> list[NativeOutput]:
    """One a choice of the prompt."""
    triples = LogprobTriples(frontend if request.text_in_logprobs else None)
    scored: list[ScoredPrompt | None] = [None] * request.num_choices
    if request.logprob_start is not None and request.stream:
        scored = [ScoredPrompt(tokens, request.logprob_start, triples) for _ in scored]
    elif request.logprob_start is not None:
        scored = [ScoredPrompt(tokens, request.logprob_start, triples)] * request.num_choices
    return [NativeOutput(answer_id, request.wants_logprobs, triples, own) for own in scored]


def _check_logprob_start(request: NativeRequest, prompts: Sequence[PreparedPrompt]) -> None:
    start = request.logprob_start
    if start is None:
        return
    for prompt in prompts:
        if start >= prompt.num_tokens:
            raise invalid_value(
                "logprob_start_len", f"must be less than the prompt's {prompt.num_tokens} tokens"
            )
    scoring = request.prompts[0].params.scoring
    num_top = 0 if scoring is None else scoring.num_top
    check_num_scored([prompt.num_tokens - start for prompt in prompts], num_top, "return_logprob")


async def _collect(
    exchange: Exchange, request: NativeRequest, outputs: list[NativeOutput], choices: Choices
) -> web.StreamResponse:
    async for index, event in choices:
        await pass_event(outputs[index].add, event)
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
            await pass_event(output.add, event)
            is_skipped = isinstance(event, Admitted) or is_silent(event)
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
    """One choice's output: `answer` has all of it, `step` what came since the last `step`. What
    the prompt scored comes with the end."""

    def __init__(
        self,
        answer_id: str,
        wants_logprobs: bool,
        triples: LogprobTriples,
        scored: ScoredPrompt | None,
    ) -> None:
        self._answer_id = answer_id
        self._wants_logprobs = wants_logprobs
        self._triples = triples
        self._scored = scored
        self._start_s = asyncio.get_running_loop().time()
        self._pieces = _Pieces()
        self._usage = Usage(0)
        self._finish: Finish | None = None
        self._timings: Timings | None = None

    def add(self, event: LiveEvent) -> None:
        self._usage = event.usage
        if isinstance(event, Admitted):
            return
        if isinstance(event, Progress) and self._scored is not None:
            for part in event.prompt_scores:
                self._scored.add(part)
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
                own, top = self._triples.of_token(token)
                self._pieces.token_logprobs.append(own)
                self._pieces.top_logprobs.append(top)

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
        if self._scored is not None and self._finish is not None:
            meta["input_token_logprobs"] = self._scored.token_logprobs
            meta["input_top_logprobs"] = self._scored.top_logprobs
        return meta

    def _finish_object(self) -> dict[str, Any] | None:
        if self._finish is None:
            return None
        if finish_reason(self._finish) == "stop":
            return {"type": "stop", "matched": self._finish.matched}
        return {"type": "length", "length": self._usage.completion_tokens}
