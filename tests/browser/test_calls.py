"""Tool calls in the chat, and streams that end badly, over answers written by the test."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.chat_page import answered, ask, open_page
from tests.helpers.chromium import Tab
from tests.helpers.gateway_rig import Rig

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
DONE = "[DONE]"
CANNED = """
(() => {
  const answers = __ANSWERS__;
  const real = window.fetch;
  window.sent = [];
  window.fetch = (url, options) => {
    if (!String(url).endsWith("/chat/completions")) { return real(url, options); }
    window.sent.push(JSON.parse(options.body));
    const { status, body } = answers.shift();
    return Promise.resolve(new Response(body, { status }));
  };
})()
"""


def stream(*events: object) -> dict[str, Any]:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return {"status": 200, "body": "".join(f"data: {text}\n\n" for text in texts)}


def delta(finish: str | None = None, **fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call(index: int, text: str, call_id: str | None = None, name: str | None = None) -> object:
    function = {"arguments": text} | ({"name": name} if name else {})
    head = {"id": call_id, "type": "function"} if call_id else {}
    return delta(tool_calls=[{"index": index, **head, "function": function}])


async def open_canned(tab: Tab, rig: Rig, *answers: dict[str, Any]) -> None:
    """The page, whose next requests for chat are answered so."""
    await open_page(tab, rig.url)
    await tab.evaluate(CANNED.replace("__ANSWERS__", json.dumps(answers)))


async def test_calls_are_shown_and_their_results_are_sent(rig: Rig, tab: Tab) -> None:
    calls = stream(
        delta(role="assistant", content=""),
        delta(content="Let me look."),
        call(0, "", "call_a", "get_weather"),
        call(0, '{"city": "Ham'),
        call(0, 'burg"}'),
        call(1, "", "call_b", "get_weather"),
        call(1, '{"city":"Oslo"}'),
        delta("tool_calls"),
        DONE,
    )
    await open_canned(tab, rig, calls, stream(delta(content="Windy."), delta("stop"), DONE))
    await tab.click("#open-settings")
    await tab.evaluate("document.querySelector('#settings [name=tools]').focus()")
    await tab.type(json.dumps([TOOL]))
    await tab.click("#settings .primary")
    await ask(tab, "How warm is it?")
    assert await answered(tab) == "Let me look."
    shown = await tab.evaluate(
        "[...document.querySelectorAll('.call')].map((e) => e.innerText.replace(/\\s+/g, ' '))"
    )
    assert shown == [
        'Calls get_weather { "city": "Hamburg" }',
        'Calls get_weather { "city": "Oslo" }',
    ]
    for result in ("12 degrees", "3 degrees"):
        await tab.evaluate("document.querySelector('.result textarea').focus()")
        await tab.type(result)
        await tab.click(".result button")
    assert await answered(tab, 2) == "Windy."
    first, second = await tab.evaluate("window.sent")
    assert first["tools"] == second["tools"] == [TOOL]
    assert second["messages"] == [
        {"role": "user", "content": "How warm is it?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": arguments},
                }
                for call_id, arguments in (
                    ("call_a", '{"city": "Hamburg"}'),
                    ("call_b", '{"city":"Oslo"}'),
                )
            ],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "12 degrees"},
        {"role": "tool", "tool_call_id": "call_b", "content": "3 degrees"},
    ]


async def test_a_call_that_was_cut_off_is_not_sent_again(rig: Rig, tab: Tab) -> None:
    cut = stream(delta(content="Text"), call(0, '{"ci', "call_a", "get_weather"))
    await open_canned(tab, rig, cut, stream(delta(content="Yes."), delta("stop"), DONE))
    await ask(tab, "hi")
    await answered(tab)
    assert "ended before the answer" in await tab.text(".foot.error")
    assert await tab.evaluate("document.querySelector('.result')") is None
    await ask(tab, "again")
    await answered(tab, 2)
    answer = (await tab.evaluate("window.sent"))[1]["messages"][1]
    assert answer == {"role": "assistant", "content": "Text"}


async def test_an_answer_at_its_limit_says_so(rig: Rig, tab: Tab) -> None:
    usage = {
        "prompt_tokens": 50,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 30},
    }
    last = {"choices": [], "usage": usage, "timings": {"tokens_per_second": 12.34}}
    await open_canned(tab, rig, stream(delta(content="a"), delta("length"), last, DONE))
    await ask(tab, "hi")
    await answered(tab)
    assert await tab.text(".foot") == (
        "Cut off: the limit of tokens was reached."
        " · 50 tokens read (30 from the cache), 9 written · 12.3 tokens/s"
    )


async def test_errors_of_others_are_told_by_their_status(rig: Rig, tab: Tab) -> None:
    answers = [
        {"status": 502, "body": "<html>Bad gateway</html>"},
        {"status": 500, "body": '{"error": "flat"}'},
        {"status": 200, "body": "data: no json\n\n"},
        stream({"error": {"message": "It broke.", "code": "x"}}),
    ]
    await open_canned(tab, rig, *answers)
    texts = []
    await ask(tab, "hi")
    for number in range(1, len(answers) + 1):
        await tab.until(f"window.sent.length === {number} && document.querySelector('.foot.error')")
        texts.append(await tab.text(".foot.error"))
        if number < len(answers):
            await tab.click(".actions button")
    assert texts == [
        "The server answered with status 502.",
        "The server answered with status 500.",
        "The answer could not be read.",
        "It broke.",
    ]
    tab.complaints.clear()
