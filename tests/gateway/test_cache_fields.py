"""What requests ask of the context cache, and how they name and mark."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.cache import CacheMode, CacheRequest
from ninfer.contract.chat import ChatPrompt
from ninfer.contract.errors import RequestError
from ninfer.gateway.cache_fields import parse_cache_request
from ninfer.gateway.chat_request import parse_chat_request
from ninfer.gateway.fields import Fields
from tests.helpers.fake_engine import VOCAB_SIZE
from tests.helpers.gateway_rig import Rig

MARK = {"cache_control": {"type": "ephemeral"}}


def parse(header: str | None = None, **fields: Any) -> CacheRequest:
    return parse_cache_request(Fields(fields), header)


def chat_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    return parse_chat_request(Fields({"messages": list(messages), **fields}), VOCAB_SIZE).chat


def marks_of(message: dict[str, Any]) -> list[bool]:
    return [part.ends_prefix for part in chat_of(message).messages[0].content]  # type: ignore[union-attr]


def test_a_bare_request_asks_for_nothing() -> None:
    assert parse() == CacheRequest()


@pytest.mark.parametrize(
    ("header", "fields", "key"),
    [
        (None, {"prompt_cache_key": "k"}, "k"),
        ("h", {"prompt_cache_key": "k"}, "h"),
        ("h", {"prompt_cache_key": "k", "session_id": "s"}, "s"),
        (None, {"prompt_cache_key": "", "session_id": ""}, None),
        ("", {}, None),
    ],
)
def test_the_most_exact_name_is_the_sessions(
    header: str | None, fields: dict[str, str], key: str | None
) -> None:
    assert parse(header, **fields) == CacheRequest(session_key=key)


def test_mode_and_salt() -> None:
    assert parse(cache="off", cache_salt="t") == CacheRequest(mode=CacheMode.OFF, salt="t")
    assert parse(cache="default").mode is CacheMode.DEFAULT


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"cache": "on"}, "invalid_value", "cache"),
        ({"cache": False}, "invalid_type", "cache"),
        ({"cache_salt": ""}, "invalid_value", "cache_salt"),
        ({"cache_salt": "x" * 1025}, "invalid_value", "cache_salt"),
        ({"cache_salt": 5}, "invalid_type", "cache_salt"),
        ({"session_id": 5}, "invalid_type", "session_id"),
        ({"session_id": "x" * 1025}, "invalid_value", "session_id"),
        ({"prompt_cache_key": ["k"]}, "invalid_type", "prompt_cache_key"),
        ({"prompt_cache_key": "x" * 1025}, "invalid_value", "prompt_cache_key"),
        ({"prompt_cache_options": "x"}, "invalid_type", "prompt_cache_options"),
        ({"cache_control": "ephemeral"}, "invalid_type", "cache_control"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_header_that_is_too_long_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        parse("x" * 1025)
    assert caught.value.param == "X-Session-Id"


@pytest.mark.parametrize("mark", [MARK, {"prompt_cache_breakpoint": True}])
@pytest.mark.parametrize("role", ["system", "user"])
def test_parts_are_marked(role: str, mark: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}, "c"]
    assert marks_of({"role": role, "content": parts}) == [True, False, False]


@pytest.mark.parametrize("mark", [{"cache_control": None}, {"prompt_cache_breakpoint": False}, {}])
def test_parts_without_a_mark(mark: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "a", **mark}]
    assert marks_of({"role": "user", "content": parts}) == [False]


def test_a_marked_message_is_marked_at_its_end() -> None:
    assert marks_of({"role": "user", "content": ["a", "b"], **MARK}) == [False, True]
    assert marks_of({"role": "user", "content": "a", **MARK}) == [True]
    assert marks_of({"role": "user", "content": "", **MARK}) == []


def test_marked_tools() -> None:
    user = {"role": "user", "content": "a"}
    tools = [
        {"type": "function", "function": {"name": "a"}, **MARK},
        {"type": "function", "function": {"name": "b"}},
    ]
    marked = chat_of(user, tools=tools, tool_choice="none")
    assert marked.tools_end_prefix
    assert all("cache_control" not in tool for tool in marked.tools)
    assert not chat_of(user, tools=tools[1:], tool_choice="none").tools_end_prefix


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": [{"type": "text", "text": "a", "cache_control": "x"}]}, ".content[0]"),
        ({"content": [{"type": "text", "text": "a", "cache_control": {"type": 1}}]}, ".content[0]"),
        ({"content": "a", "cache_control": 1}, ""),
    ],
)
def test_bad_marks_are_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_of({"role": "user", **message})
    assert str(caught.value.param).startswith(f"messages[0]{param}.cache_control")


async def test_every_choice_of_a_request_carries_what_was_asked(rig: Rig) -> None:
    await rig.chat(n=2, session_id="s", cache_salt="t", cache="off")
    wanted = CacheRequest(CacheMode.OFF, "s", "t")
    assert [handle.request.cache for handle in rig.engine.handles] == [wanted, wanted]


async def test_the_header_names_the_session_on_both_endpoints(rig: Rig) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    await rig.post("/v1/chat/completions", body, headers={"x-session-id": "h"})
    await rig.post("/generate", {"text": ["a", "b"]}, headers={"X-Session-Id": "h"})
    assert [handle.request.cache.session_key for handle in rig.engine.handles] == ["h"] * 3
    answer = await rig.post("/generate", {"text": "a"}, headers={"X-Session-Id": "h" * 1025})
    assert (answer.status, answer.error["param"]) == (400, "X-Session-Id")


async def test_native_requests_ask_beside_the_prompt(rig: Rig) -> None:
    await rig.generate(text="a", cache="off", session_id="s")
    assert rig.engine.handles[0].request.cache == CacheRequest(CacheMode.OFF, "s")
