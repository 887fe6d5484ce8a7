"""/v1/chat/completions: answers whole or as a stream of chunks.

read, check -> render, tokenise -> submit -> (admitted) -> chunks | one object
"""

from __future__ import annotations

import time

from aiohttp import web

from ninfer.gateway.answers import AnswerHead, collect_answer, stream_answer
from ninfer.gateway.chat_answer import ChatForm, CompletionBuilder
from ninfer.gateway.chat_chunks import ChunkWriter
from ninfer.gateway.chat_request import ChatRequest, parse_chat_request
from ninfer.gateway.choices import Choices, build_requests
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields
from ninfer.gateway.request_ids import new_id


async def chat_completions(exchange: Exchange) -> web.StreamResponse:
    """Raises RequestError, Unavailable and what the engine reports before a stream has begun."""
    model = exchange.lifecycle.require_model()
    frontend = model.frontend
    session, takes_media = exchange.session_id, model.card.has_vision

    def parse(fields: Fields) -> ChatRequest:
        frontend.check_num_messages(len(fields.sequence("messages") or ()))
        vocab_size = frontend.vocab_size
        return parse_chat_request(fields, vocab_size, session, takes_media=takes_media)

    request = await exchange.read(parse)
    name = exchange.check_model(request.model)
    chat = await exchange.acquire_media(request.chat, request.media)
    prompt = await frontend.prepare_chat(chat)
    answer_id = new_id("chatcmpl-")
    requests = build_requests(model, answer_id, prompt, request.params, request.num_choices)
    head = AnswerHead(answer_id, name, model.card.fingerprint, int(time.time()))
    form = ChatForm.of(request, exchange.options.reasoning_field)
    async with Choices(model.engine, requests, exchange) as choices:
        if request.stream:
            return await stream_answer(exchange, ChunkWriter(head, form, frontend), choices)
        return await collect_answer(exchange, CompletionBuilder(head, form, frontend), choices)
