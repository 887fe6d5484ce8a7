"""What answers, the metrics page and the request log say of the context cache."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ninfer.contract.cache import CacheUse, CheckpointKind, MissReason, Tier
from ninfer.contract.drafting import DraftSource
from ninfer.contract.errors import NonFiniteLogits, OutputError
from ninfer.contract.generation import (
    Admitted,
    Event,
    Finish,
    Finished,
    FinishReason,
    GenerationRequest,
    Usage,
)
from ninfer.contract.metrics import counter
from ninfer.contract.program import TransferKind
from ninfer.engine.context_metrics import ContextHoldings, ContextMetrics
from ninfer.engine.metric_families import context_families, engine_families
from ninfer.engine.metrics import EngineMetrics, Outcome
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.metrics_route import prometheus_text
from ninfer.gateway.request_log import RequestLog
from tests.helpers.fake_engine import CARD, TIMINGS, FakeEngine, fail, hold, say
from tests.helpers.gateway_rig import Rig, running_gateway, until

HIT = CacheUse(2, CheckpointKind.SESSION_END, Tier.HOST)
MISS = CacheUse(1, CheckpointKind.STABLE_PREFIX, Tier.DEVICE, MissReason.HISTORY_EDITED, 1)


def answers_with(use: CacheUse) -> Callable[[GenerationRequest], AsyncIterator[Event]]:
    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        usage = Usage(request.prompt.num_tokens, 1, 0, use)
        yield Admitted(usage)
        yield Finished(Finish(FinishReason.STOP_TOKEN, 2), (), usage, TIMINGS)

    return script


async def test_usage_says_how_much_was_cached(rig: Rig) -> None:
    rig.engine.script = answers_with(HIT)
    usage = (await rig.chat()).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    chunks = (await rig.chat(stream=True, stream_options={"include_usage": True})).events
    assert chunks[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_native_answers_say_where_from_and_why_not_more(rig: Rig) -> None:
    rig.engine.script = answers_with(MISS)
    meta = (await rig.generate(text="abc")).json()["meta_info"]
    assert meta["cached_tokens"] == 1
    assert meta["cache"] == {
        "tokens": 1,
        "kind": "stable_prefix",
        "tier": "device",
        "miss": "history_edited",
        "first_difference": 1,
    }
    rig.engine.script = say("x")
    assert (await rig.generate(text="abc")).json()["meta_info"]["cache"] is None


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"] == CARD.name
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


async def test_metrics_page_is_prometheus_text_and_never_needs_a_model(rig: Rig) -> None:
    await rig.chat()
    answer = await rig.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples_of(answer.body.decode())
    assert found["ninfer_http_exchanges_total", ()] == 2
    assert found["ninfer_http_exchanges_active", ()] == 1
    async with running_gateway(is_attached=False) as other:
        assert (await other.get("/metrics")).status == 200
        assert (await other.post("/flush_cache", {})).status == 503


async def test_metrics_of_the_model_are_on_the_page(rig: Rig) -> None:
    families = [counter("things", "Things", 3)]
    rig.gateway.attach(ServedModel(rig.engine, rig.frontend, CARD, lambda: families))
    found = samples_of((await rig.get("/v1/metrics")).body.decode())
    assert found["ninfer_things_total", ()] == 3


def holdings() -> ContextHoldings:
    tiers = Counter({Tier.DEVICE: 2, Tier.DISK: 1})
    return ContextHoldings(3, tiers, tiers, tiers, 4, 5, 6)


def test_every_counter_of_engine_and_cache_is_reported() -> None:
    metrics, context = EngineMetrics(), ContextMetrics()
    metrics.requests_total[Outcome.ERROR] = 7
    metrics.cached_tokens_total = 8
    context.note_use(HIT)
    context.note_use(MISS)
    context.transfers[TransferKind.RESTORE] = 9
    families = [
        *engine_families(FakeEngine().status(), metrics, 0.0),
        *context_families(context, holdings()),
    ]
    found = samples_of(prometheus_text(families, CARD.name).decode())
    assert found["ninfer_requests_total", (("outcome", "error"),)] == 7
    assert found["ninfer_cached_tokens_total", ()] == 8
    hit = (("kind", "session_end"), ("tier", "host"))
    assert found["ninfer_cache_hits_total", hit] == 1
    assert found["ninfer_cache_hit_tokens_total", hit] == 2
    assert found["ninfer_cache_misses_total", (("reason", "history_edited"),)] == 1
    assert found["ninfer_cache_misses_total", (("reason", "evicted"),)] == 0
    assert ("ninfer_cache_misses_total", (("reason", "disabled"),)) not in found
    assert found["ninfer_cache_transfers_total", (("transfer", "restore"),)] == 9
    assert found["ninfer_cache_tier_bytes", (("tier", "disk"),)] == 1
    assert found["ninfer_cache_checkpoints", ()] == 3
    assert found["ninfer_state_slots", ()] == FakeEngine().status().slots_total
    names = [family.name for family in families]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [*EngineMetrics.__slots__, *ContextMetrics.__slots__])
def test_no_counter_is_forgotten(name: str) -> None:
    def page(change: bool) -> str:
        metrics, context = EngineMetrics(), ContextMetrics()
        owner: Any = metrics if hasattr(metrics, name) else context
        value = getattr(owner, name)
        if change and name == "histograms":
            value.total.observe(1)
        elif change and name == "completion_rate":
            value.note(1, 0.5)
        elif change and name == "drafts":
            value.note(DraftSource.NGRAM, 2, 1)
        elif change and isinstance(value, dict):
            value.update(dict.fromkeys(_keys_of(name), 5))
        elif change:
            setattr(owner, name, 5)
        families = [
            *engine_families(FakeEngine().status(), metrics, 1.0),
            *context_families(context, holdings()),
        ]
        return prometheus_text(families, "m").decode()

    is_internal = name == "request_s_mean"
    assert (page(True) != page(False)) != is_internal


def _keys_of(name: str) -> list[Any]:
    keys: dict[str, list[Any]] = {
        "requests_total": list(Outcome),
        "hits": [(CheckpointKind.SESSION_END, Tier.HOST)],
        "hit_tokens": [(CheckpointKind.SESSION_END, Tier.HOST)],
        "misses": list(MissReason),
        "captures": list(CheckpointKind),
        "captures_refused": list(CheckpointKind),
        "evictions": list(Tier),
        "drops": list(Tier),
    }
    return keys.get(name, list(TransferKind))


async def test_flush_asks_the_engine(rig: Rig) -> None:
    answer = await rig.post("/flush_cache", {})
    assert (answer.status, answer.json()) == (200, {"status": "ok"})
    assert rig.engine.num_flushes == 1
    assert (await rig.get("/flush_cache")).status == 405


def test_a_full_disk_loses_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with RequestLog("/dev/full") as log:
        log.write({"a": 1})
    assert "lines are lost: [Errno 28]" in caplog.text


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def logged(path: Path, act: Callable[[Rig], Any]) -> list[dict[str, Any]]:
    log = await asyncio.to_thread(lambda: RequestLog(str(path)).__enter__())
    async with running_gateway(log=log) as rig:
        await act(rig)
    await asyncio.to_thread(log.__exit__)
    return await asyncio.to_thread(lines_of, path)


async def test_request_log_has_figures_and_no_text(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        rig.engine.script = answers_with(MISS)
        secret = {"messages": [{"role": "user", "content": "SECRET"}], "session_id": "SECRET"}
        answer = await rig.post("/v1/chat/completions", secret, headers={"X-Request-Id": "mine"})
        assert answer.status == 200

    path = tmp_path / "log.jsonl"
    (line,) = await logged(path, act)
    assert "SECRET" not in path.read_text()
    assert line.pop("time").startswith("20")
    assert line.pop("request_id").startswith("chatcmpl-")
    assert len(line.pop("trace_id")) == 32
    assert line == {
        "exchange_id": "mine",
        "parent_span_id": None,
        "path": "/chat/completions",
        "finish": "stop_token",
        "error": None,
        "prompt_tokens": 7,
        "completion_tokens": 1,
        "reasoning_tokens": 0,
        "cached_tokens": 1,
        "cache": {
            "tokens": 1,
            "kind": "stable_prefix",
            "tier": "device",
            "miss": "history_edited",
            "first_difference": 1,
        },
        "queue_s": TIMINGS.queue_s,
        "prefill_s": TIMINGS.prefill_s,
        "decode_s": TIMINGS.decode_s,
        "total_s": TIMINGS.total_s,
    }


async def test_request_log_has_a_line_for_every_choice_and_every_end(tmp_path: Path) -> None:
    async def act(rig: Rig) -> None:
        await rig.generate(text=["a", "bb"])
        rig.engine.script = fail(NonFiniteLogits("x"))
        await rig.chat()
        rig.engine.script = hold(asyncio.Event(), "x")
        _, writer = await rig.send_chat(stream=True)
        await until(lambda: rig.engine.num_open == 1)
        writer.close()
        await until(lambda: rig.engine.num_open == 0)

    lines = await logged(tmp_path / "log.jsonl", act)
    ends = [(line["finish"], line["error"]) for line in lines]
    assert ends == [
        ("stop_token", None),
        ("stop_token", None),
        ("failed", NonFiniteLogits("x").code),
        ("aborted", None),
    ]
    assert sorted(line["prompt_tokens"] for line in lines[:2]) == [1, 2]
    assert lines[3]["total_s"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_lose_their_mate_are_told_why(tmp_path: Path, stream: bool) -> None:
    async def act(rig: Rig) -> None:
        good, bad = hold(asyncio.Event(), "x"), fail(NonFiniteLogits("x"))
        rig.engine.script = lambda request: (bad if request.request_id.endswith("1") else good)(
            request
        )
        assert (await rig.chat(n=2, stream=stream)).status == (200 if stream else 500)

    lines = await logged(tmp_path / "log.jsonl", act)
    assert {(line["finish"], line["error"]) for line in lines} == {
        ("failed", NonFiniteLogits("x").code),
        ("aborted", NonFiniteLogits("x").code),
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_operator_ended_was_not_left_by_its_client(
    tmp_path: Path, stream: bool
) -> None:
    async def act(rig: Rig) -> None:
        rig.engine.script = hold(asyncio.Event(), "a")
        task = asyncio.create_task(rig.chat(stream=stream, n=2))
        await until(lambda: rig.engine.num_open == 2)
        assert rig.gateway.running.abort_all() == 1
        await task

    lines = await logged(tmp_path / "log.jsonl", act)
    ends = [(line["finish"], line["error"]) for line in lines]
    assert ends == [("failed", "request_aborted")] * 2


def test_a_slow_file_loses_lines_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ninfer.gateway.request_log.MAX_WAITING", 3)
    log = RequestLog(str(tmp_path / "log.jsonl"))
    for index in range(5):
        log.write({"index": index})
    with log:
        pass
    assert [line["index"] for line in lines_of(tmp_path / "log.jsonl")] == [0, 1, 2]
    assert [record.message for record in caplog.records] == [
        "--request-log: lines are lost: its file is too slow"
    ]


def test_request_log_adds_to_its_file_and_is_whole_when_it_closes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for number in range(2):
        with RequestLog(str(path)) as log:
            for index in range(500):
                log.write({"number": number, "index": index})
    assert [line["index"] for line in lines_of(path)] == [*range(500), *range(500)]


@pytest.mark.parametrize("name", ["", "missing/log.jsonl", "a\0b"])
def test_request_log_that_cannot_be_opened_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        RequestLog(str(tmp_path / name) if name else str(tmp_path))
    assert "--request-log" in str(caught.value)
