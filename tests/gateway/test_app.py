"""Routes, headers and states of the whole HTTP surface."""

from __future__ import annotations

import pytest

import ninfer
from ninfer.contract.errors import Unavailable
from ninfer.contract.generation import EngineHealth
from ninfer.gateway.lifecycle import ServedModel
from ninfer.options import ServeOptions
from tests.helpers.fake_engine import CARD, FakeEngine, FakeFrontend
from tests.helpers.gateway_rig import HOST, MESSAGES, Rig, running_gateway


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("HEAD", "/", 200),
        ("GET", "/health", 200),
        ("GET", "/ready", 200),
        ("GET", "/live", 200),
        ("GET", "/version", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/models", 200),
        ("GET", "/v1/models/", 200),
        ("GET", "/v1/health", 200),
        ("POST", "/v1/chat/completions?beta=true", 200),
        ("POST", "/chat/completions", 200),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("GET", "/v1chat", 404),
        ("GET", "/models//", 200),
        ("PATCH", "/generate", 405),
    ],
)
async def test_routes(rig: Rig, method: str, path: str, status: int) -> None:
    body = {"messages": MESSAGES} if method == "POST" else None
    answer = await rig.request(method, path, json=body)
    assert answer.status == status
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    if status >= 400:
        assert answer.error["type"] == "invalid_request_error"


async def test_wrong_method_names_the_right_ones(rig: Rig) -> None:
    assert (await rig.get("/generate")).headers["allow"] == "POST"
    answer = await rig.request("POST", "/health")
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.error["code"] == "method_not_allowed"


async def test_doubled_prefix_is_explained(rig: Rig) -> None:
    answer = await rig.post("/v1/v1/chat/completions", {})
    assert "one /v1 too many" in answer.error["message"]
    assert "too many" not in (await rig.get("/nothing")).error["message"]


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions", "//models"])
async def test_doubled_slashes_are_explained(rig: Rig, path: str) -> None:
    reader, writer = await rig.open_socket()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"two slashes in a row" in answer


async def test_request_ids_are_echoed_when_well_formed(rig: Rig) -> None:
    for offered, is_echoed in (("a.B-c_1", True), ("x" * 129, False), ("with space", False)):
        answer = await rig.get("/health", headers={"X-Request-Id": offered})
        assert (answer.headers["x-request-id"] == offered) is is_echoed
        assert answer.headers["x-request-id"]
    for _ in range(2):
        await rig.request(
            "POST",
            "/v1/chat/completions",
            json={"messages": MESSAGES},
            headers={"X-Request-Id": "same"},
        )
    first, second = rig.engine.handles
    assert first.request_id != second.request_id


async def test_request_id_is_on_streams_and_errors(rig: Rig) -> None:
    headers = {"X-Request-Id": "mine"}
    for body in ({"messages": MESSAGES, "stream": True}, {"messages": 5}):
        answer = await rig.request("POST", "/v1/chat/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["request-id"] == "mine"


async def test_version(rig: Rig) -> None:
    assert (await rig.get("/version")).json() == {"version": ninfer.__version__}


async def test_models_serve_both_client_families(rig: Rig) -> None:
    body = (await rig.get("/v1/models")).json()
    assert body["object"] == "list"
    assert body["has_more"] is False
    assert body["first_id"] == body["last_id"] == CARD.name
    (entry,) = body["data"]
    assert entry == {
        "id": CARD.name,
        "object": "model",
        "created": CARD.created_s,
        "owned_by": "ninfer",
        "root": CARD.name,
        "max_model_len": 64,
        "type": "model",
        "display_name": CARD.name,
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 63,
        "max_tokens": 63,
    }


@pytest.mark.parametrize("path", ["/v1/models/org/fake-model", "/models/org/fake-model"])
async def test_model_ids_with_slashes(rig: Rig, path: str) -> None:
    assert (await rig.get(path)).json()["id"] == CARD.name


async def test_encoded_slash_and_unknown_model(rig: Rig) -> None:
    reader, writer = await rig.open_socket()
    writer.write(
        b"GET /v1/models/org%2Ffake-model HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    assert b'"id":"org/fake-model"' in await reader.read()
    writer.close()
    answer = await rig.get("/v1/models/gpt-5")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_strict_and_renamed_models() -> None:
    options = ServeOptions(host=HOST, port=0, model_name="mine", strict_model=True)
    async with running_gateway(options=options) as rig:
        assert (await rig.get("/v1/models")).json()["data"][0]["id"] == "mine"
        assert (await rig.chat(model="mine")).json()["model"] == "mine"
        for name in ("gpt-5", CARD.name):
            answer = await rig.chat(model=name)
            assert answer.status == 404
            assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")


async def test_loading_server_answers_all_but_generation() -> None:
    async with running_gateway(is_attached=False) as rig:
        for path in ("/health", "/ready"):
            answer = await rig.get(path)
            assert (answer.status, answer.json()) == (503, {"status": "loading"})
            assert answer.headers["retry-after"] == "5"
        assert (await rig.get("/live")).status == 200
        assert (await rig.get("/v1/models")).json()["data"][0]["id"] == CARD.name
        for answer in (await rig.chat(), await rig.generate(text="a")):
            assert (answer.status, answer.error["code"]) == (503, "model_loading")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-should-retry"] == "true"
        rig.gateway.attach(ServedModel(FakeEngine(), FakeFrontend(), CARD))
        assert (await rig.get("/health")).json() == {"status": "ok"}
        assert (await rig.chat()).status == 200


async def test_draining_first_tells_and_then_refuses(rig: Rig) -> None:
    rig.gateway.lifecycle.begin_drain()
    health = await rig.get("/health")
    assert (health.json(), health.headers["retry-after"]) == ({"status": "draining"}, "5")
    assert (await rig.get("/live")).status == 200
    assert (await rig.chat()).status == 200
    rig.gateway.lifecycle.close_admission()
    answer = await rig.chat()
    assert (answer.status, answer.error["code"]) == (503, "server_draining")
    assert answer.headers["connection"] == "close"


async def test_dead_engine_is_reported(rig: Rig) -> None:
    rig.engine.health = EngineHealth.UNAVAILABLE
    answer = await rig.get("/health")
    assert (answer.status, answer.json()) == (503, {"status": "unavailable"})
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("10", "true")
    answer = await rig.chat()
    assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")


async def test_full_queue_is_429_and_still_healthy(rig: Rig) -> None:
    rig.engine.refusal = Unavailable("server_overloaded", "The queue is full.", 7.2)
    answer = await rig.chat(stream=True)
    assert answer.status == 429
    assert answer.error["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "8"
    assert (await rig.get("/health")).status == 200


async def test_a_bug_in_a_handler_is_a_json_500(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.frontend.error = ZeroDivisionError("details")
    answer = await rig.chat()
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert "details" not in answer.error["message"]
    assert answer.headers["x-request-id"] in caplog.text
