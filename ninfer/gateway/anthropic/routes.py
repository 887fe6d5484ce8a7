"""POST /v1/messages and /v1/messages/count_tokens.

read, check -> render, tokenise -> submit -> (admitted) -> events | one message
                                -> count
"""

from __future__ import annotations

from aiohttp import web

from ninfer.contract.chat import Frontend
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.answers import collect_answer, stream_answer
from ninfer.gateway.anthropic.answer import MessageBuilder, MessageHead, MessageWriter
from ninfer.gateway.anthropic.request import MessagesRequest, parse_messages_request
from ninfer.gateway.choices import Choices, build_requests
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields
from ninfer.gateway.request_ids import new_id


async def create_message(exchange: Exchange) -> web.StreamResponse:
    """Raises RequestError, Unavailable and what the engine reports before a stream has begun."""
    model = exchange.lifecycle.require_model()
    request = await _read(exchange, model.frontend)
    name = exchange.check_model(request.model)
    prompt = await _prepare(exchange, model.frontend, request)
    message_id = new_id("msg_")
    requests = build_requests(model, message_id, prompt, request.params, 1)
    head = MessageHead(message_id, name, exchange.request_id, request.hides_thinking)
    async with Choices(model.engine, requests, exchange) as choices:
        if request.stream:
            return await stream_answer(exchange, MessageWriter(head), choices)
        return await collect_answer(exchange, MessageBuilder(head), choices)


async def count_tokens(exchange: Exchange) -> web.StreamResponse:
    """How long the prompt of the same request would be, also where it exceeds the context: clients
    decide by it what to leave out. The engine is not asked, so the answer comes at once however
    many requests wait. Raises as `create_message` does."""
    model = exchange.lifecycle.require_model()
    frontend = model.frontend.for_context(None)
    request = await _read(exchange, frontend, is_count=True)
    exchange.check_model(request.model)
    prompt = await _prepare(exchange, frontend, request)
    return exchange.json({"input_tokens": prompt.num_tokens})


async def _read(
    exchange: Exchange, frontend: Frontend, *, is_count: bool = False
) -> MessagesRequest:
    vocab_size, session = frontend.vocab_size, exchange.session_id

    def parse(fields: Fields) -> MessagesRequest:
        frontend.check_num_messages(len(fields.sequence("messages") or ()))
        return parse_messages_request(fields, vocab_size, session, is_count=is_count)

    return await exchange.read(parse)


async def _prepare(
    exchange: Exchange, frontend: Frontend, request: MessagesRequest
) -> PreparedPrompt:
    chat = await exchange.acquire_media(request.chat, request.media)
    return await frontend.prepare_chat(chat)
