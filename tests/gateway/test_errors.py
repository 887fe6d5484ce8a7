"""Every code of the contract has a status, and answers have one shape."""

from __future__ import annotations

import pytest

from ninfer.contract import errors as contract_errors
from ninfer.contract.errors import (
    REQUEST_CODES,
    UNAVAILABLE_CODES,
    DeviceError,
    InvariantError,
    NInferError,
    NonFiniteLogits,
    RequestError,
    Unavailable,
    context_length_error,
)
from ninfer.gateway.errors import ERROR_RULES, ErrorFamily, describe_error, family_of


def own_codes() -> set[str]:
    classes = [item for item in vars(contract_errors).values() if isinstance(item, type)]
    return {item.code for item in classes if issubclass(item, NInferError)}


@pytest.mark.parametrize("code", sorted(REQUEST_CODES | UNAVAILABLE_CODES | own_codes()))
def test_every_code_of_the_contract_is_in_the_table(code: str) -> None:
    assert code in ERROR_RULES


@pytest.mark.parametrize("code", sorted(REQUEST_CODES))
def test_no_request_error_is_worth_a_retry(code: str) -> None:
    answer = describe_error(RequestError(code, "text", "messages[0]"))
    assert 400 <= answer.status < 500
    assert answer.status not in (408, 409, 422, 429)
    assert answer.body["error"] == {
        "message": "text",
        "type": "invalid_request_error",
        "param": "messages[0]",
        "code": code,
    }
    assert answer.headers == {}


@pytest.mark.parametrize(
    ("estimate_s", "header"),
    [(None, "1"), (0.0, "1"), (1.2, "2"), (59.5, "60"), (1e9, "60"), (float("inf"), "1")],
)
def test_retry_after_is_whole_seconds_within_a_minute(
    estimate_s: float | None, header: str
) -> None:
    for code in ("server_overloaded", "request_queue_timeout", "model_loading"):
        answer = describe_error(Unavailable(code, "later", estimate_s))
        assert answer.headers == {"Retry-After": header, "x-should-retry": "true"}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NonFiniteLogits("layer 3, /data/model"), 500, "internal_error"),
        (InvariantError("pages: /data/model"), 500, "internal_error"),
        (ValueError("/data/model"), 500, "internal_error"),
        (DeviceError("/data/model"), 503, "engine_unavailable"),
        (NInferError("/data/model"), 500, "internal_error"),
    ],
)
def test_our_own_failures_do_not_speak_of_our_insides(
    error: Exception, status: int, code: str
) -> None:
    answer = describe_error(error)
    assert answer.status == status
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}
    assert answer.body["error"]["code"] == code
    assert answer.body["error"]["message"]
    assert "/data" not in answer.body["error"]["message"]


def test_a_code_nobody_knows_is_an_internal_error() -> None:
    answer = describe_error(RequestError("no_such_code", "x"))
    assert answer.status == 500
    assert answer.body["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("/v1/messages", ErrorFamily.ANTHROPIC),
        ("/messages", ErrorFamily.ANTHROPIC),
        ("/messages/count_tokens", ErrorFamily.ANTHROPIC),
        ("/v1/v1/messages/batches/", ErrorFamily.ANTHROPIC),
        ("/v1/chat/completions", ErrorFamily.OPENAI),
        ("/v1/messagesx", ErrorFamily.OPENAI),
        ("/chat/messages", ErrorFamily.OPENAI),
        ("/", ErrorFamily.OPENAI),
        ("", ErrorFamily.OPENAI),
        (None, ErrorFamily.OPENAI),
    ],
)
def test_the_path_decides_whose_error_objects_are_sent(
    path: str | None, family: ErrorFamily
) -> None:
    assert family_of(path) is family


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("invalid_json", "x"), 400, "invalid_request_error"),
        (RequestError("unsupported_value", "x", "p"), 400, "invalid_request_error"),
        (RequestError("model_not_found", "x"), 404, "not_found_error"),
        (RequestError("not_found", "x"), 404, "not_found_error"),
        (RequestError("method_not_allowed", "x"), 405, "invalid_request_error"),
        (RequestError("request_timeout", "x"), 408, "timeout_error"),
        (RequestError("request_too_large", "x"), 413, "request_too_large"),
        (RequestError("unsupported_media_type", "x"), 415, "invalid_request_error"),
        (Unavailable("deadline_exceeded", "x"), 408, "timeout_error"),
        (Unavailable("server_overloaded", "x"), 529, "overloaded_error"),
        (Unavailable("request_queue_timeout", "x"), 504, "timeout_error"),
        (Unavailable("model_loading", "x"), 503, "api_error"),
        (Unavailable("server_draining", "x"), 503, "api_error"),
        (DeviceError("/data/model"), 503, "api_error"),
        (InvariantError("/data/model"), 500, "api_error"),
        (ValueError("/data/model"), 500, "api_error"),
    ],
)
def test_the_other_family_has_statuses_and_types_of_its_own(
    error: Exception, status: int, kind: str
) -> None:
    answer = describe_error(error, ErrorFamily.ANTHROPIC, "req_1")
    assert answer.status == status
    message = answer.body["error"]["message"]
    assert message
    assert "/data" not in message
    assert answer.body == {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": "req_1",
    }
    assert answer.headers == describe_error(error).headers


def test_waiting_is_worth_while_in_both_families() -> None:
    for code in ("server_overloaded", "request_queue_timeout", "model_loading"):
        answer = describe_error(Unavailable(code, "later", 7.0), ErrorFamily.ANTHROPIC)
        assert answer.headers == {"Retry-After": "7", "x-should-retry": "true"}


def test_an_overflow_begins_with_the_words_its_family_looks_for() -> None:
    error = context_length_error(70, 64, "messages")
    openai = describe_error(error).body["error"]
    anthropic = describe_error(error, ErrorFamily.ANTHROPIC).body["error"]
    assert openai["message"].startswith("This model's maximum context length is 64 tokens. However")
    assert anthropic["message"].startswith("prompt is too long: 70 tokens > 64 maximum. This model")
    for text in (openai["message"], anthropic["message"]):
        assert "your request has 70 prompt tokens" in text
        assert text.count("prompt is too long: 70 tokens > 64 maximum") == 1
        assert text.endswith("reduce the length of the messages. [context_length_exceeded]")
    assert openai["code"] == "context_length_exceeded"
