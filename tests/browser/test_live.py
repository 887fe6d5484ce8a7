"""The page and the whole product: the demo model answers, and the status view follows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from ninfer.options import EngineOptions
from tests.helpers.chat_page import answered, ask, open_page
from tests.helpers.chromium import Tab
from tests.helpers.gateway_rig import MESSAGES
from tests.helpers.served_model import RunningServer, served_demo_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with served_demo_model(EngineOptions(executor="cpu", max_context=512)) as server:
        yield server


async def test_a_conversation_with_the_demo_model(server: RunningServer, tab: Tab) -> None:
    await open_page(tab, server.url)
    await tab.click("#open-settings")
    await tab.evaluate("document.querySelector('#settings [name=temperature]').focus()")
    await tab.type("0")
    await tab.evaluate("document.querySelector('#settings [name=thinking]').value = 'on'")
    await tab.press("Enter")
    await ask(tab, "What is 48 + 37?")
    assert "85" in await answered(tab)
    assert "48" in await tab.evaluate("document.querySelector('.thought .markdown').textContent")
    assert await tab.evaluate("document.querySelector('.thought').open") is False
    assert "written" in await tab.text(".foot")
    await ask(tab, "Thank you!")
    assert await answered(tab, 2)


async def test_the_demo_model_calls_a_tool(server: RunningServer, tab: Tab) -> None:
    await open_page(tab, server.url)
    settings = json.dumps({"temperature": "0", "tools": json.dumps([WEATHER])})
    await tab.evaluate(f"localStorage.setItem('ninfer.settings', {settings!r})")
    await open_page(tab, server.url)
    await ask(tab, "How warm is it in Hamburg?")
    await answered(tab)
    assert await tab.text(".call-name") == "get_weather"
    assert json.loads(await tab.text(".call code")) == {"city": "Hamburg"}
    await tab.click(".result textarea")
    await tab.type('{"temperature": 12, "condition": "windy"}')
    await tab.click(".result button")
    assert "12" in await answered(tab, 2)


async def test_the_status_view_follows(server: RunningServer, tab: Tab) -> None:
    async with aiohttp.ClientSession() as client:
        url = f"{server.url}/v1/chat/completions"
        async with client.post(url, json={"messages": 5}) as refused:
            assert refused.status == 400
        long = [{"role": "user", "content": "What is a volcano? " * 20}]
        whole = {"messages": long, "max_tokens": 2}
        async with client.post(url, json=whole) as answer:
            assert answer.status == 200
        await tab.open(f"{server.url}/#status")
        await tab.until("document.querySelector('#table-errors td:nth-child(3)')")
        assert await tab.text("#table-errors td:nth-child(3)") == "invalid_type"
        assert (await tab.text("#status-state")).startswith("Ready. demo_model, context 512 tokens")
        assert await tab.text("#card-lanes .value") == "0 of 8"
        assert await tab.text("#card-reused .help") == "0 tokens"
        body = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.post(url, json=body) as response:
            await response.content.readany()
            await tab.until("document.querySelector('#card-lanes .value').innerText === '1 of 8'")
            fill = "document.querySelector('#card-lanes .fill').style.width"
            assert await tab.evaluate(fill) == "12.5%"
            rate = "document.querySelector('#card-generated .value').innerText"
            await tab.until(f"parseFloat({rate}) > 0")
            response.close()
        await tab.until("document.querySelector('#card-lanes .value').innerText === '0 of 8'")
        await tab.until("document.querySelector('.spark polyline').points.length >= 2")
        checkpoints = "#table-tiers tbody tr:first-child td:nth-child(2)"
        await tab.until(f"Number(document.querySelector('{checkpoints}').innerText) > 0")
        assert await tab.text("#table-tiers tbody tr:last-child td") == "disk"
