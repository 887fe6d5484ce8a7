"""How much of agents' prompts comes from the context cache, against a real server over HTTP.

    python -m bench.bench_agent_trace [--model PATH] [--json bench/results/NAME.json]
        [--sessions N] [--turns N] [--max-context N] [--host-shares SHARE ...] [--hits N]

20 sessions of 15 turns share 2,000 tokens of system text and tools. They take turns in pairs whose
requests run at the same time, so that every session is the least recently used one in turn. One
question is edited. The runs: with the device memory that all histories and three states a session
take; with half of it and a host tier as large as the whole; and, without a target, with half of it
and a quarter of the whole on the host (`--host-shares`). Behind the first run prompts of 4,096
tokens, cold and once more.

Reusable are the tokens that a prompt has in common with any prompt and answer that was complete
before it was sent, less its last one. Answers count as their text is tokenised, which can be longer
than what the prompt and the tokens themselves have in common, never shorter. What the other of a
pair has computed meanwhile may be reused besides, so that a short trace can have more than 100 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from bench.bench_http import served
from bench.common.agent_trace import AgentTrace, ServedTokens, Session
from bench.common.first_token import first_token
from bench.common.record import commit, write_record
from ninfer import __version__
from ninfer.cli.loading import embedded_model_path
from ninfer.contract.units import PAGE_TOKENS
from ninfer.convert.source import open_model
from ninfer.frontend.frontend import ModelFrontend
from ninfer.gateway.chat_request import parse_chat_request
from ninfer.gateway.fields import Fields
from ninfer.options import SamplingOptions

ANSWER_TOKENS: Final = 24
LANES: Final = 2
STATES_PER_SESSION: Final = 3
EDITED: Final = (3, 9, 6)
"""(session, in turn, asks turn ... again)"""
HIT_TOKENS: Final = 4096
TARGETS: Final = {"full": 0.95, "half": 0.80, "ttft": 0.10}


@dataclass(frozen=True, slots=True)
class TraceSize:
    """`max_context`: the longest history must fit it, and half of the memory must hold it."""

    sessions: int
    turns: int
    max_context: int

    def trace(self) -> AgentTrace:
        return AgentTrace(self.sessions, self.turns)


@dataclass(slots=True)
class RunFigures:
    """`sources` and `misses` count requests; seconds of the whole run."""

    name: str
    device_cache_bytes: int
    host_bytes: int
    num_requests: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    reused_tokens: int = 0
    seconds: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.reused_tokens / self.reusable_tokens


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Of the trace: what is there in any case, and what all histories take."""

    fixed_bytes: int
    page_bytes: int
    slot_bytes: int
    num_pages: int
    num_slots: int

    def cache_bytes(self, share: float) -> int:
        pages = int(self.num_pages * share) * self.page_bytes
        return pages + int(self.num_slots * share) * self.slot_bytes

    def flags(self, share: float, host_bytes: int) -> list[str]:
        budget = self.fixed_bytes + self.cache_bytes(share)
        return [
            *("--memory-budget", str(budget), "--cache-slots", str(int(self.num_slots * share))),
            *("--host-cache-bytes", str(host_bytes)),
        ]


class PromptTokens:
    """The prompt of a request body in tokens, as the server has it."""

    def __init__(self, model: Path) -> None:
        source = open_model(model)
        self._frontend = ModelFrontend(source.config, source.resources, SamplingOptions())

    async def of_chat(self, body: dict[str, Any]) -> list[int]:
        request = parse_chat_request(Fields(body), self._frontend.vocab_size)
        return _ids((await self._frontend.prepare_chat(request.chat)).token_ids)

    async def of_text(self, text: str) -> list[int]:
        return _ids((await self._frontend.prepare_text(text)).token_ids) if text else []


def _ids(array: Any) -> list[int]:
    return [int(token_id) for token_id in array]


async def run_trace(
    client: aiohttp.ClientSession,
    url: str,
    tokens: PromptTokens,
    size: TraceSize,
    figures: RunFigures,
) -> None:
    """Every session's turn t before any session's turn t + 1."""
    trace, known = size.trace(), ServedTokens()
    started = time.perf_counter()
    for turn in range(size.turns):
        for first in range(0, size.sessions, 2):
            pair = trace.sessions[first : first + 2]
            for session in pair:
                _ask(trace, session, turn)
            await _in_pairs(client, url, tokens, trace, pair, known, figures, turn)
    figures.seconds = time.perf_counter() - started


def _ask(trace: AgentTrace, session: Session, turn: int) -> None:
    edited, at, again = EDITED
    if turn == at and session in trace.sessions[edited : edited + 1]:
        trace.edit(session, again)
    else:
        trace.ask(session)


async def _in_pairs(
    client: aiohttp.ClientSession,
    url: str,
    tokens: PromptTokens,
    trace: AgentTrace,
    pair: list[Session],
    known: ServedTokens,
    figures: RunFigures,
    turn: int,
) -> None:
    steps = [True, False] if trace.uses_tool(turn) else [False]
    for calls_tool in steps:
        bodies = [trace.body(session, ANSWER_TOKENS) for session in pair]
        prompts = [await tokens.of_chat(body) for body in bodies]
        reusable = [known.reusable(prompt) for prompt in prompts]
        answers = await asyncio.gather(*(_post(client, url, body) for body in bodies))
        for session, prompt, num_reusable, answer in zip(
            pair, prompts, reusable, answers, strict=True
        ):
            usage, message = answer["usage"], answer["choices"][0]["message"]
            if usage["prompt_tokens"] != len(prompt):
                raise RuntimeError("the server's prompt is not the one worked out here")
            figures.num_requests += 1
            figures.prompt_tokens += len(prompt)
            figures.reusable_tokens += num_reusable
            figures.reused_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            content, thought = message["content"], message.get("reasoning_content", "")
            text = f"{thought}\n</think>\n\n{content}" if content else thought
            known.add([*prompt, *await tokens.of_text(text)])
            trace.answer(session, content, thought, calls_tool=calls_tool)


async def _post(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        answer: dict[str, Any] = orjson.loads(await response.read())
        return answer


async def memory_need(model: Path, tokens: PromptTokens, size: TraceSize) -> MemoryNeed:
    """From the trace with made-up answers of full length."""
    trace, known = size.trace(), ServedTokens()
    for session in trace.sessions:
        for turn in range(size.turns):
            trace.ask(session)
            for calls_tool in [True, False] if trace.uses_tool(turn) else [False]:
                words = trace.words(ANSWER_TOKENS // 2)
                trace.answer(session, words, "", calls_tool=calls_tool)
        known.add(await tokens.of_chat(trace.body(session, ANSWER_TOKENS)))
    num_slots = STATES_PER_SESSION * size.sessions + 1
    plan = _plan(model, size)
    capacity, detail = plan["capacity"], plan["detail"]
    slots = 2 * capacity["max_concurrency"] + 1
    fixed = plan["weights_bytes"] + plan["workspace_bytes"] + slots * detail["slot_bytes"]
    return MemoryNeed(
        fixed, detail["page_bytes"], detail["slot_bytes"], known.num_pages(PAGE_TOKENS), num_slots
    )


def _common_flags(size: TraceSize) -> list[str]:
    return ["--max-concurrency", str(LANES), "--max-context", str(size.max_context)]


def _plan(model: Path, size: TraceSize) -> dict[str, Any]:
    command = [sys.executable, "-m", "ninfer", "info", str(model), "--json", *_common_flags(size)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    plan: dict[str, Any] = json.loads(result.stdout)["memory_plan"]
    return plan


@contextlib.asynccontextmanager
async def _server(model: Path, flags: list[str], log: Path) -> AsyncIterator[str]:
    arguments = ["-m", "ninfer", "serve", str(model), *flags]
    async with served(*arguments, "--request-log", str(log)) as (url, _, _):
        yield url


class Bench:
    """Servers of one model, asked for one trace."""

    def __init__(
        self, model: Path, tokens: PromptTokens, size: TraceSize, need: MemoryNeed
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._size = size
        self._need = need

    async def measure_run(
        self, name: str, share: float, host_share: float, num_hits: int = 0
    ) -> tuple[RunFigures, list[dict[str, float]]]:
        """The trace with so much of the memory it needs; the times of long prompts behind it."""
        need = self._need
        host_bytes = need.cache_bytes(host_share)
        figures = RunFigures(name, need.cache_bytes(share), host_bytes)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "requests.jsonl"
            flags = [*_common_flags(self._size), *need.flags(share, host_bytes)]
            async with (
                _server(self._model, flags, log) as url,
                aiohttp.ClientSession() as client,
            ):
                await run_trace(client, url, self._tokens, self._size, figures)
                times = await measure_hits(client, url, self._tokens, num_hits)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
        uses = [line["cache"] for line in lines[: figures.num_requests]]
        figures.sources = dict(Counter(f"{use['kind']} {use['tier']}" for use in uses))
        figures.misses = dict(Counter(str(use["miss"]) for use in uses))
        return figures, times


async def measure_hits(
    client: aiohttp.ClientSession, url: str, tokens: PromptTokens, count: int
) -> list[dict[str, float]]:
    """Seconds to the first token of new prompts of HIT_TOKENS, cold and the second time."""
    trace = AgentTrace(0, 0, seed=1)
    times = []
    for _ in range(count):
        body = await _long_body(trace, tokens)
        cold_s, _ = await first_token(client, url, body)
        hit_s, num_cached = await first_token(client, url, body)
        times.append({"cold_s": cold_s, "hit_s": hit_s, "cached_tokens": num_cached})
    return times


async def _long_body(trace: AgentTrace, tokens: PromptTokens) -> dict[str, Any]:
    session = Session("long", [{"role": "user", "content": trace.words(HIT_TOKENS // 3)}])
    while True:
        body = trace.body(session, 1)
        missing = HIT_TOKENS - len(await tokens.of_chat(body))
        if missing <= 0:
            return body
        session.messages[0]["content"] += " " + trace.words(max(1, missing // 3))


@contextlib.contextmanager
def _long_context_model(model: Path | None, max_context: int) -> Any:
    """The model; the embedded one in a copy that takes longer contexts than it was made for."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(embedded_model_path(), Path(folder) / "demo_model"))
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = max_context
        (copy / "config.json").write_text(json.dumps(config))
        yield copy


async def measure(
    model: Path, size: TraceSize, host_shares: list[float], num_hits: int
) -> dict[str, Any]:
    tokens = PromptTokens(model)
    need = await memory_need(model, tokens, size)
    bench = Bench(model, tokens, size, need)
    full, times = await bench.measure_run("full", 1.0, 0.0, num_hits)
    runs = [full]
    for share in host_shares:
        name = "half" if share >= 1.0 else f"half, host {share:g}"
        runs.append((await bench.measure_run(name, 0.5, share))[0])
    ratios = [item["hit_s"] / item["cold_s"] for item in times]
    return {
        "need": asdict(need),
        "runs": [{**asdict(run), "share": run.share} for run in runs],
        "first_token": times,
        "first_token_ratio": statistics.median(ratios) if ratios else None,
    }


def show(record: dict[str, Any]) -> None:
    for run in record["runs"]:
        target = TARGETS.get(run["name"])
        expected = "no target" if target is None else f"target {target:.0%}"
        print(
            f"{run['name']}: {run['num_requests']} requests, {run['prompt_tokens']:,} tokens,"
            f" {run['reusable_tokens']:,} reusable, {run['reused_tokens']:,} reused:"
            f" {run['share']:.1%} ({expected}), {run['seconds']:.0f} s"
        )
        print(f"      from {run['sources']}")
        print(f"      not more {run['misses']}")
    ratio = record["first_token_ratio"]
    if ratio is not None:
        print(f"first token of a hit / cold, {HIT_TOKENS} tokens: {ratio:.1%} (target < 10%)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument(
        "--host-shares",
        type=float,
        nargs="*",
        default=[1.0, 0.25],
        help="a run with half of the memory each: the host tier in parts of the whole need",
    )
    parser.add_argument("--hits", type=int, default=5, help="long prompts behind the first run")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    size = TraceSize(arguments.sessions, arguments.turns, arguments.max_context)
    with _long_context_model(arguments.model, size.max_context) as model:
        figures = asyncio.run(measure(model, size, arguments.host_shares, arguments.hits))
    record = {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "ninfer": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **asdict(size),
        **figures,
    }
    show(record)
    if arguments.json is not None:
        write_record(arguments.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
