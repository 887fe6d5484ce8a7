"""/v1/completions: raw text goes on; answers whole or as a stream of chunks.

read, check -> tokenise -> submit -> (admitted) -> chunks | one object
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from ninfer.contract.chat import Frontend
from ninfer.contract.generation import Finish, Finished, GenerationRequest
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.answer_parts import (
    finish_reason,
    summed_usage,
    timings_object,
    usage_object,
)
from ninfer.gateway.answers import (
    AnswerHead,
    Ending,
    collect_answer,
    stream_answer,
    timings_of,
)
from ninfer.gateway.choices import Choices, LiveEvent, build_requests, score_once
from ninfer.gateway.completion_logprobs import TokenNames
from ninfer.gateway.completion_record import (
    OutputRecord,
    Piece,
    PromptRecord,
    echoed_text,
    joined,
    moved,
)
from ninfer.gateway.completion_request import CompletionRequest, parse_completion_request
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields
from ninfer.gateway.frame_template import FrameTemplate
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.off_loop import MANY_TOKENS, off_the_loop
from ninfer.gateway.prompt_scores import check_num_scored
from ninfer.gateway.request_ids import new_id
from ninfer.gateway.sse import DONE_FRAME, OpenAIStreamStyle, data_frame

_KIND: Final = "text_completion"


async def completions(exchange: Exchange) -> web.StreamResponse:
    """Raises RequestError, Unavailable and what the engine reports before a stream has begun."""
    model = exchange.lifecycle.require_model()
    vocab_size, session = model.frontend.vocab_size, exchange.session_id

    def parse(fields: Fields) -> CompletionRequest:
        return parse_completion_request(fields, vocab_size, session)

    request = await exchange.read(parse)
    name = exchange.check_model(request.model)
    # All are prepared before the first is submitted: a bad one costs the others nothing.
    prompts = [await prompt.prepare(model.frontend) for prompt in request.prompts]
    if request.params.scoring is not None:
        num_tokens = [prompt.num_tokens for prompt in prompts]
        check_num_scored(num_tokens, request.params.scoring.num_top, "logprobs")
    answer_id = new_id("cmpl-")
    head = AnswerHead(answer_id, name, model.card.fingerprint, int(time.time()))
    requests = _engine_requests(model, answer_id, request, prompts)
    parts = CompletionParts(request, prompts, await _echoes(request, prompts, model.frontend))
    async with Choices(model.engine, requests, exchange) as choices:
        if request.stream:
            writer = CompletionChunkWriter(head, parts, model.frontend)
            return await stream_answer(exchange, writer, choices)
        builder = TextCompletionBuilder(head, parts, model.frontend)
        return await collect_answer(exchange, builder, choices)


def _engine_requests(
    model: ServedModel,
    answer_id: str,
    request: CompletionRequest,
    prompts: Sequence[PreparedPrompt],
) -> list[GenerationRequest]:
    requests: list[GenerationRequest] = []
    for index, prompt in enumerate(prompts):
        own_id = answer_id if len(prompts) == 1 else f"{answer_id}-{index}"
        choices = build_requests(model, own_id, prompt, request.params, request.num_choices)
        # A stream's choices come when they like, each with its own scores.
        requests += choices if request.stream else score_once(choices)
    return requests


async def _echoes(
    request: CompletionRequest, prompts: Sequence[PreparedPrompt], frontend: Frontend
) -> list[str]:
    """Texts to begin with."""
    if not request.echo:
        return [""] * len(prompts)

    def decode() -> list[str]:
        return [
            echoed_text(prompt, raw.value, frontend)
            for prompt, raw in zip(prompts, request.prompts, strict=True)
        ]

    num_tokens = sum(prompt.num_tokens for prompt in prompts)
    return await off_the_loop(decode, is_long=num_tokens > MANY_TOKENS)


class CompletionParts:
    """What a completion is made of. Choices count through all prompts."""

    def __init__(
        self, request: CompletionRequest, prompts: Sequence[PreparedPrompt], echoes: Sequence[str]
    ) -> None:
        self.request = request
        self.endings = [Ending() for _ in range(len(prompts) * request.num_choices)]
        self._prompts = prompts
        self._echoes = echoes

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def has_logprobs(self) -> bool:
        return self.request.num_top is not None

    def prompt_of(self, index: int) -> int:
        """The prompt of a choice."""
        return index // self.request.num_choices

    def prompt_record(self, prompt: int, names: TokenNames) -> PromptRecord:
        tokens, echo = self._prompts[prompt], self._echoes[prompt]
        return PromptRecord(self.request, tokens, echo, names)

    def usage(self) -> dict[str, Any]:
        count, usages = self.request.num_choices, [ending.usage for ending in self.endings]
        return summed_usage(
            [usage_object(usages[i : i + count]) for i in range(0, len(usages), count)]
        )

    def timings(self) -> dict[str, Any]:
        return timings_object(timings_of(self.endings), self.usage()["completion_tokens"])


class TextCompletionBuilder:
    """Collects all events of a request into one `text_completion` object."""

    def __init__(self, head: AnswerHead, parts: CompletionParts, frontend: Frontend) -> None:
        self._head = head
        self._parts = parts
        names = TokenNames(frontend, by_id=parts.request.names_by_id)
        self._prompts = [parts.prompt_record(prompt, names) for prompt in range(parts.num_prompts)]
        self._outputs = [OutputRecord(parts.request, names) for _ in parts.endings]
        self._echoes = [list(record.opening()) for record in self._prompts]
        self._pieces: list[list[Piece]] = [[] for _ in parts.endings]

    def add(self, index: int, event: LiveEvent) -> None:
        """Scores come with the first choice of a prompt, for all of them."""
        prompt = self._parts.prompt_of(index)
        self._parts.endings[index].update(event)
        self._echoes[prompt] += self._prompts[prompt].read(event)
        self._pieces[index] += self._outputs[index].read(event)

    def answer(self) -> dict[str, Any]:
        return {
            **self._head.fields(_KIND),
            "choices": [self._choice(index) for index in range(len(self._pieces))],
            "usage": self._parts.usage(),
            "timings": self._parts.timings(),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        echo = self._echoes[self._parts.prompt_of(index)]
        whole = joined(echo, self._pieces[index], has_logprobs=self._parts.has_logprobs)
        finish = self._parts.endings[index].require_finish()
        return {
            "index": index,
            "text": whole.text,
            "logprobs": None if whole.logprobs is None else whole.logprobs.as_json(),
            "finish_reason": finish_reason(finish),
            "stop_reason": finish.matched,
        }


class CompletionChunkWriter(OpenAIStreamStyle):
    """Turns events into `text_completion` chunks."""

    def __init__(self, head: AnswerHead, parts: CompletionParts, frontend: Frontend) -> None:
        self._base = head.fields(_KIND)
        self._parts = parts
        self._request = parts.request
        names = TokenNames(frontend, by_id=parts.request.names_by_id)
        choices = range(len(parts.endings))
        self._prompts = [parts.prompt_record(parts.prompt_of(index), names) for index in choices]
        self._outputs = [OutputRecord(parts.request, names) for _ in choices]
        self._templates: dict[int, FrameTemplate] = {}

    def opening(self) -> list[bytes]:
        """Echoed prompts, as far as they need no scores."""
        return [
            self._piece_frame(index, piece)
            for index, record in enumerate(self._prompts)
            for piece in record.opening()
        ]

    def frames(self, index: int, event: LiveEvent) -> list[bytes]:
        """What one event makes visible, maybe nothing."""
        self._parts.endings[index].update(event)
        prompt = self._prompts[index]
        pieces = [*prompt.read(event)]
        num_before = prompt.num_characters
        pieces += (moved(piece, num_before) for piece in self._outputs[index].read(event))
        frames = [
            self._piece_frame(index, piece)
            for piece in pieces
            if piece.text or (piece.logprobs is not None and piece.logprobs.tokens)
        ]
        if isinstance(event, Finished):
            frames.append(self._finish_frame(index, event.finish))
        return frames

    def closing(self) -> list[bytes]:
        """The usage chunk, if asked for, and the closing mark."""
        if not self._request.include_usage:
            return [DONE_FRAME]
        end = {"choices": [], "usage": self._parts.usage(), "timings": self._parts.timings()}
        return [data_frame({**self._base, **end}), DONE_FRAME]

    def _piece_frame(self, index: int, piece: Piece) -> bytes:
        if piece.logprobs is not None:
            return self._chunk(_chunk_choice(index, piece.text, piece.logprobs.as_json()))
        if self._request.continuous_usage:
            return self._chunk(_chunk_choice(index, piece.text))
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = FrameTemplate(
                lambda text: self._chunk(_chunk_choice(index, text))
            )
        return template.fill(piece.text)

    def _finish_frame(self, index: int, finish: Finish) -> bytes:
        choice = _chunk_choice(index, "")
        choice |= {"finish_reason": finish_reason(finish), "stop_reason": finish.matched}
        is_last = all(ending.finish is not None for ending in self._parts.endings)
        if is_last and not self._request.include_usage:
            return self._chunk(choice, {"timings": self._parts.timings()})
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._base, "choices": [choice]}
        if self._request.continuous_usage:
            chunk["usage"] = self._parts.usage()
        elif self._request.include_usage:
            chunk["usage"] = None
        return data_frame(chunk | (extra or {}))


def _chunk_choice(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
