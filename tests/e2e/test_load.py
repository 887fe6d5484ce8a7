"""Sixty-four clients against eight lanes: every answer is right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from ninfer.contract.generation import EngineHealth
from ninfer.options import EngineOptions
from tests.helpers.gateway_rig import until
from tests.helpers.served_model import RunningServer, served_demo_model

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

NUM_CLIENTS = 64
NUM_REQUESTS = 2000
MAX_TOKENS = 12
OUTER_LIMIT_S = 3600.0
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""The test as a whole has one; a busy machine may take long for a single request."""
QUESTIONS = (
    "hi",
    "What is a volcano?",
    "Name three farm animals.",
    "What is 48 + 37?",
    "Tell me a story about a little penguin who is afraid of deep water.",
    "Write one sentence with the word river. " * 20,
)


@dataclass(frozen=True)
class Case:
    """One question with its settings, and therefore one right answer."""

    question: str
    temperature: float
    seed: int
    think: bool

    def payload(self) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.question}],
            "max_tokens": MAX_TOKENS,
            "temperature": self.temperature,
            "seed": self.seed,
            "chat_template_kwargs": {"enable_thinking": self.think},
        }


CASES = tuple(
    Case(question, temperature, seed, think=seed == 2)
    for question in QUESTIONS
    for seed, temperature in ((1, 0.0), (2, 0.8), (3, 1.5))
)


@dataclass(frozen=True)
class Spoken:
    """What a client saw. `is_whole` is false when it left or was cut off."""

    reasoning: str
    content: str
    is_whole: bool


class Client:
    """Sends requests one after the other and sometimes leaves in the middle."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self._url = url
        self._session = session
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def ask(self, case: Case) -> Spoken | None:
        """One request of a kind drawn at random; None when it ended in an expected refusal."""
        kind = self._random.choices(
            ("stream", "whole", "leave", "vanish", "deadline"), (55, 15, 15, 5, 10)
        )[0]
        self.outcomes[kind] += 1
        if kind == "whole":
            return await self._whole(case)
        if kind == "vanish":
            await self._vanish(case)
            return None
        events = self._random.randrange(1, 6) if kind == "leave" else None
        deadline_s = self._random.choice((0.05, 0.3, 1.0)) if kind == "deadline" else None
        return await self._stream(case, events, deadline_s)

    async def _whole(self, case: Case) -> Spoken:
        async with self._session.post(self._url, json=case.payload()) as response:
            assert response.status == 200, await response.text()
            message = orjson.loads(await response.read())["choices"][0]["message"]
        return Spoken(message.get("reasoning_content", ""), message["content"], True)

    async def _vanish(self, case: Case) -> None:
        """Gone before the first byte of the answer."""
        try:
            async with asyncio.timeout(self._random.random() * 0.2):
                await self._whole(case)
        except TimeoutError:
            return

    async def _stream(
        self, case: Case, leave_after: int | None, deadline_s: float | None
    ) -> Spoken | None:
        payload = case.payload() | {"stream": True}
        if deadline_s is not None:
            payload["timeout_s"] = deadline_s
        reasoning, content, num_events = "", "", 0
        async with self._session.post(self._url, json=payload) as response:
            if response.status != 200:
                assert deadline_s is not None, await response.text()
                assert response.status == 408, await response.text()
                return None
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return Spoken(reasoning, content, True)
                event = orjson.loads(data)
                if "error" in event:
                    assert deadline_s is not None, event
                    assert event["error"]["code"] == "deadline_exceeded"
                    return Spoken(reasoning, content, False)
                delta = event["choices"][0]["delta"]
                reasoning += delta.get("reasoning_content", "")
                content += delta.get("content", "")
                num_events += 1
                if leave_after is not None and num_events >= leave_after:
                    return Spoken(reasoning, content, False)
        raise AssertionError("the stream ended without its end mark")


async def right_answers(server: RunningServer) -> dict[Case, Spoken]:
    """Every case alone, one after the other."""
    answers = {}
    async with aiohttp.ClientSession(timeout=NO_TIMEOUT) as session:
        client = Client(f"{server.url}/v1/chat/completions", session, seed=0)
        for case in CASES:
            answers[case] = await client._whole(case)
    return answers


async def run_client(
    url: str, index: int, counts: list[int], answers: dict[Case, Spoken], outcomes: Counter[str]
) -> None:
    chooser = random.Random(1000 + index)
    async with aiohttp.ClientSession(timeout=NO_TIMEOUT) as session:
        client = Client(f"{url}/v1/chat/completions", session, seed=index)
        while counts[0] > 0:
            counts[0] -= 1
            case = chooser.choice(CASES)
            spoken = await client.ask(case)
            if spoken is None:
                continue
            right = answers[case]
            if spoken.is_whole:
                assert (spoken.reasoning, spoken.content) == (right.reasoning, right.content)
            else:
                assert right.reasoning.startswith(spoken.reasoning)
                assert right.content.startswith(spoken.content)
        outcomes.update(client.outcomes)


async def wait_until_idle(server: RunningServer) -> None:
    await until(lambda: not server.engine.status().outstanding, OUTER_LIMIT_S)
    await until(lambda: not server.gateway.counters.exchanges_active, OUTER_LIMIT_S)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
@pytest.mark.timeout(OUTER_LIMIT_S)
async def test_every_request_ends_once_with_the_answer_it_has_alone() -> None:
    options = EngineOptions(max_pending=NUM_CLIENTS, queue_timeout=OUTER_LIMIT_S)
    async with served_demo_model(options) as server:
        answers = await right_answers(server)
        await wait_until_idle(server)
        num_tasks = len(asyncio.all_tasks())
        outcomes: Counter[str] = Counter()

        counts = [NUM_REQUESTS // 4]
        await run_crowd(server, counts, answers, outcomes)
        gc.collect()
        warm_bytes = resident_bytes()

        counts = [NUM_REQUESTS - NUM_REQUESTS // 4]
        await run_crowd(server, counts, answers, outcomes)

        assert outcomes.total() == NUM_REQUESTS
        assert all(outcomes[kind] > 0 for kind in ("stream", "whole", "leave", "vanish"))
        status = server.engine.status()
        assert (status.waiting, status.running, status.outstanding) == (0, 0, 0)
        assert status.health is EngineHealth.READY
        server.engine.flush_cache()
        await asyncio.sleep(0.1)
        server.model.program.check()
        occupancy = server.model.program.occupancy()
        assert (occupancy.lanes_used, occupancy.pages_used, occupancy.slots_used) == (0, 0, 0)
        assert len(asyncio.all_tasks()) <= num_tasks
        gc.collect()
        assert resident_bytes() - warm_bytes < 16 * 2**20


async def run_crowd(
    server: RunningServer,
    counts: list[int],
    answers: dict[Case, Spoken],
    outcomes: Counter[str],
) -> None:
    async with asyncio.TaskGroup() as crowd:
        for index in range(NUM_CLIENTS):
            crowd.create_task(run_client(server.url, index, counts, answers, outcomes))
    await wait_until_idle(server)
