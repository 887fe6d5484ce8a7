"""The document itself: built once from the tables beside it."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson
from aiohttp import web

import ninfer
from ninfer.gateway.errors import ErrorFamily, family_of
from ninfer.gateway.exchange import Exchange
from ninfer.gateway.openapi.answers import ANSWERS, ANTHROPIC_ERROR, OPENAI_ERROR
from ninfer.gateway.openapi.operations import OPERATIONS, Operation
from ninfer.gateway.openapi.requests import REQUESTS
from ninfer.gateway.openapi.schema import Schema, ref, string

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_DESCRIPTION: Final = (
    "Every path works with and without /v1, HEAD is answered where GET is, OPTIONS everywhere."
    " Bodies may come with Content-Encoding zstd, gzip or deflate. Fields that are not listed are"
    " ignored or, where they would change what an answer means, refused; null is the same as"
    " absent."
)
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_KEY_SCHEMES: Final[dict[str, Schema]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class OpenApiDocument:
    """`/openapi.json`, the same for every request."""

    def __init__(self) -> None:
        self._text = orjson.dumps(openapi_document())

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        return exchange.text(self._text, _JSON)


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ninfer",
            "version": ninfer.__version__,
            "description": _DESCRIPTION,
        },
        "paths": paths,
        "components": {
            "schemas": {**REQUESTS, **ANSWERS},
            "securitySchemes": _KEY_SCHEMES,
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation)],
        "responses": _responses(operation),
        # No key, or one in either style: whether one is needed is the server's to say.
        "security": [] if operation.is_open else [{}, *({name: []} for name in _KEY_SCHEMES)],
    }
    if operation.request is not None:
        content = {_JSON: {"schema": ref(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"\w+", operation.path.removeprefix("/v1")) or ["page"]
    return "_".join([operation.method.lower(), *words])


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": string(shortest=1)}
        for name in _PLACEHOLDER.findall(path)
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]


def _responses(operation: Operation) -> dict[str, Any]:
    is_json = operation.answer in ANSWERS
    content: dict[str, Any] = (
        {_JSON: {"schema": ref(operation.answer)}} if is_json else {operation.answer: {}}
    )
    if operation.page is not None:
        content[operation.page] = {}
    good: dict[str, Any] = {"description": "Done.", "content": dict(content)}
    if operation.streams:
        good["content"][_EVENTS] = {"schema": ref("Event")}
    is_anthropic = family_of(operation.path) is ErrorFamily.ANTHROPIC
    error = {
        "description": "An error that says what is wrong, and of which field.",
        "content": {_JSON: {"schema": ref(ANTHROPIC_ERROR if is_anthropic else OPENAI_ERROR)}},
    }
    others = {str(status): {"description": "Not now.", "content": content}
              for status in operation.failures}  # fmt: skip
    return {"200": good, **others, "4XX": error, "5XX": error}
