"""Requests of /v1/messages as a model's own chat template writes them."""

from __future__ import annotations

from typing import Any

from ninfer.gateway.anthropic.request import parse_messages_request
from ninfer.gateway.anthropic.signature import signature_of
from ninfer.gateway.fields import Fields
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, demo_frontend

USER = {"role": "user", "content": "Is it raining?"}
TOOL = {"name": "weather", "description": "Looks.", "input_schema": {"type": "object"}}


async def render(*messages: Any, **fields: Any) -> str:
    values = {"messages": list(messages), **fields}
    request = parse_messages_request(Fields(values), DEMO_VOCAB_SIZE)
    return await demo_frontend().render_chat(request.chat)


def calls(thinking: dict[str, Any], *texts: str) -> list[Any]:
    """A question, a call behind a thought, its result with `texts` beside it."""
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no station", "is_error": True}
    return [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", **thinking}, use]},
        {"role": "user", "content": [*texts, result]},
    ]


async def test_a_prefill_is_the_end_of_the_prompt() -> None:
    text = await render(USER, {"role": "assistant", "content": "The answer is (\n "})
    assert text.endswith("The answer is (\n ")
    assert text.count("assistant\n") == 1
    assert "<think>\n\n</think>" in text or "<think>" not in text


async def test_a_call_and_its_result() -> None:
    text = await render(
        *calls({"thinking": "look outside"}, "Hurry."), tools=[TOOL], system="Be kind."
    )
    places = [
        text.index(piece)
        for piece in ("Looks.", "Be kind.", "Is it raining?", "Oslo", "Error: no station", "Hurry.")
    ]
    assert sorted(places[2:]) == places[2:]
    assert max(places[:2]) < places[2]


async def test_a_hidden_thought_makes_the_same_prompt_as_a_shown_one() -> None:
    shown = await render(*calls({"thinking": "look outside", "signature": "x"}), tools=[TOOL])
    signature = signature_of("look outside", is_shown=False)
    hidden = await render(*calls({"thinking": "", "signature": signature}), tools=[TOOL])
    lost = await render(*calls({"thinking": "", "signature": "x"}), tools=[TOOL])
    assert shown == hidden
    assert lost != hidden


async def test_a_billing_line_that_changes_leaves_the_prompt_as_it_is() -> None:
    prompts = {
        await render(
            USER,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"},
                {"type": "text", "text": "Be kind."},
            ],
        )
        for number in range(3)
    }
    assert len(prompts) == 1


async def test_thinking_switches_reach_the_template() -> None:
    opened = await render(USER, thinking={"type": "adaptive"})
    closed = await render(USER, thinking={"type": "disabled"})
    assert opened != closed
    assert closed.rstrip().endswith("</think>")
    assert await render(USER) in (opened, closed)
