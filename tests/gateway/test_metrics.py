"""The metrics page: histograms, HTTP figures, and the names that dashboards of others expect."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ninfer.contract.drafting import DraftSource
from ninfer.contract.errors import NonFiniteLogits
from ninfer.contract.generation import Timings, Usage
from ninfer.contract.metrics import Histogram, MetricFamily, histogram
from ninfer.engine.histograms import FIRST_TOKEN_EDGES_S, EngineHistograms
from ninfer.engine.metric_families import engine_families
from ninfer.engine.metrics import EngineMetrics, Outcome
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.metric_aliases import alias_families
from ninfer.gateway.metrics_route import prometheus_text
from ninfer.options import ServeOptions
from tests.helpers.fake_engine import CARD, FakeEngine, FakeFrontend, fail, hold
from tests.helpers.gateway_rig import HOST, Rig, running_gateway, until

VLLM = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge", "cache_config_info": "gauge",
    "prompt_tokens": "counter", "generation_tokens": "counter", "request_success": "counter",
    "num_preemptions": "counter", "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter", "corrupted_requests": "counter",
    "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
    "time_per_output_token_seconds": "histogram", "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram", "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram", "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram", "request_params_n": "histogram",
    "iteration_tokens_total": "histogram",
    "spec_decode_num_drafts": "counter", "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
}  # fmt: skip
SGLANG = {
    "num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "cache_hit_rate",
    "prompt_tokens", "generation_tokens", "time_to_first_token_seconds",
    "time_per_output_token_seconds", "e2e_request_latency_seconds", "gen_throughput",
}  # fmt: skip


def page_of(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


async def page(rig: Rig) -> dict[str, Any]:
    return page_of((await rig.get("/metrics")).body.decode())


def attach_figures(rig: Rig, metrics: EngineMetrics) -> None:
    def families() -> list[MetricFamily]:
        return engine_families(rig.engine.status(), metrics, 10.0)

    rig.gateway.attach(ServedModel(rig.engine, rig.frontend, CARD, families))


def busy_metrics() -> EngineMetrics:
    metrics = EngineMetrics(prompt_tokens_total=30, cached_tokens_total=10, num_pauses=3)
    metrics.requests_total[Outcome.CANCELLED] = 2
    metrics.note_output(25, 4.5)
    metrics.histograms.note_ended(Timings(1.0, 2.0, 3.0, 6.0), Usage(40, 5), 100)
    return metrics


async def test_names_of_other_servers_are_there_by_default(rig: Rig) -> None:
    attach_figures(rig, busy_metrics())
    await rig.chat(n=2)
    found = await page(rig)
    assert {name: found[f"vllm:{name}"].type for name in VLLM} == VLLM
    assert not any(name.startswith("sglang:") for name in found)
    ends = {
        sample.labels["finished_reason"]: sample.value
        for sample in found["vllm:request_success"].samples
        if sample.name.endswith("_total")
    }
    assert ends == {"stop": 0, "length": 0, "abort": 2, "error": 0}
    (queries,) = [s for s in found["vllm:prefix_cache_queries"].samples if "total" in s.name]
    assert (queries.value, queries.labels) == (40, {"model_name": CARD.name})
    (info,) = found["vllm:cache_config_info"].samples
    assert info.labels == {"model_name": CARD.name, "block_size": "64", "num_gpu_blocks": "8"}
    assert sums_of(found["vllm:request_inference_time_seconds"]) == (1, 5.0)
    assert sums_of(found["vllm:request_params_n"]) == (1, 2.0)


def sums_of(family: Any) -> tuple[float, float]:
    by_suffix = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return by_suffix["count"], by_suffix["sum"]


@pytest.mark.parametrize(
    ("kind", "prefixes"),
    [("none", set()), ("sglang", {"sglang"}), ("all", {"sglang", "vllm"}), ("vllm", {"vllm"})],
)
async def test_a_flag_chooses_the_names(kind: str, prefixes: set[str]) -> None:
    options = ServeOptions(host=HOST, port=0, metric_aliases=kind)
    async with running_gateway(options=options) as rig:
        attach_figures(rig, busy_metrics())
        found = await page(rig)
        assert {name.partition(":")[0] for name in found if ":" in name} == prefixes
        if "sglang" in prefixes:
            assert {f"sglang:{name}" for name in SGLANG} <= set(found)
            (rate,) = found["sglang:cache_hit_rate"].samples
            assert rate.value == 0.25
            (throughput,) = found["sglang:gen_throughput"].samples
            assert throughput.value == 2.5


def test_an_alias_without_a_source_is_left_out() -> None:
    assert alias_families([], "all") == []


async def test_http_requests_are_counted_by_route_and_status(rig: Rig) -> None:
    await rig.chat()
    await rig.chat(temperature=9)
    await rig.get("/v1/models/a/b")
    await rig.get("/nothing/at/all")
    rig.engine.script = hold(asyncio.Event(), "x")
    _, writer = await rig.send_chat(stream=True)
    await until(lambda: rig.engine.num_open == 1)
    writer.close()
    await until(lambda: rig.engine.num_open == 0)
    found = await page(rig)
    counts = {
        (s.labels["handler"], s.labels["method"], s.labels["status"]): s.value
        for s in found["http_requests"].samples
        if s.name.endswith("_total")
    }
    assert counts == {
        ("/v1/chat/completions", "POST", "2xx"): 1,
        ("/v1/chat/completions", "POST", "4xx"): 1,
        ("/v1/chat/completions", "POST", "aborted"): 1,
        ("/v1/models/{path}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
    }
    timed = [s for s in found["http_request_duration_seconds"].samples if s.name.endswith("_count")]
    assert sum(sample.value for sample in timed) == 5


async def test_errors_are_counted_by_code_before_and_in_streams(rig: Rig) -> None:
    await rig.get("/nothing")
    await rig.chat(temperature=9)
    rig.engine.script = fail(NonFiniteLogits("x"), "a")
    await rig.chat(stream=True)
    rig.frontend.error = ZeroDivisionError()
    await rig.chat()
    found = await page(rig)
    errors = found["ninfer_http_errors"].samples
    counts = {s.labels["code"]: s.value for s in errors if s.name.endswith("_total")}
    assert counts == {
        "not_found": 1, "invalid_value": 1, "non_finite_logits": 1, "internal_error": 1,
    }  # fmt: skip


async def test_labels_do_not_grow_with_what_clients_send(rig: Rig) -> None:
    for number in range(5):
        await rig.get(f"/path-{number}")
        await rig.request(f"FROB{number}", "/health")
        await rig.request("LINK", "/health")
    found = await page(rig)
    assert len({(s.labels["handler"], s.labels["method"])
                for s in found["http_requests"].samples}) <= 2  # fmt: skip


@given(
    values=st.lists(st.sampled_from([0.0, 0.001, 0.0010001, 1, 5, 160, 1e9]) | st.floats(0, 500))
)
def test_buckets_hold_what_is_at_most_their_edge(values: list[float]) -> None:
    recorder = Histogram(FIRST_TOKEN_EDGES_S)
    for value in values:
        recorder.observe(value)
    text = prometheus_text([histogram("x", "X", recorder)], "m").decode()
    samples = page_of(text)["ninfer_x"].samples
    buckets = {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}
    assert list(buckets) == [*FIRST_TOKEN_EDGES_S, float("inf")]
    for edge, count in buckets.items():
        assert count == sum(value <= edge for value in values)
    count, total = sums_of(page_of(text)["ninfer_x"])
    assert count == len(values)
    assert total == pytest.approx(sum(values))


@pytest.mark.parametrize("name", [item.name for item in fields(EngineHistograms)])
def test_no_histogram_is_forgotten(name: str) -> None:
    def shown(observe: bool) -> str:
        metrics = EngineMetrics()
        if observe:
            getattr(metrics.histograms, name).observe(3.0)
        return prometheus_text(engine_families(FakeEngine().status(), metrics, 10.0), "m").decode()

    assert shown(True) != shown(False)


async def test_the_page_is_whole_while_the_model_loads() -> None:
    async with running_gateway(is_attached=False) as rig:
        found = await page(rig)
        assert "vllm:request_params_n" in found
        rig.gateway.attach(ServedModel(rig.engine, FakeFrontend(), CARD))
        assert (await rig.get("/metrics")).status == 200


async def test_drafts_are_counted_by_their_places(rig: Rig) -> None:
    metrics = EngineMetrics()
    metrics.drafts.note(DraftSource.NGRAM, 4, 2)
    metrics.drafts.note(DraftSource.MODEL, 3, 0)
    metrics.drafts.note(DraftSource.MODEL, 1, 1)
    attach_figures(rig, metrics)
    found = await page(rig)
    totals = {
        name: found[f"ninfer_{name}"].samples[0].value
        for name in ("draft_rounds", "drafted_tokens", "accepted_draft_tokens")
    }
    assert totals == {"draft_rounds": 3, "drafted_tokens": 8, "accepted_draft_tokens": 3}
    by_source = {
        (name, sample.labels["source"]): sample.value
        for name in totals
        for sample in found[f"ninfer_{name}_by_source"].samples
    }
    assert by_source == {
        ("draft_rounds", "ngram"): 1,
        ("draft_rounds", "model"): 2,
        ("drafted_tokens", "ngram"): 4,
        ("drafted_tokens", "model"): 4,
        ("accepted_draft_tokens", "ngram"): 2,
        ("accepted_draft_tokens", "model"): 1,
    }
    places = found["ninfer_accepted_drafts_at"].samples
    assert [(sample.labels["position"], sample.value) for sample in places[:3]] == [
        ("0", 2.0),
        ("1", 1.0),
        ("2", 0.0),
    ]
