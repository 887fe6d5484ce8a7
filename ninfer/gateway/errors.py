"""Errors as clients see them: one table from code to status and type, and the error objects.

The path decides which API family's object is sent: Anthropic's under /v1/messages, OpenAI's
everywhere else. Nothing here puts a file's path, a stack trace or prompt text into an answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from ninfer.contract.errors import ContextLengthError, NInferError, RequestError, Unavailable

MAX_RETRY_AFTER_S: Final = 60


class ErrorFamily(Enum):
    """Whose error objects a path speaks."""

    OPENAI = auto()
    ANTHROPIC = auto()


def family_of(path: str | None) -> ErrorFamily:
    """The family of a request path, with or without `/v1`; OpenAI's when it is not known."""
    names = [name for name in (path or "").split("/") if name]
    while names[:1] == ["v1"]:
        del names[0]
    return ErrorFamily.ANTHROPIC if names[:1] == ["messages"] else ErrorFamily.OPENAI


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """How one code is answered.

    code          public code, where it is not the error's own
    message       public text, where the error's own may speak of our insides
    should_retry  the `x-should-retry` header, which client libraries obey; None: not sent
    """

    status: int
    type: str
    code: str | None = None
    message: str | None = None
    should_retry: bool | None = None


_BAD_REQUEST: Final = ErrorRule(400, "invalid_request_error")
_OVERLOADED: Final = ErrorRule(429, "rate_limit_error", should_retry=True)
_UNAVAILABLE: Final = ErrorRule(503, "server_error", should_retry=True)
_INTERNAL: Final = ErrorRule(
    500, "server_error", code="internal_error", message="The server failed on this request."
)

ERROR_RULES: Final[Mapping[str, ErrorRule]] = {
    "constraint_dead_end": _BAD_REQUEST,
    "context_length_exceeded": _BAD_REQUEST,
    "invalid_grammar": _BAD_REQUEST,
    "invalid_json": _BAD_REQUEST,
    "invalid_json_schema": _BAD_REQUEST,
    "invalid_prompt": _BAD_REQUEST,
    "invalid_template": _BAD_REQUEST,
    "invalid_type": _BAD_REQUEST,
    "invalid_value": _BAD_REQUEST,
    "missing_required_parameter": _BAD_REQUEST,
    "model_not_found": ErrorRule(404, "invalid_request_error"),
    "schema_too_complex": _BAD_REQUEST,
    "tokenizer_unavailable": _BAD_REQUEST,
    "unsupported_parameter": _BAD_REQUEST,
    "unsupported_value": _BAD_REQUEST,
    # Raised by the gateway itself.
    "invalid_http": _BAD_REQUEST,
    "invalid_media": _BAD_REQUEST,
    "media_budget_exceeded": _BAD_REQUEST,
    "remote_media_disabled": _BAD_REQUEST,
    "invalid_request_encoding": _BAD_REQUEST,
    "headers_too_large": ErrorRule(431, "invalid_request_error"),
    "item_not_found": ErrorRule(404, "invalid_request_error"),
    "invalid_api_key": ErrorRule(401, "invalid_request_error"),
    "method_not_allowed": ErrorRule(405, "invalid_request_error"),
    "not_found": ErrorRule(404, "invalid_request_error"),
    "response_not_found": ErrorRule(404, "invalid_request_error"),
    "request_aborted": ErrorRule(499, "invalid_request_error", should_retry=False),
    "request_timeout": ErrorRule(408, "invalid_request_error"),
    "request_too_large": ErrorRule(413, "invalid_request_error"),
    "uri_too_long": ErrorRule(414, "invalid_request_error"),
    "unsupported_content_encoding": ErrorRule(415, "invalid_request_error"),
    "thread_unsupported_request": _BAD_REQUEST,
    "unsupported_media_type": ErrorRule(415, "invalid_request_error"),
    # The one status above 499 for a request's fault: HTTP demands it.
    "unsupported_transfer_encoding": ErrorRule(501, "invalid_request_error", should_retry=False),
    # Not the client's fault.
    "deadline_exceeded": ErrorRule(408, "timeout_error", should_retry=False),
    "engine_unavailable": _UNAVAILABLE,
    "model_loading": _UNAVAILABLE,
    "request_queue_timeout": _UNAVAILABLE,
    "server_draining": _UNAVAILABLE,
    "server_overloaded": _OVERLOADED,
    "device_error": ErrorRule(
        503,
        "server_error",
        code="engine_unavailable",
        message="The device that runs the model failed.",
        should_retry=True,
    ),
    "internal_error": _INTERNAL,
    "invalid_model_file": _INTERNAL,
    "invalid_option": _INTERNAL,
    "output_error": _INTERNAL,
    "non_finite_logits": ErrorRule(
        500,
        "server_error",
        code="internal_error",
        message="The model's output for this request was not finite.",
        should_retry=False,
    ),
}


_ANTHROPIC_STATUSES: Final[Mapping[str, int]] = {
    "request_queue_timeout": 504,
    "server_overloaded": 529,
}
"""Where that family has a status of its own for a code."""
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""By status; other 4xx are `invalid_request_error`, other 5xx `api_error`."""
_ANTHROPIC_CODES: Final = frozenset({"thread_unsupported_request"})
"""Codes that this family's clients act upon; they stand in `error.details`."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """`body` is the whole JSON object: `{"error": {message, type, param, code}}`, or
    `{"type": "error", "error": {type, message}, "request_id"}` in Anthropic's family."""

    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class RoutingError(RequestError):
    """A RequestError that needs headers of its own, such as `Allow`."""

    def __init__(self, code: str, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(code, message)
        self.headers = headers


def is_expected(error: BaseException) -> bool:
    """Whether the error says something about the request or the load, not about a fault of ours."""
    return isinstance(error, RequestError | Unavailable)


def describe_error(
    error: BaseException,
    family: ErrorFamily = ErrorFamily.OPENAI,
    request_id: str | None = None,
) -> ErrorAnswer:
    """What a client is told of any exception. `request_id`: of the exchange, where there is one."""
    own_code = error.code if isinstance(error, NInferError) else "internal_error"
    rule = ERROR_RULES.get(own_code, _INTERNAL)
    headers = _headers(error, rule)
    message = rule.message or (error.message if isinstance(error, NInferError) else "")
    if family is ErrorFamily.ANTHROPIC:
        status = _ANTHROPIC_STATUSES.get(own_code, rule.status)
        if isinstance(error, ContextLengthError):
            message = f"{error.overflow}. {error.advice}"
        body = _anthropic_body(status, message, request_id)
        if own_code in _ANTHROPIC_CODES:
            body["error"]["details"] = {"error_code": own_code}
        return ErrorAnswer(status, body, headers)
    param = error.param if isinstance(error, RequestError) else None
    body = {
        "error": {
            "message": message,
            "type": rule.type,
            "param": param,
            "code": rule.code or own_code,
        }
    }
    return ErrorAnswer(rule.status, body, headers)


def _anthropic_body(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    other = "invalid_request_error" if status < 500 else "api_error"
    error = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def _headers(error: BaseException, rule: ErrorRule) -> dict[str, str]:
    headers = dict(error.headers) if isinstance(error, RoutingError) else {}
    if rule.should_retry is not None:
        headers["x-should-retry"] = "true" if rule.should_retry else "false"
    if rule.status in (429, 503):
        estimate_s = error.retry_after_s if isinstance(error, Unavailable) else None
        headers |= retry_after_header(estimate_s)
    return headers


def retry_after_header(estimate_s: float | None) -> dict[str, str]:
    """When to ask again, in whole seconds from 1 to MAX_RETRY_AFTER_S. None: not known."""
    return {"Retry-After": str(_retry_after(estimate_s))}


def _retry_after(estimate_s: float | None) -> int:
    if estimate_s is None or not math.isfinite(estimate_s):
        return 1
    return min(max(math.ceil(estimate_s), 1), MAX_RETRY_AFTER_S)
