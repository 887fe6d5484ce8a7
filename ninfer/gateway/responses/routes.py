"""/v1/responses and what stands below it.

create: read, check -> prepare the prompt -> submit -> (admitted) -> answer -> keep
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from aiohttp import web

from ninfer.contract.chat import Frontend
from ninfer.contract.errors import RequestError
from ninfer.contract.generation import GenerationRequest
from ninfer.gateway.answers import collect_answer, stream_answer
from ninfer.gateway.choices import Choices, build_requests
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields, unsupported_parameter
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.responses.answer import (
    ResponseAnswer,
    ResponseBuilder,
    ResponseHead,
    ResponseWriter,
)
from ninfer.gateway.responses.item_pages import item_page
from ninfer.gateway.responses.output_recorder import OutputRecorder
from ninfer.gateway.responses.preparation import prepare
from ninfer.gateway.responses.request import ResponsesRequest, parse_responses_request
from ninfer.gateway.responses.store import ResponseStore


class ResponsesApi:
    """The handlers of one server, around what it keeps."""

    def __init__(self, store: ResponseStore | None = None) -> None:
        self._store = store or ResponseStore()

    async def create(self, exchange: Exchange) -> web.StreamResponse:
        """Raises RequestError, Unavailable and what the engine reports before a stream begins."""
        model = exchange.lifecycle.require_model()
        request = await _read(exchange, model, model.frontend)
        name = exchange.check_model(request.model)
        prepared = await prepare(exchange, model.frontend, self._store, request)
        requests = build_requests(model, prepared.response_id, prepared.prompt, prepared.params, 1)
        head = _head(prepared.response_id, name, request, requests[0])
        recorder = OutputRecorder(request.view, request.tools, model.frontend.token_bytes)
        answer = ResponseAnswer(head, recorder, prepared.keep)
        async with Choices(model.engine, requests, exchange) as choices:
            if request.stream:
                return await stream_answer(exchange, ResponseWriter(answer), choices)
            return await collect_answer(exchange, ResponseBuilder(answer), choices)

    async def count_tokens(self, exchange: Exchange) -> web.StreamResponse:
        """Tokens of the prompt that the same request to create a response would have, also where
        they exceed the context: clients decide by it what to leave out."""
        model = exchange.lifecycle.require_model()
        frontend = model.frontend.for_context(None)
        request = await _read(exchange, model, frontend)
        exchange.check_model(request.model)
        counted = replace(request, store=False)
        prepared = await prepare(exchange, frontend, self._store, counted)
        num_tokens = prepared.prompt.num_tokens
        return exchange.json({"object": "response.input_tokens", "input_tokens": num_tokens})

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
        turn, query = stored.turn, exchange.request.query
        num_bytes = sum(part.num_bytes for part in turn.path())
        if num_bytes > exchange.limits.thread_above_bytes:
            return exchange.json(await asyncio.to_thread(item_page, turn, query))
        return exchange.json(item_page(turn, query))

    async def cancel(self, exchange: Exchange) -> web.StreamResponse:
        """Nothing runs in the background. Raises RequestError always."""
        self._store.get(_response_id(exchange))
        raise RequestError(
            "invalid_value", "Only a response made in the background can be cancelled."
        )


async def _read(exchange: Exchange, model: ServedModel, frontend: Frontend) -> ResponsesRequest:
    session, vocab_size = exchange.session_id, frontend.vocab_size
    takes_media = model.card.has_vision

    def parse(fields: Fields) -> ResponsesRequest:
        items = fields.get("input")
        if isinstance(items, list):
            frontend.check_num_messages(len(items), "input")
        return parse_responses_request(fields, vocab_size, session, takes_media=takes_media)

    return await exchange.read(parse)


def _head(
    response_id: str, model: str, request: ResponsesRequest, generation: GenerationRequest
) -> ResponseHead:
    sampling = generation.sampling
    echo = {**request.echo, "temperature": sampling.temperature, "top_p": sampling.top_p}
    return ResponseHead(response_id, model, int(time.time()), echo)


def _response_id(exchange: Exchange) -> str:
    return exchange.path.split("/")[2]
