"""Tool calls in chat answers, whole and streamed, with a scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from ninfer.contract.generation import Finish, FinishReason, OutputDelta
from ninfer.options import ServeOptions
from tests.helpers.answer_scripts import call, plays, text, think
from tests.helpers.fake_engine import AT_STOP_TOKEN
from tests.helpers.gateway_rig import HOST, PATIENT_LIMITS, Rig, running_gateway

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
CUT = Finish(FinishReason.OUTPUT_LIMIT)
ONLY_CALL = Finish(FinishReason.TOOL_CALL)
CASES: dict[str, tuple[list[list[OutputDelta]], Finish]] = {
    "one": ([call(0, "f", '{"a":', "1}")], AT_STOP_TOKEN),
    "many": (
        [think("hm"), text("Look", ": "), call(0, "f", "{}"), call(1, "g", '{"b":2}'), text("!")],
        AT_STOP_TOKEN,
    ),
    "only": ([text("a"), call(0, "f", "{}")], ONLY_CALL),
    "cut": ([call(0, "f", "{}"), call(1, "g", '{"b":', is_whole=False)], CUT),
    "broken": ([call(0, "f", '{"b":', is_whole=False), text("<tool_call>")], AT_STOP_TOKEN),
}


async def whole(rig: Rig, groups: Sequence[Sequence[OutputDelta]], finish: Finish, **f: Any) -> Any:
    rig.engine.script = plays(*groups, finish=finish)
    return (await rig.chat(tools=[TOOL], **f)).json()["choices"][0]


async def streamed(
    rig: Rig, groups: Sequence[Sequence[OutputDelta]], finish: Finish, **fields: Any
) -> list[Any]:
    """All choices of all chunks but the usage chunk's."""
    rig.engine.script = plays(*groups, finish=finish)
    events = (await rig.chat(tools=[TOOL], stream=True, **fields)).events
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("name", CASES)
async def test_whole_answers(rig: Rig, name: str) -> None:
    choice = await whole(rig, *CASES[name])
    message = choice["message"]
    calls = [item["function"] for item in message.get("tool_calls", [])]
    f = {"name": "f", "arguments": "{}"}
    assert (message["content"], calls, choice["finish_reason"]) == {
        "one": (None, [{"name": "f", "arguments": '{"a":1}'}], "tool_calls"),
        "many": ("Look: !", [f, {"name": "g", "arguments": '{"b":2}'}], "tool_calls"),
        "only": ("a", [f], "tool_calls"),
        "cut": (None, [f], "length"),
        "broken": ("<tool_call>", [], "stop"),
    }[name]
    for item in message.get("tool_calls", []):
        assert item["type"] == "function"
        assert re.fullmatch(r"call_[A-Za-z0-9]{24}", item["id"])


@pytest.mark.parametrize("name", CASES)
async def test_streams_add_up_to_whole_answers(rig: Rig, name: str) -> None:
    choices = await streamed(rig, *CASES[name])
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    calls: list[dict[str, Any]] = []
    for delta in deltas[1:-1]:
        assert len(delta) == 1
        assert all(delta.values())
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert set(piece) == {"index", "id", "type", "function"}
                assert set(piece["function"]) == {"name", "arguments"}
                assert piece["function"]["arguments"] == ""
                assert piece["index"] == len(calls)
                calls.append({**piece["function"], "id": piece["id"]})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                assert piece["index"] == len(calls) - 1
                calls[-1]["arguments"] += piece["function"]["arguments"]
    choice = await whole(rig, *CASES[name])
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == (choice["message"]["content"] or "")
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    assert len({item["id"] for item in calls}) == len(calls)
    complete = [item["function"] for item in choice["message"].get("tool_calls", [])]
    given = [{"name": item["name"], "arguments": item["arguments"]} for item in calls]
    assert complete == [item for item in given if _is_json(item["arguments"])]


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


async def test_logprobs_leave_calls_out(rig: Rig) -> None:
    choice = await whole(rig, *CASES["one"], logprobs=True)
    assert choice["logprobs"] == {"content": [], "refusal": None}


async def test_rules_reach_the_frontend(rig: Rig) -> None:
    await rig.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (params,) = rig.frontend.params
    assert params.tools is not None
    assert (params.tools.choice, params.tools.parallel) == ("required", False)
    (chat,) = rig.frontend.chats
    assert [tool["function"]["name"] for tool in chat.tools] == ["f"]


@pytest.mark.parametrize("count", [21, 128, 512])
async def test_o09_many_tools_are_taken(rig: Rig, count: int) -> None:
    names = [f"{index:03d}{'n' * 37}" for index in range(count)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    answer = await rig.chat(tools=tools)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"


async def test_demanded_call_and_a_format_exclude_each_other(rig: Rig) -> None:
    answer = await rig.chat(
        tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}
    )
    assert (answer.status, answer.error["param"]) == (400, "response_format.type")


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning_content", ["reasoning_content"]),
        ("reasoning", ["reasoning"]),
        ("both", ["reasoning_content", "reasoning"]),
    ],
)
async def test_thoughts_go_to_the_fields_of_the_option(field: str, names: list[str]) -> None:
    options = ServeOptions(host=HOST, port=0, reasoning_field=field)
    groups = [think("hm"), text("Yes.")]
    async with running_gateway(limits=PATIENT_LIMITS, options=options) as rig:
        message = (await whole(rig, groups, AT_STOP_TOKEN))["message"]
        assert {name: message[name] for name in names} == dict.fromkeys(names, "hm")
        assert set(message) == {"role", "content", "refusal", *names}
        chunks = [choice["delta"] for choice in await streamed(rig, groups, AT_STOP_TOKEN)]
        assert chunks[1:3] == [dict.fromkeys(names, "hm"), {"content": "Yes."}]
        hidden = await streamed(rig, groups, AT_STOP_TOKEN, include_reasoning=False)
        assert [choice["delta"] for choice in hidden[1:-1]] == [{"content": "Yes."}]


class TestOfficialClient:
    """What client programs see: the library adds the pieces up by itself."""

    @pytest.mark.parametrize("num_choices", [1, 2])
    async def test_stream_helper(self, rig: Rig, num_choices: int) -> None:
        rig.engine.script = plays(*CASES["many"][0])
        async with (
            openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="none", max_retries=0) as client,
            client.chat.completions.stream(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
                n=num_choices,
                stream_options={"include_usage": True},
            ) as stream,
        ):
            kinds = [event.type async for event in stream]
            completion = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.done") == 2 * num_choices
        assert completion.usage is not None
        for choice in completion.choices:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Look: !"
            calls = choice.message.tool_calls or []
            assert [(item.function.name, item.function.arguments) for item in calls] == [
                ("f", "{}"),
                ("g", '{"b":2}'),
            ]
            assert len({item.id for item in calls}) == 2

    async def test_parse_helper(self, rig: Rig) -> None:
        rig.engine.script = plays(call(0, "f", '{"a":', "1}"))
        schema = {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
        async with openai.AsyncOpenAI(
            base_url=rig.url + "/v1", api_key="none", max_retries=0
        ) as client:
            completion = await client.chat.completions.parse(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                tools=[
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": schema, "strict": True},
                    }
                ],
            )
        (item,) = completion.choices[0].message.tool_calls or []
        assert item.function.parsed_arguments == {"a": 1}


async def test_o07_streamed_calls_have_an_id(rig: Rig) -> None:
    choices = await streamed(rig, *CASES["one"])
    first, *later = [piece for c in choices for piece in c["delta"].get("tool_calls", [])]
    call_id = first.pop("id")
    assert first == {"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}
    assert [set(piece) for piece in later] == [{"index", "function"}] * len(later)
    message = (await whole(rig, *CASES["one"]))["message"]
    for item in (call_id, message["tool_calls"][0]["id"]):
        assert re.fullmatch(r"call_[A-Za-z0-9]{24}", item)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_o08_finish_reason_is_the_same_in_both_modes(rig: Rig, is_streamed: bool) -> None:
    half = [call(0, "f", '{"a":', is_whole=False)]
    for groups, finish, reason in (
        (CASES["one"][0], AT_STOP_TOKEN, "tool_calls"),
        (half, CUT, "length"),
    ):
        if is_streamed:
            choice = (await streamed(rig, groups, finish, tool_choice="required"))[-1]
        else:
            choice = await whole(rig, groups, finish, tool_choice="required")
            assert (reason == "length") == ("tool_calls" not in choice["message"])
        assert choice["finish_reason"] == reason
