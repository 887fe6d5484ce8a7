"""From a request that was read to a prompt: the history behind it, its turns, tokens, its place.

find history -> read the turns -> fetch media -> render, tokenise -> write down what is to be kept

What may take long, reading and writing down, is done in a thread then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from ninfer.contract.chat import ChatMessage, ChatPrompt, Frontend, GenerationParams
from ninfer.contract.errors import RequestError
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.request_ids import new_id
from ninfer.gateway.responses.history import History, find_history, read_conversation
from ninfer.gateway.responses.input_items import InputItem
from ninfer.gateway.responses.request import ResponsesRequest
from ninfer.gateway.responses.store import ResponseStore
from ninfer.gateway.responses.stored_items import StoredInput, stored_input, stored_response
from ninfer.gateway.responses.stored_media import said_with_files

T = TypeVar("T")
_FIELD_OF_PROMPT: Final = "input"


@dataclass(frozen=True, slots=True)
class Preparation:
    """`keep` is to be given the response when it has ended; None: it is not to be stored."""

    response_id: str
    prompt: PreparedPrompt
    params: GenerationParams
    keep: Callable[[dict[str, Any]], None] | None = None


async def prepare(
    exchange: Exchange, frontend: Frontend, store: ResponseStore, request: ResponsesRequest
) -> Preparation:
    """Raises RequestError; what the prompt has wrong is in `input`, where its messages came in."""
    history = find_history(store, request)
    response_id = new_id("resp_")
    run = _in_thread if _is_long(exchange, history) else _at_once
    conversation = await run(partial(read_conversation, history, request))
    chat = ChatPrompt(
        messages=conversation.messages,
        tools=request.tools.template_objects(),
        tools_end_prefix=request.tools_end_prefix,
        template_kwargs=request.template_kwargs,
    )
    chat = await exchange.acquire_media(chat, conversation.media)
    prompt = await _render(frontend, chat)
    params = _with_session(request.params, history)
    if not request.store:
        return Preparation(response_id, prompt, params)
    said = await run(partial(_stored_input, response_id, conversation.said, chat.messages))
    keep = _keeper(store, history, said, params.cache.session_key or response_id)
    return Preparation(response_id, prompt, params, keep)


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)


async def _at_once(work: Callable[[], T]) -> T:
    return work()


def _stored_input(
    response_id: str, said: Sequence[InputItem], messages: Sequence[ChatMessage]
) -> StoredInput:
    return stored_input(response_id, said_with_files(said, messages))


def _is_long(exchange: Exchange, history: History) -> bool:
    """As bodies are: compressed ones and those of unknown length may be."""
    length = exchange.request.content_length
    is_packed = "Content-Encoding" in exchange.request.headers
    most = exchange.limits.thread_above_bytes
    return length is None or is_packed or length + history.num_bytes > most


async def _render(frontend: Frontend, chat: ChatPrompt) -> PreparedPrompt:
    try:
        prompt = await frontend.prepare_chat(chat)
    except RequestError as error:
        error.param = _FIELD_OF_PROMPT
        raise
    return replace(prompt, param=_FIELD_OF_PROMPT)


def _with_session(params: GenerationParams, history: History) -> GenerationParams:
    """A conversation that goes on without a name of its own has that of its history."""
    if params.cache.session_key is not None or history.session_key is None:
        return params
    return replace(params, cache=replace(params.cache, session_key=history.session_key))


def _keeper(
    store: ResponseStore, history: History, said: StoredInput, session_key: str
) -> Callable[[dict[str, Any]], None]:
    def keep(response: dict[str, Any]) -> None:
        stored = stored_response(history.before, said, response, session_key)
        store.put(response["id"], stored)

    return keep
