"""The table of routes, as they are documented; a test holds it against the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ninfer.gateway.openapi.schema import Schema, integer, string
from ninfer.gateway.responses.item_pages import MAX_LIMIT, ORDERS
from ninfer.gateway.router import normalise_path

HTML: Final = "text/html"
TEXT: Final = "text/plain"
ANY: Final = "*/*"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    path      as clients call it, with `/v1` where that is usual; `{...}` stands for what varies
    answer    the schema of a good answer, or its media type where that is not JSON
    request   the schema of the body, if there is one
    streams   the answer is a stream of events where the body says `stream`
    is_open   no API key is asked for
    query     parameters of the query
    failures  further statuses with the same kind of body as a good answer
    page      the media type that browsers are answered with
    """

    method: str
    path: str
    tag: str
    summary: str
    answer: str
    request: str | None = None
    streams: bool = False
    is_open: bool = False
    query: Mapping[str, Schema] = field(default_factory=dict)
    failures: tuple[int, ...] = ()
    page: str | None = None


_ITEM_QUERY: Final[Mapping[str, Schema]] = {
    "limit": integer(1, MAX_LIMIT),
    "order": string(*ORDERS),
    "after": string(),
}
_GENERATION: Final = (
    Operation("POST", "/v1/chat/completions", "OpenAI", "Answer a conversation.", "ChatCompletion",
        "ChatRequest", streams=True),
    Operation("POST", "/v1/completions", "OpenAI", "Continue raw text or token ids.", "Completion",
        "CompletionRequest", streams=True),
    Operation("POST", "/v1/responses", "OpenAI", "Answer input items; keep the response.",
        "Response", "ResponsesRequest", streams=True),
    Operation("POST", "/v1/responses/input_tokens", "OpenAI", "Count the tokens of the input.",
        "ResponseTokens", "ResponsesRequest"),
    Operation("GET", "/v1/responses/{id}", "OpenAI", "A kept response.", "Response"),
    Operation("DELETE", "/v1/responses/{id}", "OpenAI", "Forget a response.", "ResponseDeleted"),
    Operation("GET", "/v1/responses/{id}/input_items", "OpenAI", "What a response answers.",
        "ItemList", query=_ITEM_QUERY),
    Operation("POST", "/v1/responses/{id}/cancel", "OpenAI",
        "Refused: responses are made while the client waits.", "Response"),
    Operation("POST", "/v1/messages", "Anthropic", "Answer a conversation.", "Message",
        "MessagesRequest", streams=True),
    Operation("POST", "/v1/messages/count_tokens", "Anthropic", "Count the tokens of a prompt.",
        "MessageTokens", "MessagesRequest"),
    Operation("POST", "/generate", "native", "Continue raw text or token ids.", "Generated",
        "GenerateRequest", streams=True),
    Operation("POST", "/tokenize", "native", "The tokens of a text or a conversation.", "Tokens",
        "TokenizeRequest"),
    Operation("POST", "/detokenize", "native", "The text of tokens.", "Text", "DetokenizeRequest"),
    Operation("POST", "/apply-template", "native", "The text that a conversation becomes.",
        "Rendered", "ChatRequest"),
)  # fmt: skip
_OPERATION: Final = (
    Operation("GET", "/v1/models", "models", "The model, once for each of its names.", "ModelList"),
    Operation("GET", "/v1/models/{path}", "models", "One of the names; it may contain slashes.",
        "Model"),
    Operation("GET", "/health", "operation", "Whether requests are welcome.", "Health",
        is_open=True, failures=(503,)),
    Operation("GET", "/ready", "operation", "The same as /health.", "Health",
        is_open=True, failures=(503,)),
    Operation("GET", "/live", "operation", "Whether the process answers.", "Live", is_open=True),
    Operation("GET", "/version", "operation", "The version of the server.", "Version"),
    Operation("GET", "/v1/status", "operation", "What the page shows of the server.", "Status"),
    Operation("GET", "/v1/load", "operation", "How busy the server is, for routers.", "Load"),
    Operation("GET", "/server_info", "operation", "Versions, device, memory plan, options.",
        "ServerInfo"),
    Operation("GET", "/get_server_info", "operation", "The same as /server_info.", "ServerInfo"),
    Operation("GET", "/metrics", "operation", "Figures for Prometheus.", TEXT),
    Operation("POST", "/flush_cache", "operation", "Empty the context cache.", "Done"),
    Operation("POST", "/abort_request", "operation", "End running requests.", "Aborted",
        "AbortRequest"),
    Operation("GET", "/openapi.json", "operation", "This document.", "OpenApi"),
    Operation("GET", "/", "page", "The page: a conversation and the server's status.", "Index",
        is_open=True, page=HTML),
    Operation("GET", "/page/{path}", "page", "Files of the page.", ANY, is_open=True),
)  # fmt: skip
OPERATIONS: Final = (*_GENERATION, *_OPERATION)
PUBLISHED_PATHS: Final[Mapping[str, str]] = {
    normalise_path(item.path): item.path for item in OPERATIONS
}
"""Routes as the router names them -> paths as clients call them."""
