"""/tokenize, /detokenize and /apply-template: the prompt path without a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from ninfer.contract.chat import Frontend
from ninfer.contract.errors import RequestError
from ninfer.gateway.chat_request import ChatRequest, parse_chat_request
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.fields import Fields, invalid_value, missing
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.off_loop import MANY_TOKENS, off_the_loop
from ninfer.gateway.prompt_fields import parse_token_ids

_SOURCES: Final = ("messages", "prompt", "content")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """`source` is a conversation or raw text, and `path` the field it came in.

    parses_special   special tokens in raw text are parsed
    wants_pieces     tokens are objects with their text, or their bytes where these are no text
    wants_texts      the answer has a list of the tokens' texts
    """

    source: ChatRequest | str
    path: str
    parses_special: bool
    wants_pieces: bool
    wants_texts: bool


async def tokenize(exchange: Exchange) -> web.StreamResponse:
    """Texts may be longer than the context: whoever wants to cut one has to know its length."""
    model = exchange.lifecycle.require_model()
    frontend, read_chat = model.frontend, _chat_reader(exchange, model)

    def parse(fields: Fields) -> TokenizeRequest:
        return _parse_tokenize(fields, read_chat)

    request = await exchange.read(parse)
    token_ids = await _token_ids(exchange, frontend.for_context(None), request)

    def answer() -> dict[str, Any]:
        return _token_lists(token_ids, request, frontend)

    lists = await off_the_loop(answer, is_long=len(token_ids) > MANY_TOKENS)
    head = {"count": len(token_ids), "max_model_len": model.card.max_context}
    return exchange.json({**lists, **head})


async def detokenize(exchange: Exchange) -> web.StreamResponse:
    """Bytes that are no text are replaced."""
    frontend = exchange.lifecycle.require_model().frontend

    def parse(fields: Fields) -> list[int]:
        return _parse_tokens(fields, frontend.vocab_size)

    token_ids = await exchange.read(parse)
    if not frontend.has_tokenizer:
        raise RequestError("tokenizer_unavailable", "This model has no tokenizer.", "tokens")

    def decode() -> str:
        return b"".join(map(frontend.token_bytes, token_ids)).decode("utf-8", "replace")

    text = await off_the_loop(decode, is_long=len(token_ids) > MANY_TOKENS)
    return exchange.json({"prompt": text, "content": text})


async def apply_template(exchange: Exchange) -> web.StreamResponse:
    """The text that a chat request with the same fields would have tokenised."""
    model = exchange.lifecycle.require_model()
    request = await exchange.read(_chat_reader(exchange, model))
    chat = await exchange.acquire_media(request.chat, request.media)
    return exchange.json({"prompt": await model.frontend.render_chat(chat)})


def _chat_reader(exchange: Exchange, model: ServedModel) -> Callable[[Fields], ChatRequest]:
    """Reads a conversation with all that a chat request may say of it."""
    vocab_size, session = model.frontend.vocab_size, exchange.session_id
    takes_media = model.card.has_vision
    return lambda fields: parse_chat_request(fields, vocab_size, session, takes_media=takes_media)


def _parse_tokenize(fields: Fields, read_chat: Callable[[Fields], ChatRequest]) -> TokenizeRequest:
    for name in ("add_special_tokens", "add_special"):
        fields.boolean(name)
    given = [name for name in _SOURCES if fields.has(name)]
    if not given:
        raise missing(fields.path_of("prompt"))
    if len(given) > 1:
        raise invalid_value(fields.path_of(given[1]), f"excludes {given[0]}")
    is_chat = given[0] == "messages"
    return TokenizeRequest(
        source=read_chat(fields) if is_chat else fields.string(given[0]) or "",
        path=fields.path_of(given[0]),
        parses_special=fields.boolean("parse_special") is not False,
        wants_pieces=fields.flag("with_pieces"),
        wants_texts=fields.flag("return_token_strs"),
    )


def _parse_tokens(fields: Fields, vocab_size: int) -> list[int]:
    tokens = fields.sequence("tokens")
    if tokens is None:
        raise missing(fields.path_of("tokens"))
    return list(parse_token_ids(tokens, fields.path_of("tokens"), vocab_size)) if tokens else []


async def _token_ids(exchange: Exchange, frontend: Frontend, request: TokenizeRequest) -> list[int]:
    if request.source == "":
        return []
    if isinstance(request.source, str):
        prompt = await frontend.prepare_text(
            request.source, request.path, parses_special=request.parses_special
        )
    else:
        chat = await exchange.acquire_media(request.source.chat, request.source.media)
        prompt = await frontend.prepare_chat(chat)
    token_ids: list[int] = prompt.token_ids.tolist()
    return token_ids


def _token_lists(
    token_ids: list[int], request: TokenizeRequest, frontend: Frontend
) -> dict[str, Any]:
    lists: dict[str, Any] = {"tokens": token_ids}
    if request.wants_pieces:
        lists["tokens"] = [
            {"id": token_id, "piece": _piece(frontend.token_bytes(token_id))}
            for token_id in token_ids
        ]
    if request.wants_texts:
        lists["token_strs"] = [frontend.token_text(token_id) for token_id in token_ids]
    return lists


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
