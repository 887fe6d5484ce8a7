"""What streaming costs the host: many event streams over a device that takes no time.

    python -m bench.bench_streaming [--protocol chat] [--streams 64] [--step-ms 0] [--repeats 5]
                                    [--json OUT.json]

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
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.bench_http import STORY, served
from bench.common.free_server import SENTENCE
from bench.common.load_protocols import PROTOCOLS, Case, Protocol
from bench.common.record import host, write_record

_TARGET_TOKENS_S: Final = 20_000
_OUTPUT_TOKENS: Final = 1000
_WARM_UP_TOKENS: Final = 50
_MARKS: Final = {
    "chat": b'"content":',
    "completions": b'"text":',
    "generate": b'"text":',
    "anthropic": b'"text_delta"',
    "responses": b'"response.output_text.delta"',
}
"""What a frame with text has once; in few others."""
_WITHOUT_THOUGHT: Final[dict[str, dict[str, Any]]] = {
    "chat": {"chat_template_kwargs": {"enable_thinking": False}},
    "anthropic": {"thinking": {"type": "disabled"}},
    "responses": {"reasoning": {"effort": "none"}},
}
_READ_BYTES: Final = 1 << 16


@dataclass(slots=True)
class Stream:
    """What one reader saw: (arrival, frames with text so far) and the whole body."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    def text(self, protocol: Protocol) -> str:
        return "".join(self.pieces(protocol))

    def pieces(self, protocol: Protocol) -> list[str]:
        """The texts of frames that have one. A frame has a line to itself, whatever the transfer
        coding puts between frames."""
        lines = bytes(self.body).split(b"\n")
        events = [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return [piece for event in events if (piece := protocol.piece(event))]


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_s: float
    step_ms: float
    server_cpu_us: float
    merged: float


def request_of(protocol: Protocol, num_tokens: int) -> dict[str, Any]:
    """A long answer without a thought."""
    body = protocol.payload(Case(STORY, 0.0, 1)) | _WITHOUT_THOUGHT.get(protocol.name, {})
    settings = body.get("sampling_params", body)
    for name in {"max_tokens", "max_output_tokens"} & settings.keys():
        settings[name] = num_tokens
    return {**body, "stream": True}


async def read_stream(host: str, port: int, protocol: Protocol, num_tokens: int) -> Stream:
    """One answer on a connection of its own; frames are counted as they come."""
    body = orjson.dumps(request_of(protocol, num_tokens))
    mark = _MARKS[protocol.name]
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {protocol.path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    writer.write(
        f"{head}Connection: close\r\nContent-Type: application/json\r\n\r\n".encode() + body
    )
    stream, count = Stream(), 0
    while data := await reader.read(_READ_BYTES):
        count += data.count(mark)
        stream.arrivals.append((time.perf_counter(), count))
        stream.body += data
    writer.close()
    return stream


def cpu_s(process_id: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_once(
    url: str, process_id: int, protocol: Protocol, streams: int, num_tokens: int
) -> Run:
    """Raises RuntimeError for an answer that is not what the device says."""
    address = urlsplit(url)
    host, port, before_s = address.hostname or "", address.port or 0, cpu_s(process_id)
    found = await asyncio.gather(
        *(read_stream(host, port, protocol, num_tokens) for _ in range(streams))
    )
    used_s = cpu_s(process_id) - before_s
    total = streams * num_tokens
    began_s = max(next(at for at, count in stream.arrivals if count > 1) for stream in found)
    ended_s = min(stream.arrivals[-1][0] for stream in found)
    inside = sum(_count_at(stream, ended_s) - _count_at(stream, began_s) for stream in found)
    counted = sum(stream.arrivals[-1][1] for stream in found)
    rate = inside * total / counted / (ended_s - began_s)
    return Run(
        tokens_per_s=rate,
        step_ms=1000 * streams / rate,
        server_cpu_us=1e6 * used_s / total,
        merged=1 - _num_frames(found, protocol) / total,
    )


def _count_at(stream: Stream, at_s: float) -> int:
    return max((count for seen_s, count in stream.arrivals if seen_s <= at_s), default=0)


def _num_frames(found: list[Stream], protocol: Protocol) -> int:
    """Frames with text, once it is clear that all of them are right."""
    for stream in found:
        text = stream.text(protocol)
        if SENTENCE.strip() not in text or text != found[0].text(protocol):
            raise RuntimeError(f"a wrong answer: {text[:80]!r}")
    return sum(len(stream.pieces(protocol)) for stream in found)


async def measure(protocol: str, streams: int, step_ms: float, repeats: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    command = ["-m", "bench.common.free_server", "--lanes", str(streams), "--step-ms", str(step_ms)]
    async with served(*command) as (url, process_id, _):
        await run_once(url, process_id, PROTOCOLS[protocol], streams, _WARM_UP_TOKENS)
        runs = [
            await run_once(url, process_id, PROTOCOLS[protocol], streams, _OUTPUT_TOKENS)
            for _ in range(repeats)
        ]
    rates = [run.tokens_per_s for run in runs]
    return {
        "protocol": protocol,
        "streams": streams,
        "device_step_ms": step_ms,
        "load": load,
        "best": asdict(max(runs, key=lambda run: run.tokens_per_s)),
        "median_tokens_per_s": statistics.median(rates),
        "runs": [asdict(run) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="chat")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    figures = asyncio.run(
        measure(arguments.protocol, arguments.streams, arguments.step_ms, arguments.repeats)
    )
    for run in figures["runs"]:
        print(
            f"{run['tokens_per_s']:8.0f} tokens/s  step {run['step_ms']:.2f} ms  server"
            f" {run['server_cpu_us']:.1f} us/token  merged {run['merged']:.1%}"
        )
    print(f"target {_TARGET_TOKENS_S} tokens/s; load before {figures['load']:.2f}")
    if arguments.json is not None:
        target = {"target_tokens_per_s": _TARGET_TOKENS_S}
        write_record(arguments.json, {**host(), **target, **figures})


if __name__ == "__main__":
    main()
