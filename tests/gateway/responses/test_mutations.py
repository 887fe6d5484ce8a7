"""Any change of any field is answered or refused, never a fault of ours."""

from __future__ import annotations

import copy
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.responses.history import find_history, read_conversation
from ninfer.gateway.responses.request import parse_responses_request
from ninfer.gateway.responses.sealed_text import seal
from ninfer.gateway.responses.store import ResponseStore
from ninfer.gateway.responses.stored_items import stored_input, stored_response
from ninfer.gateway.responses.stored_media import said_with_files

TEXT = {"type": "input_text", "text": "a"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
FORM = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
BODY: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "developer", "content": [TEXT]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "content": [{"type": "reasoning_text", "text": "t"}],
            "summary": [{"type": "summary_text", "text": "s"}],
            "encrypted_content": seal("t"),
        },
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [TEXT]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c", "output": [TEXT]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "namespace": "n", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"type": "local_shell_call", "call_id": "e", "action": {"command": ["ls"]}},
        {
            "type": "shell_call_output",
            "id": "sco_1",
            "call_id": "e",
            "output": [{"stdout": "a", "outcome": {}}],
        },
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "item_reference", "id": "msg_a_0"},
    ],
    "previous_response_id": "resp_a",
    "tools": [
        FUNCTION,
        {"type": "custom", "name": "g", "format": FORM},
        {"type": "namespace", "name": "n", "tools": [FUNCTION, {"type": "custom", "name": "g"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}, {"type": "namespace", "name": "n"}],
    },
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "high", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "store": True,
    "context_management": [{"type": "compaction"}],
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["message", "function", "custom", "item_reference", "msg_a_0", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "id", "name", "content", "role"]), inner)
    ),
    max_leaves=6,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a value."""
    entries = list(value.items()) if isinstance(value, dict) else []
    entries += list(enumerate(value)) if isinstance(value, list) else []
    places = [((*path, key), inner) for key, inner in entries]
    return [place for where, inner in places for place in [where, *paths_of(inner, where)]]


PATHS = paths_of(BODY)


def changed(changes: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    for path, value in changes:
        holder: Any = body
        try:
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return body


def handle(body: dict[str, Any]) -> None:
    """What a request goes through beside the engine, and being stored and gone on from."""
    store = ResponseStore()
    said = stored_input("resp_a", [{"role": "user", "content": "q"}])
    store.put("resp_a", stored_response(None, said, _response("a"), "key"))
    request = parse_responses_request(Fields(body), 300)
    history = find_history(store, request)
    conversation = read_conversation(history, request)
    orjson.dumps(request.echo)
    said = stored_input("resp_b", said_with_files(conversation.said, conversation.messages))
    store.put("resp_b", stored_response(history.before, said, _response("b"), "key"))
    again = parse_responses_request(
        Fields({"previous_response_id": "resp_b", "tools": body.get("tools")}), 300
    )
    later = read_conversation(find_history(store, again), again)
    num_instructions = 1 if request.instructions else 0
    assert later.messages == conversation.messages[num_instructions:]


def assert_handled(body: dict[str, Any]) -> None:
    refusal = None
    try:
        handle(body)
    except RequestError as error:
        refusal = error
    assert refusal is None or refusal.param, "a refusal names its field"


def _response(name: str) -> dict[str, Any]:
    return {"id": f"resp_{name}", "output": []}


def test_the_unchanged_body_is_answered() -> None:
    handle(BODY)
    assert len(PATHS) > 100


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(PATHS), JSON), min_size=1, max_size=3))
def test_changes(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    assert_handled(changed(changes))


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_null_is_never_a_fault(path: tuple[Any, ...]) -> None:
    assert_handled(changed([(path, None)]))
