"""Looking after a real server: figures under all their names, load, and aborts that free a lane."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from ninfer.options import EngineOptions
from tests.helpers.gateway_rig import until
from tests.helpers.served_model import RunningServer, served_demo_model

OPTIONS = EngineOptions(executor="cpu", max_concurrency=1, max_context=2048)
ENDLESS = {"max_new_tokens": 1900, "ignore_eos": True}


async def ask(server: RunningServer, path: str, body: dict[str, Any] | None = None) -> Any:
    async with aiohttp.ClientSession() as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, server.url + path, json=body) as response:
            if response.content_type != "application/json":
                return await response.text()
            return {"http_status": response.status, **await response.json()}


async def figures(server: RunningServer) -> dict[str, float]:
    """Samples without labels but the model's, by name."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(await ask(server, "/metrics"))
        for sample in family.samples
        if set(sample.labels) == {"model_name"}
    }


async def test_an_abort_frees_the_lane_and_the_figures_agree() -> None:
    async with served_demo_model(OPTIONS) as server:
        short = {"text": "Hello there", "sampling_params": {**ENDLESS, "max_new_tokens": 5}}
        done = await ask(server, "/generate", short)
        usage = done["meta_info"]
        running, waiting = (
            asyncio.create_task(
                ask(server, "/generate", {"text": "Go", "rid": rid, "sampling_params": ENDLESS})
            )
            for rid in ("first", "second")
        )
        await until(lambda: server.engine.status().waiting == 1)
        await until(lambda: server.engine.status().completion_tokens_total > 10)
        load = await ask(server, "/v1/load")
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 1)
        for rid, task in (("second", waiting), ("first", running)):
            assert (await ask(server, "/abort_request", {"rid": rid}))["aborted"] == 1
            answer = await task
            assert (answer["http_status"], answer["error"]["code"]) == (499, "request_aborted")
        await until(lambda: server.engine.status().outstanding == 0)

        found = await figures(server)
        assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
        assert found["vllm:generation_tokens_total"] >= usage["completion_tokens"]
        assert found["vllm:time_to_first_token_seconds_count"] == 2
        assert found["vllm:e2e_request_latency_seconds_count"] == 1
        assert found["vllm:request_generation_tokens_sum"] == usage["completion_tokens"]
        assert found["vllm:request_prompt_tokens_sum"] == usage["prompt_tokens"]
        assert found["vllm:inter_token_latency_seconds_count"] >= usage["completion_tokens"] - 1
        assert found["ninfer_state_slots"] > found["ninfer_state_slots_used"]
