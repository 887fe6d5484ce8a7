"""How long the first token of a chat takes, over HTTP."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import orjson


async def first_token(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[float, int]:
    """(seconds to the first token, cached prompt tokens); the answer has one token."""
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    first_s, num_cached = 0.0, 0
    started = time.perf_counter()
    async with client.post(f"{url}/v1/chat/completions", json=stream) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            elif not first_s and any(_says(choice) for choice in event["choices"]):
                first_s = time.perf_counter() - started
    return first_s, num_cached


def _says(choice: dict[str, Any]) -> bool:
    delta = choice["delta"]
    return bool(delta.get("content") or delta.get("reasoning_content")) or bool(
        choice["finish_reason"]
    )
