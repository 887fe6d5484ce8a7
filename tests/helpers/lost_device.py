"""What clients and health checks see when the device fails under a running server.

As a program (`python -m tests.helpers.lost_device`) it breaks a real device and prints the report.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from ninfer.kernels.library import KernelLibrary
from ninfer.ops import swiglu
from ninfer.options import EngineOptions
from ninfer.program.executors.cuda_tensor import DeviceTensor
from tests.helpers.served_model import RunningServer, served_demo_model

_LONGEST_S = 20.0
"""Nobody may wait longer for anything."""
_UNMAPPED = 1 << 20


@dataclass(frozen=True)
class FailureReport:
    """streamed   content pieces before the failure; last_event   of the stream that was cut off
    (status, error) of a new request; (status, answer) of /health
    """

    streamed: int
    last_event: str
    request_status: int
    request_error: str
    health_status: int
    health: str
    reason: str


async def lose_device(
    options: EngineOptions, break_device: Callable[[RunningServer], None]
) -> FailureReport:
    """Serve the demo model, break the device under a stream, and look round."""
    async with (
        served_demo_model(options) as server,
        asyncio.timeout(_LONGEST_S),
        aiohttp.ClientSession(server.url) as session,
    ):
        streamed, last_event = await _stream(session, lambda: break_device(server))
        async with session.post("/v1/chat/completions", json=_request(stream=False)) as response:
            request_status, request_error = response.status, await response.text()
        async with session.get("/health") as response:
            health_status, health = response.status, (await response.json())["status"]
        reason = server.engine.status().error or ""
    return FailureReport(
        streamed,
        last_event,
        request_status,
        json.loads(request_error)["error"]["message"],
        health_status,
        health,
        reason,
    )


async def _stream(
    session: aiohttp.ClientSession, break_device: Callable[[], None]
) -> tuple[int, str]:
    """Pieces that came before the device was broken, and the stream's last event."""
    streamed, last = 0, ""
    async with session.post("/v1/chat/completions", json=_request(stream=True)) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: "):
                last = line[6:].decode().strip()
                streamed += 1
                if streamed == 5:
                    break_device()
    return streamed, last


def _request(*, stream: bool) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": stream,
        "ignore_eos": True,
        "max_tokens": 400,
        "seed": 1,
    }


def write_wildly(_server: RunningServer) -> None:
    """A kernel that reads and writes where nothing is allocated; the process's context is lost."""
    nothing = DeviceTensor.dense(_UNMAPPED, (1, 16), "uint16")
    swiglu.launch(KernelLibrary.open(), nothing, nothing.columns(0, 8), stream=0)


def main() -> None:
    options = EngineOptions(executor="cuda", weights="bf16", memory_budget=4 << 30)
    report = asyncio.run(lose_device(options, write_wildly))
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
