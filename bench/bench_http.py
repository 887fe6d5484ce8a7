"""The server as its clients see it: start, first token, tokens a second and memory.

    python -m bench.bench_http [--model PATH] [--json bench/results/NAME.json]

Starts `python -m ninfer serve` on a free loopback port, measures, and stops it by its own id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import numpy as np
import orjson

from bench.common.record import host, write_record

STORY = "Tell me a story about a little penguin who is afraid of deep water."
OUTPUT_TOKENS = 160
STREAM_COUNTS = (1, 8)
REPEATS = 5


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Medians over the repeats; `spread` is (max - min) / median of the rate."""

    streams: int
    tokens_per_s: float
    first_token_ms: float
    spread: float


@contextlib.asynccontextmanager
async def served(
    *arguments: str, log: int | BinaryIO = subprocess.DEVNULL
) -> AsyncIterator[tuple[str, int, float]]:
    """(url, process id, seconds from start to ready) of `python ARGUMENTS --port 0`, a server that
    says where it serves; its stderr goes to `log`."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, "--port", "0",
        stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip
    if process.stdout is None:
        raise RuntimeError("the server's output is not a pipe")
    try:
        async with asyncio.timeout(120):
            line = (await process.stdout.readline()).decode()
        if not line:
            raise RuntimeError("the server ended before it was ready")
        yield line.split()[-1], process.pid, time.perf_counter() - started
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


async def stream_once(
    session: aiohttp.ClientSession, url: str, seed: int, num_tokens: int = OUTPUT_TOKENS
) -> tuple[float, int]:
    """(seconds to the first token, completion tokens)."""
    body = {
        "messages": [{"role": "user", "content": STORY}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": num_tokens,
        "seed": seed,
    }
    started, first_s, tokens = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            elif not first_s and event["choices"][0]["delta"].get("content"):
                first_s = time.perf_counter() - started
    return first_s, tokens


async def measure_streams(session: aiohttp.ClientSession, url: str, streams: int) -> StreamResult:
    rates, firsts = [], []
    for repeat in range(REPEATS + 1):
        started = time.perf_counter()
        seeds = range(repeat * streams, (repeat + 1) * streams)
        results = await asyncio.gather(*(stream_once(session, url, seed) for seed in seeds))
        elapsed = time.perf_counter() - started
        if repeat > 0:
            rates.append(sum(tokens for _, tokens in results) / elapsed)
            firsts += [first * 1000 for first, _ in results]
    rate = statistics.median(rates)
    return StreamResult(streams, rate, statistics.median(firsts), (max(rates) - min(rates)) / rate)


async def measure_prefill(session: aiohttp.ClientSession, url: str, length: int) -> float:
    """Prompt tokens a second of one request with a one-token answer, median."""
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(REPEATS):
        ids = rng.integers(0, 4000, length).tolist()
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        started = time.perf_counter()
        async with session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            await response.read()
        rates.append(length / (time.perf_counter() - started))
    return statistics.median(rates)


def peak_mib(process_id: int) -> float:
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the system does not tell the peak memory")


async def measure(model: str | None) -> dict[str, Any]:
    command = ["-m", "ninfer", "serve", *([model] if model else [])]
    async with served(*command) as (url, process_id, ready_s), aiohttp.ClientSession() as session:
        streams = [await measure_streams(session, url, count) for count in STREAM_COUNTS]
        prefill = await measure_prefill(session, url, 1024)
        return {
            "ready_s": ready_s,
            "streams": [asdict(result) for result in streams],
            "prefill_1024_tokens_per_s": prefill,
            "peak_mib": peak_mib(process_id),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.model))
    print(f"start to ready        {figures['ready_s']:.2f} s")
    for result in figures["streams"]:
        print(
            f"{result['streams']:2d} stream(s)          {result['tokens_per_s']:7.1f} tokens/s,"
            f" first token {result['first_token_ms']:.0f} ms, spread {result['spread']:.0%}"
        )
    print(f"prefill, 1024 tokens  {figures['prefill_1024_tokens_per_s']:.0f} tokens/s")
    print(f"peak memory           {figures['peak_mib']:.0f} MiB")
    if arguments.json is not None:
        machine = {**host(), "numpy": np.__version__, "command": "python -m bench.bench_http"}
        write_record(arguments.json, {"machine": machine, "figures": figures})


if __name__ == "__main__":
    main()
