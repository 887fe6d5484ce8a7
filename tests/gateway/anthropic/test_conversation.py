"""`system` and `messages`: blocks of every kind, turns, marks, pictures."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.chat import ChatMessage, ChatPrompt, MediaPart, TextPart, ToolCall
from ninfer.contract.errors import RequestError
from ninfer.gateway.anthropic.conversation import MessagesConversation, parse_conversation
from ninfer.gateway.anthropic.signature import signature_of
from ninfer.gateway.fields import Fields
from tests.helpers.demo_frontend import demo_frontend

MARK = {"type": "ephemeral"}


def parse(*messages: Any, **fields: Any) -> MessagesConversation:
    return parse_conversation(Fields({"messages": list(messages), **fields}))


def says(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def texts(conversation: MessagesConversation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in conversation.messages]


@pytest.mark.parametrize("content", ["", None, []])
def test_absent_content_is_empty_text(content: Any) -> None:
    assert parse({"role": "user", "content": content}).messages == (ChatMessage("user"),)
    assert parse({"role": "USER"}).messages == (ChatMessage("user"),)


def test_neighbours_of_one_role_are_one_turn() -> None:
    conversation = parse(
        {"role": "user", "content": "a"},
        says("user", block("b"), "c"),
        {"role": "assistant", "content": "d"},
        says("assistant", block("e")),
        {"role": "user", "content": "f"},
    )
    assert texts(conversation) == [("user", "abc"), ("assistant", "de"), ("user", "f")]
    assert not conversation.is_prefill


def test_system_blocks_come_first_and_are_joined_by_the_template() -> None:
    conversation = parse(
        {"role": "user", "content": "u"}, system=[block("a", cache_control=MARK), block("b")]
    )
    assert conversation.messages[:2] == (
        ChatMessage("system", (TextPart("a", ends_prefix=True),)),
        ChatMessage("system", (TextPart("b"),)),
    )
    assert texts(parse({"role": "user", "content": "u"}, system="s"))[0] == ("system", "s")


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("x-anthropic-billing-header: cc_version=1; cch=0af;\nYou help.", ["You help."]),
        ("x-anthropic-billing-header: cch=1;\n\n\nYou help.", ["You help."]),
        ("x-anthropic-billing-header: cch=1;", []),
        ([block("x-anthropic-billing-header: cch=1;"), block("You help.")], ["You help."]),
        ("Say x-anthropic-billing-header: a", ["Say x-anthropic-billing-header: a"]),
        ("", []),
        (None, []),
    ],
)
def test_billing_lines_are_not_part_of_the_prompt(system: Any, expected: list[str]) -> None:
    conversation = parse({"role": "user", "content": "u"}, system=system)
    assert texts(conversation) == [*(("system", text) for text in expected), ("user", "u")]


def test_later_system_messages_stay_where_they_are() -> None:
    conversation = parse(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        says("system", block("c"), block("d")),
        {"role": "system", "content": "e"},
        {"role": "user", "content": "f"},
        system="s",
    )
    assert [role for role, _ in texts(conversation)] == [
        "system", "user", "assistant", "system", "system", "user",
    ]  # fmt: skip
    assert conversation.messages[3].text == "c\n\nd"


async def test_a_later_system_message_changes_nothing_before_it() -> None:
    first = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    later = [*first, {"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]
    frontend = demo_frontend()

    async def rendered(messages: list[Any]) -> str:
        conversation = parse(*messages, system="s")
        return await frontend.render_chat(
            ChatPrompt(messages=conversation.messages, add_generation_prompt=False)
        )

    short = await rendered([*first, {"role": "user", "content": "x"}])
    long = await rendered(later)
    place = long.index("be brief")
    assert long.index("two") < place < long.index("x", place)
    common = short[: short.index("two") + 3]
    assert long.startswith(common)


def test_tool_turns() -> None:
    conversation = parse(
        {"role": "user", "content": "u"},
        says(
            "assistant",
            {"type": "thinking", "thinking": "t", "signature": "any"},
            block("a"),
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"k": [1]}},
            {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
        ),
        says(
            "user",
            block("and then?"),
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "r1"},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "is_error": True,
                "content": [block("r"), block("2")],
            },
        ),
    )
    _, assistant, *rest = conversation.messages
    assert assistant == ChatMessage(
        "assistant",
        (TextPart("a"),),
        reasoning_content="t",
        tool_calls=(ToolCall("f", {"k": [1]}, "toolu_1"), ToolCall("g", {}, "toolu_2")),
    )
    assert [(message.role, message.text) for message in rest] == [
        ("tool", "r1"),
        ("tool", "Error: r2"),
        ("user", "and then?"),
    ]
    assert [message.tool_call_id for message in rest] == ["toolu_1", "toolu_2", None]


def test_results_without_a_call_and_calls_without_a_result_are_taken() -> None:
    conversation = parse(
        says("user", {"type": "tool_result", "tool_use_id": "gone"}),
        says("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": None}),
    )
    assert texts(conversation) == [("tool", ""), ("assistant", "")]
    assert not conversation.is_prefill, "a call cannot be continued"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ([], ""),
        ([{"type": "tool_reference", "tool_name": "f"}], "[tool: f]"),
        ([{"type": "document", "source": {"type": "text", "data": "d"}}], "d"),
        (
            [
                {
                    "type": "document",
                    "title": "T",
                    "context": "C",
                    "source": {"type": "content", "content": [block("d"), block("e")]},
                }
            ],
            "T\nC\nde",
        ),
        (
            [{"type": "search_result", "title": "T", "source": "S", "content": [block("x")]}],
            "T\nS\nx",
        ),
    ],
)
def test_results_of_many_kinds_are_text(content: Any, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    assert parse(says("user", result)).messages[0].text == expected
    if content:
        assert parse(says("assistant", block("a")), says("user", result)).messages[1].role == "tool"


def test_what_hosted_services_ran_is_skipped() -> None:
    conversation = parse(
        {"role": "user", "content": "u"},
        says(
            "assistant",
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {}},
            {"type": "mcp_tool_use", "id": "m", "name": "n", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m"},
            block("a"),
        ),
    )
    assert texts(conversation) == [("user", "u"), ("assistant", "a")]


def test_a_summary_stands_for_what_was_before_it() -> None:
    conversation = parse(
        says("assistant", {"type": "compaction", "content": "They spoke of rain."}),
        says("user", {"type": "compaction", "content": None}, block("And now?")),
    )
    assert texts(conversation) == [("assistant", "They spoke of rain."), ("user", "And now?")]


def test_system_messages_may_count_for_one_turn() -> None:
    note = {"role": "system", "content": "hurry", "clear_at": "next_user_message"}
    user = {"role": "user", "content": "u"}
    answer = {"role": "assistant", "content": "a"}
    roles = [role for role, _ in texts(parse(user, note, answer))]
    assert roles == ["user", "system", "assistant"]
    later = texts(parse(user, note, answer, user, note, {**note, "clear_at": "never"}))
    assert [role for role, _ in later] == ["user", "assistant", "user", "system", "system"]


def test_changes_of_tools_are_in_their_order() -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"type": kind, "tool": tool}

    conversation = parse(
        {"role": "user", "content": "u"},
        says(
            "system",
            change("tool_removal", type="tool_reference", name="f"),
            change("tool_addition", type="tool_definition", definition={"name": "g"}),
            change("tool_addition", type="mcp_toolset_reference", server_name="x"),
        ),
        says("system", block("s"), change("tool_addition", type="tool_reference", name="f")),
    )
    changes = [(item.name, item.is_removal) for item in conversation.tool_changes]
    assert changes == [("f", True), ("g", False), ("f", False)]
    assert texts(conversation) == [("user", "u"), ("system", "s")]
    assert conversation.tool_changes[1].path == "messages[1].content[1].tool.definition"


def test_hidden_thoughts_come_back_from_their_signature() -> None:
    hidden = {"type": "thinking", "thinking": "", "signature": signature_of("t", is_shown=False)}
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM+/="}
    shown = {"type": "thinking", "thinking": "u"}
    conversation = parse(
        {"role": "user", "content": "x"}, says("assistant", hidden, foreign, shown, block("a"))
    )
    assert conversation.messages[1].reasoning_content == "tu"
    nothing = parse({"role": "user", "content": "x"}, says("assistant", foreign, block("a")))
    assert nothing.messages[1].reasoning_content is None


def test_a_last_answer_is_continued_with_its_spaces() -> None:
    conversation = parse(
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "The best is (\n "}
    )
    assert conversation.is_prefill
    assert conversation.messages[-1].text == "The best is (\n "


def test_marks_end_prefixes() -> None:
    conversation = parse(
        says("user", block("a", cache_control=MARK), block("b")),
        says("assistant", block("c"), {"type": "tool_use", "name": "f", "cache_control": MARK}),
        says(
            "user",
            {"type": "tool_result", "content": [block("d"), block("e")], "cache_control": MARK},
        ),
    )
    marked = [
        part.text
        for message in conversation.messages
        for part in message.content
        if isinstance(part, TextPart) and part.ends_prefix
    ]
    assert marked == ["a", "e"]


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "b"},
        says("user", {"type": "tool_result", "tool_use_id": "t", "content": "b"}),
    ],
)
def test_a_mark_on_the_request_is_one_on_its_last_text(last: Any) -> None:
    conversation = parse(
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "x"},
        last,
        cache_control=MARK,
    )
    assert conversation.messages[-1].content == (TextPart("b", ends_prefix=True),)


def test_pictures_keep_their_places() -> None:
    def picture(name: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "x", "data": name}}

    conversation = parse(
        says(
            "user",
            picture("last"),
            block("t"),
            {"type": "tool_result", "content": [block("r"), picture("first")]},
        )
    )
    tool, user = conversation.messages
    assert [reference.text for reference in conversation.media] == ["first", "last"]
    assert conversation.media[0].path == "messages[0].content[2].content[1].source.data"
    assert tool.content == (TextPart("r"), MediaPart("image", b""))
    assert user.content == (MediaPart("image", b""), TextPart("t"))


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        (None, "missing_required_parameter", "messages"),
        ([], "invalid_value", "messages"),
        ({}, "invalid_type", "messages"),
        (["x"], "invalid_type", "messages[0]"),
        ([{"content": "x"}], "missing_required_parameter", "messages[0].role"),
        ([{"role": "tool"}], "invalid_value", "messages[0].role"),
        ([{"role": 5}], "invalid_type", "messages[0].role"),
        ([{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
        ([says("user", 5)], "invalid_type", "messages[0].content[0]"),
        ([says("user", {})], "missing_required_parameter", "messages[0].content[0].type"),
        ([says("user", {"type": "text"})], "missing_required_parameter",
         "messages[0].content[0].text"),
        ([says("user", {"type": "new"})], "invalid_value", "messages[0].content[0].type"),
        ([says("user", {"type": "tool_use", "name": "f"})], "invalid_value",
         "messages[0].content[0].type"),
        ([says("assistant", {"type": "tool_result"})], "invalid_value",
         "messages[0].content[0].type"),
        ([says("system", {"type": "image"})], "invalid_value", "messages[0].content[0].type"),
        ([says("assistant", {"type": "tool_use"})], "missing_required_parameter",
         "messages[0].content[0].name"),
        ([says("assistant", {"type": "tool_use", "name": ""})], "invalid_value",
         "messages[0].content[0].name"),
        ([says("assistant", {"type": "tool_use", "name": "f", "input": "{}"})], "invalid_type",
         "messages[0].content[0].input"),
        ([says("user", {"type": "tool_result", "content": [{"type": "x"}]})], "invalid_value",
         "messages[0].content[0].content[0].type"),
        ([says("user", {"type": "tool_result", "is_error": "no"})], "invalid_type",
         "messages[0].content[0].is_error"),
        ([says("user", {"type": "document"})], "missing_required_parameter",
         "messages[0].content[0].source"),
        ([says("user", {"type": "document", "source": {"type": "base64", "data": "x"}})],
         "unsupported_value", "messages[0].content[0].source"),
        ([says("user", {"type": "image", "source": {"type": "file", "file_id": "x"}})],
         "unsupported_value", "messages[0].content[0].source"),
        ([says("user", {"type": "container_upload", "file_id": "x"})], "unsupported_value",
         "messages[0].content[0]"),
        ([says("system", {"type": "tool_removal"})], "missing_required_parameter",
         "messages[0].content[0].tool"),
        ([says("system", {"type": "tool_removal", "tool": {"type": "tool_definition"}})],
         "invalid_value", "messages[0].content[0].tool.type"),
        ([says("system", {"type": "tool_addition", "tool": {"type": "tool_definition"}})],
         "missing_required_parameter", "messages[0].content[0].tool.definition"),
        ([{"role": "system", "content": "x", "clear_at": 5}], "invalid_type",
         "messages[0].clear_at"),
        ([says("user", block("x", cache_control=5))], "invalid_type",
         "messages[0].content[0].cache_control"),
    ],
)  # fmt: skip
def test_refusals_name_the_block(messages: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_conversation(Fields({"messages": messages}))
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("system", "param"),
    [(5, "system"), ([5], "system[0]"), ([{"type": "image"}], "system[0].type")],
)
def test_refused_systems(system: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"role": "user", "content": "u"}, system=system)
    assert caught.value.param == param
