"""/v1/status and the errors that are remembered for it."""

from __future__ import annotations

from ninfer.contract.errors import InvariantError, RequestError, Unavailable
from ninfer.contract.metrics import MetricFamily, MetricSample
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.recent_errors import MAX_KEPT, RecentErrors
from tests.helpers.fake_engine import CARD, fail
from tests.helpers.gateway_rig import Rig, running_gateway


def _by_tier(name: str, *values: int) -> MetricFamily:
    tiers = ("device", "host", "disk")
    samples = (
        MetricSample(value, (("tier", tier),)) for tier, value in zip(tiers, values, strict=True)
    )
    return MetricFamily(name, "gauge", "", tuple(samples))


CACHE = (
    MetricFamily(
        "cache_hits",
        "counter",
        "",
        (
            MetricSample(2, (("kind", "turn_closure"), ("tier", "device"))),
            MetricSample(3, (("kind", "stable_prefix"), ("tier", "device"))),
            MetricSample(1, (("kind", "stable_prefix"), ("tier", "disk"))),
        ),
    ),
    MetricFamily(
        "cache_hit_tokens",
        "counter",
        "",
        (
            MetricSample(200, (("kind", "turn_closure"), ("tier", "device"))),
            MetricSample(50, (("kind", "stable_prefix"), ("tier", "disk"))),
        ),
    ),
    _by_tier("cache_tier_checkpoints", 4, 2, 1),
    _by_tier("cache_tier_tokens", 400, 200, 100),
    _by_tier("cache_tier_bytes", 4096, 2048, 1024),
    MetricFamily("cache_misses", "counter", "", (MetricSample(7, (("reason", "no_entry"),)),)),
)


async def test_status_says_how_things_stand(rig: Rig) -> None:
    before = (await rig.get("/v1/status")).json()
    assert before["status"] == "ok"
    assert before["model"] == {"id": CARD.name, "max_context": CARD.max_context}
    assert before["engine"] == {
        "running": 0,
        "max_concurrency": 8,
        "waiting": 0,
        "max_pending": 32,
        "pages_used": 0,
        "pages_total": 8,
        "prompt_tokens_total": 0,
        "completion_tokens_total": 0,
        "error": None,
    }
    assert before["cache"] is None
    assert before["errors"] == {"total": 0, "last": []}
    after = (await rig.get("/status")).json()
    assert after["clock_s"] > before["clock_s"]
    assert after["http"]["total"] == before["http"]["total"] + 1


async def test_status_of_the_cache_adds_up_kinds(rig: Rig) -> None:
    rig.gateway.attach(ServedModel(rig.engine, rig.frontend, CARD, lambda: CACHE))
    cache = (await rig.get("/v1/status")).json()["cache"]
    assert cache["cached_tokens_total"] == 250
    assert cache["misses"] == {"no_entry": 7}
    assert cache["tiers"]["device"] == {
        "hits": 5, "hit_tokens": 200, "checkpoints": 4, "tokens": 400, "bytes": 4096,
    }  # fmt: skip
    assert cache["tiers"]["host"]["hits"] == 0
    assert cache["tiers"]["disk"]["hit_tokens"] == 50


async def test_status_while_loading() -> None:
    async with running_gateway(is_attached=False) as rig:
        answer = await rig.get("/v1/status")
        assert answer.status == 200
        body = answer.json()
        assert (body["status"], body["engine"], body["cache"]) == ("loading", None, None)


async def test_errors_of_answers_and_of_streams_are_remembered(rig: Rig) -> None:
    await rig.chat(temperature=5)
    rig.engine.script = fail(Unavailable("engine_unavailable", "gone"), "a")
    answer = await rig.chat(stream=True)
    await rig.get("/nothing")
    errors = (await rig.get("/v1/status")).json()["errors"]
    assert errors["total"] == 2
    stream, field = errors["last"]
    assert (stream["code"], stream["param"]) == ("engine_unavailable", None)
    assert stream["request_id"] == answer.headers["x-request-id"]
    assert (field["code"], field["param"]) == ("invalid_value", "temperature")
    assert field["path"] == "/chat/completions"


def test_the_newest_errors_are_kept_without_their_texts() -> None:
    errors = RecentErrors()
    for index in range(MAX_KEPT + 5):
        errors.note(
            RequestError("invalid_value", "a secret", "p" * 1000), "/" + "x" * 1000, f"{index}"
        )
    kept = errors.as_json()
    assert errors.total == MAX_KEPT + 5
    assert [entry["request_id"] for entry in kept] == [str(i) for i in range(MAX_KEPT + 4, 4, -1)]
    assert "secret" not in str(kept)
    assert all(len(str(value)) <= 80 for entry in kept for value in entry.values())


def test_bugs_have_a_code_and_stray_requests_are_no_errors() -> None:
    errors = RecentErrors()
    errors.note(ZeroDivisionError("a secret"), "/a", "1")
    errors.note(InvariantError("a secret"), "/b", "2")
    for code in ("not_found", "method_not_allowed", "invalid_api_key"):
        errors.note(RequestError(code, "x"), "/c", "3")
    assert [entry["code"] for entry in errors.as_json()] == ["internal_error"] * 2
    assert errors.total == 2
