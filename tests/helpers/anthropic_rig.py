"""Readers of what /v1/messages sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.helpers.gateway_rig import Answer


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object of an answer that has the family's whole shape."""
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


def accumulate(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, and every rule of its order on the way."""
    events = [event for event in events if event["type"] != "ping"]
    first, *middle, end, stop = events
    assert (first["type"], end["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    blocks: list[dict[str, Any]] = message["content"]
    is_open = False
    for event in middle:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "pieces": ""})
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_delta":
            _add_delta(blocks[-1], event["delta"])
        else:
            assert kind == "content_block_stop"
            is_open = False
    assert not is_open
    for block in blocks:
        pieces = block.pop("pieces")
        if block["type"] == "tool_use":
            block["input"] = pieces
    message |= end["delta"]
    message["usage"] |= end["usage"]
    return message


def _add_delta(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"], block["type"]:
        case "text_delta", "text":
            assert delta["text"]
            block["text"] += delta["text"]
        case "thinking_delta", "thinking":
            assert delta["thinking"]
            assert block["signature"] == "", "the signature comes last"
            block["thinking"] += delta["thinking"]
        case "signature_delta", "thinking":
            assert block["signature"] == ""
            assert delta["signature"]
            block["signature"] = delta["signature"]
        case "input_json_delta", "tool_use":
            assert delta["partial_json"]
            block["pieces"] += delta["partial_json"]
        case other:
            raise AssertionError(f"a delta in a block of another kind: {other}")
