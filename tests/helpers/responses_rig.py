"""A client of /v1/responses: requests, and streams added up under all the rules of their order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tests.helpers.answer_scripts import events_of
from tests.helpers.gateway_rig import Answer, Rig

_ID = re.compile(r"\b(resp|rs|msg|fc|ctc|call)_[A-Za-z0-9]{24}\b")
_TEXT_OF_ITEM = {"function_call": "arguments", "custom_tool_call": "input"}
_LAST = ("response.completed", "response.incomplete", "response.failed")
DEFAULT_ECHO: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""What a response repeats of a request that says nothing beside its input."""


def without_ids(value: Any) -> Any:
    """Equal for two answers that differ in ids and in the time only."""
    if isinstance(value, str):
        return _ID.sub(r"\1", value)
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {
            key: None if key in ("created_at", "completed_at") else without_ids(item)
            for key, item in value.items()
        }
    return value


class StreamReader:
    """Adds up the items of a stream; `read` asserts that each event may come where it does."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None
        self._next_number = 0
        self._begun: dict[str, Any] | None = None
        self._open: dict[str, Any] | None = None
        self._open_parts: set[str] = set()

    def read(self, event: dict[str, Any]) -> None:
        assert self.final is None, "an event behind the last one"
        assert event["sequence_number"] == self._next_number
        self._next_number += 1
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress") or event["type"] in _LAST:
            self._read_response(kind, event["response"])
        elif kind in ("output_item.added", "output_item.done"):
            self._read_item(kind, event)
        else:
            assert self._open is not None
            assert event["item_id"] == self._open["id"]
            assert event["output_index"] == len(self.items) - 1
            self._read_content(kind, event, self._open)

    def _read_response(self, kind: str, response: dict[str, Any]) -> None:
        if self._begun is None:
            assert kind == "created"
            self._begun = response
        assert response["id"] == self._begun["id"]
        if kind in ("created", "in_progress"):
            assert response == self._begun
            assert (response["status"], response["output"]) == ("in_progress", [])
            return
        assert response["status"] == kind
        if self._open is not None:
            assert kind != "completed" or self._open["type"] in _TEXT_OF_ITEM
            self._open["status"] = "incomplete"
        assert response["output"] == self.items
        self.final = response

    def _read_item(self, kind: str, event: dict[str, Any]) -> None:
        item = event["item"]
        if kind == "output_item.added":
            if self._open is not None:
                assert self._open["type"] in _TEXT_OF_ITEM, "two items are open"
                self._open["status"] = "incomplete"
            assert event["output_index"] == len(self.items)
            assert item["status"] == "in_progress"
            self._open = dict(item)
            self.items.append(self._open)
            return
        assert self._open is not None
        assert not self._open_parts
        sealed = item.get("encrypted_content")
        if sealed is not None:
            self._open["encrypted_content"] = sealed
        self._open["status"] = item["status"]
        assert item["status"] in ("completed", "incomplete")
        assert item == self._open
        self._open = None

    def _read_content(self, kind: str, event: dict[str, Any], item: dict[str, Any]) -> None:
        name, _, what = kind.rpartition(".")
        if name in ("content_part", "reasoning_summary_part"):
            parts = item["content" if name == "content_part" else "summary"]
            if what == "added":
                assert parts == []
                parts.append(dict(event["part"]))
                self._open_parts.add(name)
            else:
                assert parts == [event["part"]]
                self._open_parts.remove(name)
            return
        holder, key = _holder(name, item)
        if what == "done":
            assert event[key] == holder[key]
            return
        assert what == "delta"
        assert event["delta"]
        holder[key] += event["delta"]
        if "logprobs" in holder:
            holder["logprobs"] += event["logprobs"]
        elif name == "output_text":
            assert event["logprobs"] == []


def _holder(name: str, item: dict[str, Any]) -> tuple[dict[str, Any], str]:
    match name, item["type"]:
        case "output_text", "message":
            return item["content"][0], "text"
        case "reasoning_text", "reasoning":
            return item["content"][0], "text"
        case "reasoning_summary_text", "reasoning":
            return item["summary"][0], "text"
        case "function_call_arguments", "function_call":
            return item, "arguments"
        case "custom_tool_call_input", "custom_tool_call":
            return item, "input"
        case other:
            raise AssertionError(f"an event of another kind of item: {other}")


def accumulate(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The response that a whole stream adds up to."""
    reader = StreamReader()
    for event in events:
        reader.read(event)
    assert reader.final is not None, "the stream has no last event"
    return reader.final


async def create(rig: Rig, **fields: Any) -> Answer:
    return await rig.post("/v1/responses", {"input": "hi", **fields})


async def created(rig: Rig, **fields: Any) -> dict[str, Any]:
    answer = await create(rig, **fields)
    assert answer.status == 200
    response: dict[str, Any] = answer.json()
    return response


async def streamed_events(rig: Rig, **fields: Any) -> list[dict[str, Any]]:
    answer = await create(rig, stream=True, **fields)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.body)


def said_to(rig: Rig) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in rig.frontend.chats[-1].messages]
