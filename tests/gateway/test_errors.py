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
)
from ninfer.gateway.errors import ERROR_RULES, describe_error


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
