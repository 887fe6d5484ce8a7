"""Load, server information, aborts, aliases, traces and the log of bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

import ninfer
from ninfer.contract.errors import NonFiniteLogits, Unavailable
from ninfer.contract.generation import EngineHealth
from ninfer.gateway.lifecycle import ServedModel
from ninfer.gateway.request_log import RequestLog
from ninfer.options import ServeOptions
from tests.helpers.fake_engine import CARD, FakeEngine, FakeFrontend, FakeHandle, fail, hold
from tests.helpers.gateway_rig import (
    HOST,
    MESSAGES,
    PATIENCE_S,
    Answer,
    Rig,
    running_gateway,
    until,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


async def test_load_says_how_busy_the_server_is(rig: Rig) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    _, writer = await rig.send_chat(stream=True)
    await until(lambda: rig.engine.num_open == 1)
    load = (await rig.get("/v1/load")).json()
    assert load["status"] == "ok"
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_reqs"]) == (1, 0, 1)
    assert (load["max_running_reqs"], load["max_waiting_reqs"]) == (8, 32)
    assert load["http_requests"] == 2
    rig.engine.health = EngineHealth.UNAVAILABLE
    assert (await rig.get("/load")).json()["status"] == "unavailable"
    writer.close()


async def test_load_and_information_also_while_loading() -> None:
    async with running_gateway(is_attached=False) as rig:
        assert (await rig.get("/v1/load")).json() == {
            "status": "loading", "server_load": 0, "num_reqs": 0,
        }  # fmt: skip
        info = (await rig.get("/server_info")).json()
        assert info["status"] == "loading"
        assert info["version"] == ninfer.__version__
        assert info["model"]["name"] == CARD.name


async def test_server_information_has_what_the_model_brings() -> None:
    options = ServeOptions(host=HOST, port=0, api_key=("secret",), api_key_file=None)
    async with running_gateway(options=options, is_attached=False) as rig:
        more = {"device": "gpu", "options": {"max_concurrency": 3}}
        rig.gateway.attach(ServedModel(FakeEngine(), FakeFrontend(), CARD, info=more))
        answer = await rig.get("/server_info", headers={"x-api-key": "secret"})
        info = answer.json()
        assert info["device"] == "gpu"
        assert info["options"]["max_concurrency"] == 3
        assert info["options"]["drain_timeout"] == options.drain_timeout
        assert "api_key" not in info["options"]
        assert b"secret" not in answer.body


async def held(rig: Rig, send: Callable[[], Any]) -> asyncio.Task[Answer]:
    rig.engine.script = hold(asyncio.Event(), "a")
    task = asyncio.create_task(send())
    await until(lambda: rig.engine.num_open == 1)
    return task


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["x-request-id", "rid", "answer"])
async def test_a_request_is_ended_by_any_of_its_names(rig: Rig, stream: bool, name: str) -> None:
    task = await held(
        rig,
        lambda: rig.post(
            "/generate",
            {"text": "a", "stream": stream, "rid": "mine"},
            headers={"X-Request-Id": "theirs"},
        ),
    )
    own = rig.engine.handles[0].request_id
    asked = {"rid": {"x-request-id": "theirs", "rid": "mine", "answer": own}[name]}
    assert (await rig.post("/abort_request", asked)).json() == {"status": "ok", "aborted": 1}
    answer = await task
    if stream:
        assert answer.events[-1]["error"]["code"] == "request_aborted"
    else:
        assert (answer.status, answer.error["code"]) == (499, "request_aborted")
        assert answer.headers["x-should-retry"] == "false"
    assert rig.engine.num_open == 0
    assert (await rig.post("/abort_request", asked)).json()["aborted"] == 0
    rig.engine.script = FakeEngine().script
    assert (await rig.chat()).status == 200


async def test_who_reads_an_error_to_its_end_has_not_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client closes its connection while the engine still lets go of the request."""
    may_release = asyncio.Event()

    async def slow_exit(handle: FakeHandle, *_: object) -> None:
        await may_release.wait()

    monkeypatch.setattr(FakeHandle, "__aexit__", slow_exit)
    rig.engine.script = fail(NonFiniteLogits("x"), "a")
    reader, writer = await rig.send_chat(stream=True)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.readuntil(b"0\r\n\r\n")
    assert b'"error"' in answer
    writer.close()
    await writer.wait_closed()
    await until(lambda: rig.gateway.counters.exchanges_active == 0)
    assert rig.gateway.counters.aborts == 0
    metrics = (await rig.get("/metrics")).body.decode()
    assert 'status="2xx"' in metrics
    assert 'status="aborted"' not in metrics


async def test_all_are_ended_but_not_who_asks(rig: Rig) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    tasks = [asyncio.create_task(rig.chat(stream=number % 2 == 0)) for number in range(4)]
    await until(lambda: rig.engine.num_open == 4)
    answer = await rig.post("/abort_request", {"abort_all": True})
    assert (answer.status, answer.json()["aborted"]) == (200, 4)
    await asyncio.gather(*tasks)
    assert rig.engine.num_open == 0
    assert rig.gateway.counters.aborts == 0


async def test_several_choices_are_ended_by_the_answers_name(rig: Rig) -> None:
    rig.engine.script = hold(asyncio.Event(), "a")
    task = asyncio.create_task(rig.chat(n=3, stream=True))
    await until(lambda: rig.engine.num_open == 3)
    name = rig.engine.handles[0].request_id.rpartition("-")[0]
    assert (await rig.post("/abort_request", {"request_id": name})).json()["aborted"] == 1
    events = (await task).events
    assert events[0]["id"] == name
    assert rig.engine.num_open == 0


async def test_a_request_is_ended_while_its_prompt_is_prepared(rig: Rig) -> None:
    rig.frontend.gate = asyncio.Event()
    task = asyncio.create_task(
        rig.post("/generate", {"text": "a"}, headers={"X-Request-Id": "early"})
    )
    await until(lambda: rig.gateway.running.abort("early") == 1)
    assert (await task).status == 499
    assert rig.engine.handles == []


@pytest.mark.parametrize(
    ("body", "param"), [({}, "rid"), ({"rid": ""}, "rid"), ({"rid": 5}, "rid")]
)
async def test_an_abort_needs_a_name(rig: Rig, body: dict[str, Any], param: str) -> None:
    answer = await rig.post("/abort_request", body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_nothing_is_kept_of_requests_that_ended(rig: Rig) -> None:
    for _ in range(3):
        await rig.post("/generate", {"text": "a", "rid": ["x"] * 1})
        await rig.chat(stream=True)
        await rig.chat(temperature="bad")
    assert rig.gateway.running.abort_all() == 0


async def test_aliases_are_listed_served_and_echoed() -> None:
    options = ServeOptions(
        host=HOST, port=0, model_name="mine", model_alias=("org/big", "mine"), strict_model=True
    )
    async with running_gateway(options=options) as rig:
        listing = (await rig.get("/v1/models")).json()
        assert [entry["id"] for entry in listing["data"]] == ["mine", "org/big"]
        assert (listing["first_id"], listing["last_id"]) == ("mine", "org/big")
        for path in ("/v1/models/org/big", "/v1/models/org%2Fbig"):
            entry = (await rig.get(path)).json()
            assert (entry["id"], entry["root"]) == ("org/big", CARD.name)
        assert (await rig.chat(model="org/big")).json()["model"] == "org/big"
        assert (await rig.chat(model="other")).status == 404


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


async def logged(path: Path, headers: dict[str, str], **options: Any) -> list[dict[str, Any]]:
    log = await asyncio.to_thread(lambda: RequestLog(str(path)).__enter__())
    serve = ServeOptions(host=HOST, port=0, **options)
    async with running_gateway(log=log, options=serve) as rig:
        body = {"messages": MESSAGES, "odd": 2**70, "cut": "\ud83d"}
        data = orjson.dumps(MESSAGES)
        text = b'{"messages":' + data + b',"odd":1180591620717411303424,"cut":"\\ud83d"}'
        assert len(body) == 3
        assert (await rig.post_bytes("/v1/chat/completions", text, **headers)).status == 200
    await asyncio.to_thread(log.__exit__)
    return await asyncio.to_thread(lines_of, path)


async def test_bodies_are_logged_on_demand_only(tmp_path: Path) -> None:
    (end,) = await logged(tmp_path / "a", {})
    assert "body" not in end
    body, end = await logged(tmp_path / "b", {"X_Request_Id": "mine"}, log_prompts=True)
    assert body["body"]["messages"] == MESSAGES
    assert body["body"]["cut"] == "\ufffd"
    assert body["exchange_id"] == end["exchange_id"] == "mine"
    assert body["trace_id"] == end["trace_id"]


async def test_what_was_refused_is_logged_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = await asyncio.to_thread(lambda: RequestLog(str(path)).__enter__())
    async with running_gateway(log=log) as rig:
        await rig.get("/v1/models")
        await rig.get("/nothing")
        await rig.post_bytes("/generate", b"{")
        await rig.chat(temperature=9)
        rig.engine.refusal = Unavailable("server_overloaded", "The queue is full.", 2)
        await rig.chat(stream=True)
    await asyncio.to_thread(log.__exit__)
    lines = await asyncio.to_thread(lines_of, path)
    assert [(line["finish"], line["error"], line["param"]) for line in lines] == [
        ("refused", "invalid_json", None),
        ("refused", "invalid_value", "temperature"),
        ("refused", "server_overloaded", None),
    ]
    assert all(len(line["trace_id"]) == 32 for line in lines)


@pytest.mark.parametrize(
    ("header", "is_taken"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"cc-{TRACE}-{PARENT}-01-later", True),
        (f"00-{TRACE}-{PARENT}-01-extra", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        ("nonsense", False),
    ],
)
async def test_traces_of_callers_are_kept(tmp_path: Path, header: str, is_taken: bool) -> None:
    (line,) = await logged(tmp_path / "log", {"traceparent": header})
    assert (line["trace_id"] == TRACE) is is_taken
    assert len(line["trace_id"]) == 32
    assert line["parent_span_id"] == (PARENT if is_taken else None)
