"""Responses that are kept: read, deleted, gone on from, referred to."""

from __future__ import annotations

from typing import Any

from ninfer.contract.chat import ChatMessage, TextPart, ToolCall
from ninfer.contract.generation import Finish, FinishReason
from ninfer.gateway.limits import GatewayLimits
from tests.helpers.answer_scripts import call, plays, text, think
from tests.helpers.fake_engine import say
from tests.helpers.gateway_rig import Rig, running_gateway
from tests.helpers.responses_rig import (
    accumulate,
    create,
    created,
    said_to,
    streamed_events,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def test_a_chain_of_responses(rig: Rig) -> None:
    rig.engine.script = plays(think("hm"), text("well"), call(0, "f", '{"a":1}'))
    first = await created(rig, input="q", instructions="only once", tools=[TOOL])
    call_id = first["output"][2]["call_id"]
    rig.engine.script = say("end")
    output = {"type": "function_call_output", "call_id": call_id, "output": "r"}
    second = await created(rig, input=[output], previous_response_id=first["id"])
    assert rig.frontend.chats[-1].messages == (
        ChatMessage("user", (TextPart("q"),)),
        ChatMessage(
            "assistant",
            (TextPart("well"),),
            reasoning_content="hm",
            tool_calls=(ToolCall("f", {"a": 1}, call_id),),
        ),
        ChatMessage("tool", (TextPart("r"),), tool_call_id=call_id),
    )
    await streamed_events(rig, input=None, previous_response_id=second["id"], instructions="new")
    assert said_to(rig) == [
        ("system", "new"),
        ("user", "q"),
        ("assistant", "well"),
        ("tool", "r"),
        ("assistant", "end"),
    ]


async def test_a_chain_branches(rig: Rig) -> None:
    root = await created(rig, input="a")
    for branch in ("b", "c"):
        await created(rig, input=branch, previous_response_id=root["id"])
        assert said_to(rig) == [("user", "a"), ("assistant", "Hello"), ("user", branch)]


async def test_an_incomplete_response_can_be_continued_without_its_cut_call(rig: Rig) -> None:
    limit = Finish(FinishReason.OUTPUT_LIMIT)
    rig.engine.script = plays(text("well"), call(0, "f", "{", is_whole=False), finish=limit)
    first = await created(rig, tools=[TOOL])
    assert first["status"] == "incomplete"
    await created(rig, input="go on", previous_response_id=first["id"])
    assert said_to(rig) == [("user", "hi"), ("assistant", "well"), ("user", "go on")]
    assert rig.frontend.chats[-1].messages[1].tool_calls == ()


async def test_items_are_found_by_reference(rig: Rig) -> None:
    rig.engine.script = plays(think("hm"), text("well"))
    first = await created(rig, input="q")
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    second = await created(rig, input=[*references, {"role": "user", "content": "and?"}])
    assert said_to(rig) == [("assistant", "well"), ("user", "and?")]
    assert rig.frontend.chats[-1].messages[0].reasoning_content == "hm"
    page = (await rig.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()
    assert page["data"][:2] == first["output"]
    missing = await create(rig, input=[references[0], {"type": "item_reference", "id": "rs_x"}])
    assert (missing.status, missing.error["code"]) == (404, "item_not_found")
    assert missing.error["param"] == "input[1].id"


async def test_items_with_an_id_of_their_own_are_not_looked_up(rig: Rig) -> None:
    item = {"type": "message", "id": "msg_unknown", "role": "user", "content": "own"}
    await created(rig, input=[item], store=False)
    assert said_to(rig) == [("user", "own")]


async def test_sealed_thoughts_come_back_from_a_client(rig: Rig) -> None:
    rig.engine.script = plays(think("secret"), text("well"))
    first = await created(rig, store=False, include=["reasoning.encrypted_content"])
    reasoning, message = first["output"]
    sealed = {**reasoning, "content": None}
    await created(rig, input=[sealed, message, {"role": "user", "content": "b"}], store=False)
    assert rig.frontend.chats[-1].messages[0].reasoning_content == "secret"


async def test_stored_responses_are_read_and_deleted(rig: Rig) -> None:
    response = await created(rig)
    path = f"/v1/responses/{response['id']}"
    stored = await rig.get(path)
    assert stored.headers["content-type"] == "application/json"
    assert stored.json() == response
    assert (await rig.get(path.removeprefix("/v1"))).json() == response
    page = (await rig.get(path + "/input_items")).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["hi"]
    bad = await rig.get(path + "/input_items?limit=0")
    assert (bad.status, bad.error["param"]) == (400, "limit")
    replay = await rig.get(path + "?stream=true")
    assert (replay.status, replay.error["code"]) == (400, "unsupported_parameter")
    gone = await rig.request("DELETE", path)
    assert gone.json() == {"id": response["id"], "object": "response.deleted", "deleted": True}
    for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = await rig.request(method, path + tail)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")


async def test_a_streamed_response_is_stored_before_its_end_is_sent(rig: Rig) -> None:
    final = accumulate(await streamed_events(rig))
    assert (await rig.get(f"/v1/responses/{final['id']}")).json() == final


async def test_what_is_not_to_be_stored_is_not(rig: Rig) -> None:
    response = await created(rig, store=False)
    assert response["store"] is False
    assert (await rig.get(f"/v1/responses/{response['id']}")).status == 404
    answer = await create(rig, previous_response_id=response["id"])
    assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    assert answer.error["param"] == "previous_response_id"


async def test_nothing_runs_in_the_background(rig: Rig) -> None:
    response = await created(rig)
    answer = await rig.request("POST", f"/v1/responses/{response['id']}/cancel")
    assert answer.status == 400
    assert "background" in answer.error["message"]


async def test_stored_responses_are_read_while_the_model_loads() -> None:
    async with running_gateway(is_attached=False) as rig:
        assert (await rig.get("/v1/responses/resp_1")).status == 404
        assert (await create(rig)).status == 503


async def test_conversations_keep_their_name_for_the_cache(rig: Rig) -> None:
    async def key_of(**fields: Any) -> tuple[str, str | None]:
        response = await created(rig, **fields)
        return response["id"], rig.engine.handles[-1].request.cache.session_key

    first, key = await key_of()
    assert key is None
    second, key = await key_of(previous_response_id=first)
    assert key == first
    _, key = await key_of(previous_response_id=second)
    assert key == first
    named, key = await key_of(previous_response_id=second, prompt_cache_key="mine")
    assert key == "mine"
    _, key = await key_of(previous_response_id=named)
    assert key == "mine"
    await rig.post("/v1/responses", {"input": "a"}, headers={"X-Session-Id": "head"})
    assert rig.engine.handles[-1].request.cache.session_key == "head"


async def test_a_long_history_does_not_hold_the_loop() -> None:
    """The rig of all gateway tests fails on what blocks; here the thread is taken."""
    async with running_gateway(limits=GatewayLimits(thread_above_bytes=100)) as rig:
        first = await created(rig, input="a")
        second = await created(rig, input="b", previous_response_id=first["id"])
        await created(rig, input="c", previous_response_id=second["id"])
        assert said_to(rig) == [
            ("user", "a"),
            ("assistant", "Hello"),
            ("user", "b"),
            ("assistant", "Hello"),
            ("user", "c"),
        ]
