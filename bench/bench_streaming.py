"""What streaming costs the host: many event streams over a device that takes no time.

    python -m bench.bench_streaming [--streams 64] [--step-ms 0] [--repeats 5] [--json OUT.json]

The server (bench/common/free_server.py) runs in a process of its own, this client in another. All
streams run side by side; figures are of the time in which every one of them was running.

    tokens_per_s    over HTTP, counted in the frames that arrived
    step_ms         a step gives each stream one token
    server_cpu_us   processor time of the server for a token, whole run; little moved by neighbours
    merged          tokens that came in a frame with the one before: the reader was behind
    load            of the machine in the minute before, other than this run's own
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.bench_http import STORY, served
from bench.common.free_server import SENTENCE
from bench.common.record import commit, write_record
from ninfer import __version__

_TARGET_TOKENS_S: Final = 20_000
_OUTPUT_TOKENS: Final = 1000
_WARM_UP_TOKENS: Final = 50
_MARK: Final = b'"content":'
_READ_BYTES: Final = 1 << 16


@dataclass(slots=True)
class Stream:
    """What one reader saw: (arrival, frames with content so far) and the whole body."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    def text(self) -> str:
        choices = [event["choices"] for event in self._events()]
        return "".join(choice[0]["delta"].get("content", "") for choice in choices if choice)

    def num_tokens(self) -> int:
        return int(self._events()[-1]["usage"]["completion_tokens"])

    def _events(self) -> list[Any]:
        """A frame has a line to itself, whatever the transfer coding puts between frames."""
        lines = bytes(self.body).split(b"\n")
        return [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_s: float
    step_ms: float
    server_cpu_us: float
    merged: float


async def read_stream(host: str, port: int, num_tokens: int) -> Stream:
    """One chat completion on a connection of its own; frames are counted as they come."""
    body = orjson.dumps(
        {
            "messages": [{"role": "user", "content": STORY}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "max_tokens": num_tokens,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    writer.write(
        f"{head}Connection: close\r\nContent-Type: application/json\r\n\r\n".encode() + body
    )
    stream, count = Stream(), 0
    while data := await reader.read(_READ_BYTES):
        count += data.count(_MARK)
        stream.arrivals.append((time.perf_counter(), count))
        stream.body += data
    writer.close()
    return stream


def cpu_s(process_id: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_once(url: str, process_id: int, streams: int, num_tokens: int) -> Run:
    """Raises RuntimeError for an answer that is not what the device says."""
    address = urlsplit(url)
    before_s = cpu_s(process_id)
    found = await asyncio.gather(
        *(
            read_stream(address.hostname or "", address.port or 0, num_tokens)
            for _ in range(streams)
        )
    )
    used_s = cpu_s(process_id) - before_s
    _check(found, num_tokens)
    frames = sum(stream.arrivals[-1][1] - 1 for stream in found)
    began_s = max(next(at for at, count in stream.arrivals if count > 1) for stream in found)
    ended_s = min(stream.arrivals[-1][0] for stream in found)
    inside = sum(_count_at(stream, ended_s) - _count_at(stream, began_s) for stream in found) * (
        streams * num_tokens / frames
    )
    rate = inside / (ended_s - began_s)
    return Run(
        tokens_per_s=rate,
        step_ms=1000 * streams / rate,
        server_cpu_us=1e6 * used_s / (streams * num_tokens),
        merged=1 - frames / (streams * num_tokens),
    )


def _count_at(stream: Stream, at_s: float) -> int:
    return max((count for seen_s, count in stream.arrivals if seen_s <= at_s), default=0)


def _check(found: list[Stream], num_tokens: int) -> None:
    for stream in found:
        text = stream.text()
        if stream.num_tokens() != num_tokens or SENTENCE.strip() not in text:
            raise RuntimeError(f"a wrong answer: {text[:80]!r}")


async def measure(streams: int, step_ms: float, repeats: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    command = ["-m", "bench.common.free_server", "--lanes", str(streams), "--step-ms", str(step_ms)]
    async with served(*command) as (url, process_id, _):
        await run_once(url, process_id, streams, _WARM_UP_TOKENS)
        runs = [await run_once(url, process_id, streams, _OUTPUT_TOKENS) for _ in range(repeats)]
    rates = [run.tokens_per_s for run in runs]
    return {
        "streams": streams,
        "device_step_ms": step_ms,
        "load": load,
        "best": asdict(max(runs, key=lambda run: run.tokens_per_s)),
        "median_tokens_per_s": statistics.median(rates),
        "runs": [asdict(run) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.streams, arguments.step_ms, arguments.repeats))
    for run in figures["runs"]:
        print(
            f"{run['tokens_per_s']:8.0f} tokens/s  step {run['step_ms']:.2f} ms  server"
            f" {run['server_cpu_us']:.1f} us/token  merged {run['merged']:.1%}"
        )
    print(f"target {_TARGET_TOKENS_S} tokens/s; load before {figures['load']:.2f}")
    if arguments.json is not None:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "ninfer": __version__,
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        target = {"target_tokens_per_s": _TARGET_TOKENS_S}
        write_record(arguments.json, {**machine, **target, **figures})


if __name__ == "__main__":
    main()
