"""Earlier calls and their results: from the wire to the text that the template writes."""

from __future__ import annotations

from typing import Any, Final

import pytest

from ninfer.frontend.chat_renderer import ChatRenderer
from ninfer.frontend.template import ChatTemplate
from ninfer.gateway.chat_request import parse_chat_request
from ninfer.gateway.fields import Fields
from tests.helpers.chat_templates import QWEN3, QWEN3_5
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, RESOURCES

RENDERERS: Final = {
    "json": ChatRenderer(ChatTemplate(QWEN3), ()),
    "xml": ChatRenderer(ChatTemplate(QWEN3_5), ()),
    "demo": ChatRenderer(ChatTemplate(RESOURCES.chat_template or ""), ()),
}
USER: Final = {"role": "user", "content": "How warm is it?"}


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": arguments},
            }
        ],
        **fields,
    }


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **fields}


def render(renderer: str, *messages: Any, **fields: Any) -> str:
    request = parse_chat_request(Fields({"messages": list(messages), **fields}), DEMO_VOCAB_SIZE)
    return RENDERERS[renderer].render(request.chat).plain


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
@pytest.mark.parametrize("renderer", RENDERERS)
def test_o32_arguments_are_decoded(renderer: str, arguments: Any) -> None:
    text = render(renderer, USER, call(arguments), result("12"), USER)
    if renderer == "json":
        assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in text
    else:
        assert "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n" in text


@pytest.mark.parametrize("arguments", ["not json", "[1]"])
@pytest.mark.parametrize("renderer", RENDERERS)
def test_o32_arguments_that_are_no_object(renderer: str, arguments: str) -> None:
    text = render(renderer, USER, call(arguments), result("12"), USER)
    if renderer == "json":
        assert f'"arguments": {{"arguments": "{arguments}"}}' in text
    else:
        assert f"<parameter=arguments>\n{arguments}\n</parameter>" in text


@pytest.mark.parametrize("renderer", RENDERERS)
def test_o31_system_message_after_the_first_turn_stays_in_its_place(renderer: str) -> None:
    first = [USER, {"role": "assistant", "content": "Cold."}]
    later = {"role": "system", "content": "Be brief."}
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    text = render(renderer, *first, later, USER, tools=tools)
    block = "<|im_start|>system\nBe brief.<|im_end|>\n"
    head, found, tail = text.partition(block)
    assert found
    assert "Cold." in head
    assert head + tail == render(renderer, *first, USER, tools=tools)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_parts_of_a_result_join(renderer: str) -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    whole = render(renderer, USER, call("{}"), result("12"))
    assert render(renderer, USER, call("{}"), result(parts)) == whole
    assert "<tool_response>\n12\n</tool_response>" in whole


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("changes", [{"tool_call_id": "other"}, {"tool_call_id": None}])
def test_results_are_taken_whatever_call_they_name(renderer: str, changes: Any) -> None:
    assert render(renderer, USER, call("{}"), result("12", **changes)) == render(
        renderer, USER, call("{}"), result("12")
    )


def test_switches_of_thinking_reach_the_template() -> None:
    fields = Fields({"messages": [USER], "preserve_thinking": True})
    kwargs = parse_chat_request(fields, DEMO_VOCAB_SIZE).chat.template_kwargs
    assert kwargs == {"preserve_thinking": True}
    fields = Fields(
        {
            "messages": [USER],
            "preserve_thinking": True,
            "chat_template_kwargs": {"preserve_thinking": False},
        }
    )
    kwargs = parse_chat_request(fields, DEMO_VOCAB_SIZE).chat.template_kwargs
    assert kwargs == {"preserve_thinking": False}
