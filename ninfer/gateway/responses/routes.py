"""/v1/responses and what stands below it.

create: read, check -> resolve history -> render, tokenise -> submit -> (admitted) -> answer -> keep
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from ninfer.contract.chat import ChatPrompt, Frontend, GenerationParams
from ninfer.contract.errors import RequestError
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.answers import collect_answer, stream_answer
from ninfer.gateway.choices import Choices, build_requests
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields, unsupported_parameter
from ninfer.gateway.request_ids import new_id
from ninfer.gateway.responses.answer import (
    ResponseAnswer,
    ResponseBuilder,
    ResponseHead,
    ResponseWriter,
)
from ninfer.gateway.responses.history import History, find_history, messages_of, said_items
from ninfer.gateway.responses.item_pages import item_page
from ninfer.gateway.responses.output_recorder import OutputRecorder
from ninfer.gateway.responses.request import ResponsesRequest, parse_responses_request
from ninfer.gateway.responses.store import ResponseStore
from ninfer.gateway.responses.stored_items import stored_response

_FIELD_OF_PROMPT = "input"


class ResponsesApi:
    """The handlers of one server, around what it keeps."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = store or ResponseStore()

    async def create(self, exchange: Exchange) -> web.StreamResponse:
        """Raises RequestError, Unavailable and what the engine reports before a stream begins."""
        model = exchange.lifecycle.require_model()
        request = await self._read(exchange, model.frontend)
        name = exchange.check_model(request.model)
        history = find_history(self._store, request)
        prompt = await _prepare(exchange, model.frontend, request, history)
        response_id = new_id("resp_")
        params = _with_session(request, history)
        requests = build_requests(model, response_id, prompt, params, 1)
        head = _head(response_id, name, request, requests[0])
        recorder = OutputRecorder(request.view, request.tools, model.frontend.token_bytes)
        keep = self._keeper(request, history, response_id)
        answer = ResponseAnswer(head, recorder, keep)
        async with Choices(model.engine, requests, exchange) as choices:
            if request.stream:
                return await stream_answer(exchange, ResponseWriter(answer), choices)
            return await collect_answer(exchange, ResponseBuilder(answer), choices)

    async def count_tokens(self, exchange: Exchange) -> web.StreamResponse:
        """Tokens of the prompt that the same request to create a response would have."""
        model = exchange.lifecycle.require_model()
        request = await self._read(exchange, model.frontend)
        exchange.check_model(request.model)
        history = find_history(self._store, request)
        prompt = await _prepare(exchange, model.frontend, request, history)
        return exchange.json({"object": "response.input_tokens", "input_tokens": prompt.num_tokens})

    async def retrieve(self, exchange: Exchange) -> web.StreamResponse:
        stored = self._store.get(_response_id(exchange))
        if exchange.request.query.get("stream", "").lower() in ("true", "1"):
            raise unsupported_parameter("stream", "a stored response is one object")
        return exchange.text(stored.body, "application/json")

    async def delete(self, exchange: Exchange) -> web.StreamResponse:
        response_id = _response_id(exchange)
        self._store.delete(response_id)
        return exchange.json({"id": response_id, "object": "response.deleted", "deleted": True})

    async def input_items(self, exchange: Exchange) -> web.StreamResponse:
        """What the response was made from: earlier turns and the request's own items."""
        stored = self._store.get(_response_id(exchange))
        return exchange.json(item_page(stored.turn, exchange.request.query))

    async def cancel(self, exchange: Exchange) -> web.StreamResponse:
        """Nothing runs in the background. Raises RequestError always."""
        self._store.get(_response_id(exchange))
        raise RequestError(
            "invalid_value", "Only a response made in the background can be cancelled."
        )

    async def _read(self, exchange: Exchange, frontend: Frontend) -> ResponsesRequest:
        session = exchange.session_id

        def parse(fields: Fields) -> ResponsesRequest:
            return parse_responses_request(fields, frontend.vocab_size, session)

        return await exchange.read(parse)

    def _keeper(
        self, request: ResponsesRequest, history: History, response_id: str
    ) -> Callable[[dict[str, Any]], None]:
        """Keeps the response once it has ended, unless the client does not want that."""
        session_key = request.params.cache.session_key or history.session_key or response_id
        said = said_items(history, request.items)

        def keep(response: dict[str, Any]) -> None:
            if request.store:
                stored = stored_response(history.before, said, response, session_key)
                self._store.put(response_id, stored)

        return keep


async def _prepare(
    exchange: Exchange, frontend: Frontend, request: ResponsesRequest, history: History
) -> PreparedPrompt:
    """The prompt. Its errors name `input`, where the messages came in."""
    if history.num_bytes > exchange.limits.thread_above_bytes:
        messages = await asyncio.to_thread(messages_of, history, request)
    else:
        messages = messages_of(history, request)
    chat = ChatPrompt(
        messages=messages,
        tools=request.tools.template_objects(),
        tools_end_prefix=request.tools_end_prefix,
        template_kwargs=request.template_kwargs,
    )
    try:
        prompt = await frontend.prepare_chat(chat)
    except RequestError as error:
        error.param = _FIELD_OF_PROMPT
        raise
    return replace(prompt, param=_FIELD_OF_PROMPT)


def _with_session(request: ResponsesRequest, history: History) -> GenerationParams:
    """A conversation that goes on without a name of its own has that of its history."""
    cache = request.params.cache
    if cache.session_key is not None or history.session_key is None:
        return request.params
    return replace(request.params, cache=replace(cache, session_key=history.session_key))


def _head(
    response_id: str, model: str, request: ResponsesRequest, generation: GenerationRequest
) -> ResponseHead:
    sampling = generation.sampling
    echo = {**request.echo, "temperature": sampling.temperature, "top_p": sampling.top_p}
    return ResponseHead(response_id, model, int(time.time()), echo)


def _response_id(exchange: Exchange) -> str:
    return exchange.path.split("/")[2]
