"""The context cache as a client of the server meets it, with the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from ninfer.contract.cache import CheckpointKind
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.chat_request import parse_chat_request
from ninfer.gateway.fields import Fields
from ninfer.options import EngineOptions
from tests.helpers.served_model import RunningServer, served_demo_model

SYSTEM = {"role": "system", "content": "You answer in short words. " * 20}
QUESTION = {"role": "user", "content": "What is a volcano?"}
LATER = {"role": "user", "content": "And a river?"}


@dataclass
class Client:
    server: RunningServer
    session: aiohttp.ClientSession

    async def post(self, path: str, **body: Any) -> Any:
        async with self.session.post(self.server.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> tuple[str, int]:
        """(answer, cached tokens)"""
        body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
        answer = await self.post("/v1/chat/completions", **body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached

    async def prompt(self, *messages: dict[str, Any]) -> PreparedPrompt:
        frontend = self.server.model.frontend
        chat = parse_chat_request(Fields({"messages": list(messages)}), frontend.vocab_size).chat
        return await frontend.prepare_chat(chat)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    options = EngineOptions(max_concurrency=2, max_context=1024, host_cache_bytes=0)
    async with served_demo_model(options) as server, aiohttp.ClientSession() as session:
        yield Client(server, session)


def end_of(prompt: PreparedPrompt, kind: CheckpointKind) -> int:
    return next(f.num_tokens for f in prompt.frontiers if f.kind is kind)


async def test_next_turn_goes_on_from_the_last_question(client: Client) -> None:
    answer, cached = await client.chat(SYSTEM, QUESTION, session_id="s")
    assert cached == 0
    history = [SYSTEM, QUESTION, {"role": "assistant", "content": answer}, LATER]
    later, cached = await client.chat(*history, session_id="s")
    first = await client.prompt(SYSTEM, QUESTION)
    assert cached == end_of(first, CheckpointKind.TURN_CLOSURE)
    assert await client.chat(*history, cache="off") == (later, 0)


async def test_edited_question_goes_on_from_the_system_text(client: Client) -> None:
    await client.chat(SYSTEM, QUESTION, session_id="s")
    _, cached = await client.chat(SYSTEM, LATER, session_id="s")
    first = await client.prompt(SYSTEM, QUESTION)
    assert cached == end_of(first, CheckpointKind.STABLE_PREFIX)


async def test_salts_share_nothing_and_a_flush_leaves_nothing(client: Client) -> None:
    await client.chat(SYSTEM, QUESTION, cache_salt="a")
    assert (await client.chat(SYSTEM, QUESTION, cache_salt="b"))[1] == 0
    assert (await client.chat(SYSTEM, QUESTION, cache_salt="a"))[1] > 0
    await client.post("/flush_cache")
    assert (await client.chat(SYSTEM, QUESTION, cache_salt="a"))[1] == 0


async def test_raw_prompt_comes_back_but_for_its_last_token(client: Client) -> None:
    body = {"input_ids": list(range(100, 300)), "sampling_params": {"max_new_tokens": 4}}
    first = (await client.post("/generate", **body))["meta_info"]["cache"]
    assert (first["tokens"], first["miss"]) == (0, "no_entry")
    again = (await client.post("/generate", **body))["meta_info"]["cache"]
    assert again == {
        "tokens": 199,
        "kind": "prompt_tail",
        "tier": "device",
        "miss": None,
        "first_difference": None,
    }
    off = (await client.post("/generate", **body, cache="off"))["meta_info"]["cache"]
    assert (off["tokens"], off["miss"]) == (0, "disabled")


async def test_marked_text_is_kept_for_others(client: Client) -> None:
    part = {"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral"}}

    def system(day: str) -> dict[str, Any]:
        return {"role": "system", "content": [part, {"type": "text", "text": f"Today: {day}"}]}

    await client.chat(system("Monday"), QUESTION)
    _, cached = await client.chat(system("Friday"), QUESTION)
    prompt = await client.prompt(system("Monday"), QUESTION)
    (marked,) = [f.num_tokens for f in prompt.frontiers if f.is_explicit]
    assert cached == marked > 64


async def test_metrics_count_hits(client: Client) -> None:
    await client.chat(SYSTEM, QUESTION)
    await client.chat(SYSTEM, QUESTION)
    async with client.session.get(client.server.url + "/metrics") as response:
        page = await response.text()
    hits = [line for line in page.splitlines() if line.startswith("ninfer_cache_hits_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in hits) == 1
