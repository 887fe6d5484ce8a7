"""/v1/chat/completions: answers whole or as a stream of chunks.

read, check -> render, tokenise -> submit -> (admitted) -> chunks | one object
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ninfer.contract.chat import Frontend
from ninfer.contract.generation import (
    Admitted,
    Finish,
    Finished,
    OutputDelta,
)
from ninfer.gateway.answer_parts import (
    chat_logprob_entry,
    finish_reason,
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
from ninfer.gateway.chat_request import ChatRequest, parse_chat_request
from ninfer.gateway.choices import Choices, LiveEvent, build_requests
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields
from ninfer.gateway.frame_template import FrameTemplate
from ninfer.gateway.request_ids import new_id
from ninfer.gateway.sse import DONE_FRAME, OpenAIStreamStyle, data_frame


async def chat_completions(exchange: Exchange) -> web.StreamResponse:
    """Raises RequestError, Unavailable and what the engine reports before a stream has begun."""
    model = exchange.lifecycle.require_model()
    frontend = model.frontend
    session = exchange.session_id

    def parse(fields: Fields) -> ChatRequest:
        return parse_chat_request(fields, frontend.vocab_size, session)

    request = await exchange.read(parse)
    name = exchange.check_model(request.model)
    prompt = await frontend.prepare_chat(request.chat)
    answer_id = new_id("chatcmpl-")
    requests = build_requests(model, answer_id, prompt, request.params, request.num_choices)
    head = AnswerHead(answer_id, name, model.card.fingerprint, int(time.time()))
    async with Choices(model.engine, requests, exchange.log_end) as choices:
        if request.stream:
            return await stream_answer(exchange, ChunkWriter(head, request, frontend), choices)
        return await collect_answer(exchange, CompletionBuilder(head, request, frontend), choices)


class CompletionBuilder:
    """Collects all events of a request into one `chat.completion` object."""

    def __init__(self, head: AnswerHead, request: ChatRequest, frontend: Frontend) -> None:
        self._head = head
        self._frontend = frontend
        self._wants_logprobs = request.params.top_logprobs is not None
        self._hides_reasoning = request.hide_reasoning
        count = request.num_choices
        self._endings = [Ending() for _ in range(count)]
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._thoughts: list[list[str]] = [[] for _ in range(count)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(count)]

    def add(self, index: int, event: LiveEvent) -> None:
        self._endings[index].update(event)
        for delta in () if isinstance(event, Admitted) else event.deltas:
            if delta.channel == "content":
                self._texts[index].append(delta.text)
                self._entries[index] += self._logprobs(delta)
            elif not self._hides_reasoning:
                self._thoughts[index].append(delta.text)

    def answer(self) -> dict[str, Any]:
        usage = usage_object([ending.usage for ending in self._endings])
        return {
            **self._head.fields("chat.completion"),
            "choices": [self._choice(index) for index in range(len(self._endings))],
            "usage": usage,
            "timings": timings_object(timings_of(self._endings), usage["completion_tokens"]),
        }

    def _logprobs(self, delta: OutputDelta) -> list[dict[str, Any]]:
        if not self._wants_logprobs:
            return []
        return [chat_logprob_entry(token, self._frontend.token_bytes) for token in delta.tokens]

    def _choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(self._texts[index]),
            "refusal": None,
        }
        thoughts = "".join(self._thoughts[index])
        if thoughts:
            message["reasoning_content"] = thoughts
        finish = self._endings[index].require_finish()
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs_object(self._entries[index]) if self._wants_logprobs else None,
            "finish_reason": finish_reason(finish),
            "stop_reason": finish.matched,
        }


class ChunkWriter(OpenAIStreamStyle):
    """Turns events into `chat.completion.chunk` frames.

    Logprobs travel with the chunk that carries their text; those of tokens without a text of
    their own wait for the next chunk of their choice.
    """

    def __init__(self, head: AnswerHead, request: ChatRequest, frontend: Frontend) -> None:
        self._base = head.fields("chat.completion.chunk")
        self._request = request
        self._frontend = frontend
        self._wants_logprobs = request.params.top_logprobs is not None
        self._endings = [Ending() for _ in range(request.num_choices)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(request.num_choices)]
        self._templates: dict[tuple[int, str], FrameTemplate] = {}

    def opening(self) -> list[bytes]:
        """Role chunks of all choices, in order: accumulators use the index as a list position."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(self._choice(index, delta)) for index in range(len(self._endings))]

    def frames(self, index: int, event: LiveEvent) -> list[bytes]:
        """What one event makes visible, maybe nothing."""
        self._endings[index].update(event)
        if isinstance(event, Admitted):
            return []
        frames = [frame for delta in event.deltas for frame in self._delta_frames(index, delta)]
        if isinstance(event, Finished):
            frames.append(self._finish_frame(index, event.finish))
        return frames

    def closing(self) -> list[bytes]:
        """The usage chunk, if asked for, and the closing mark."""
        if not self._request.include_usage:
            return [DONE_FRAME]
        usage = self._usage()
        chunk = {**self._base, "choices": [], "usage": usage, "timings": self._timings()}
        return [data_frame(chunk), DONE_FRAME]

    def _delta_frames(self, index: int, delta: OutputDelta) -> list[bytes]:
        if delta.channel == "reasoning":
            if not delta.text or self._request.hide_reasoning:
                return []
            return [self._text_chunk(index, "reasoning_content", delta.text)]
        if self._wants_logprobs:
            token_bytes = self._frontend.token_bytes
            self._entries[index] += [
                chat_logprob_entry(token, token_bytes) for token in delta.tokens
            ]
        if not delta.text:
            return []
        if not self._entries[index]:
            return [self._text_chunk(index, "content", delta.text)]
        choice = self._choice(index, {"content": delta.text})
        choice["logprobs"] = self._take_logprobs(index)
        return [self._chunk(choice)]

    def _text_chunk(self, index: int, key: str, text: str) -> bytes:
        """By far most chunks are of this kind."""

        def frame_of(some_text: str) -> bytes:
            return self._chunk(self._choice(index, {key: some_text}))

        if self._request.continuous_usage:
            return frame_of(text)
        template = self._templates.get((index, key))
        if template is None:
            template = self._templates[index, key] = FrameTemplate(frame_of)
        return template.fill(text)

    def _finish_frame(self, index: int, finish: Finish) -> bytes:
        choice = self._choice(index, {})
        choice["logprobs"] = self._take_logprobs(index)
        choice["finish_reason"] = finish_reason(finish)
        choice["stop_reason"] = finish.matched
        is_last = all(ending.finish is not None for ending in self._endings)
        if is_last and not self._request.include_usage:
            return self._chunk(choice, {"timings": self._timings()})
        return self._chunk(choice)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._base, "choices": [choice]}
        if self._request.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._request.include_usage:
            chunk["usage"] = None
        if extra:
            chunk |= extra
        return data_frame(chunk)

    def _take_logprobs(self, index: int) -> dict[str, Any] | None:
        entries = self._entries[index]
        if not entries:
            return None
        self._entries[index] = []
        return _logprobs_object(entries)

    def _usage(self) -> dict[str, Any]:
        return usage_object([ending.usage for ending in self._endings])

    def _timings(self) -> dict[str, Any]:
        return timings_object(timings_of(self._endings), self._usage()["completion_tokens"])


def _logprobs_object(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}
