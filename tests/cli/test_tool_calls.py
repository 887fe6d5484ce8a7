"""Calls on the command line: shown a line each, answered by the next lines of a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from ninfer.cli.answer_printer import AnswerPrinter
from ninfer.cli.conversation import Conversation
from ninfer.cli.message_json import read_tools
from ninfer.contract.errors import RequestError
from ninfer.contract.generation import FinishReason
from tests.cli.test_repl import Session, in_pipe, on_terminal
from tests.helpers.command import ninfer
from tests.helpers.scripted_chat import Script
from tests.helpers.weather_tool import WEATHER_QUESTION, WEATHER_TOOL

CALLS: Final = (("get_weather", '{"city":"Oslo"}'), ("now", "{}"))


def with_tools(session: Session) -> Session:
    session.conversation = Conversation(tools=read_tools([WEATHER_TOOL]))
    return session


async def test_calls_are_lines_and_the_next_lines_are_their_results() -> None:
    session = with_tools(
        in_pipe(Script((("content", "Let me see."),), calls=CALLS), Script((("content", "Cold."),)))
    )
    await session.play("How warm?", "12", "noon")
    assert session.out == 'Let me see.\nget_weather({"city":"Oslo"})\nnow({})\nCold.\n'
    first, second = session.frontend.chats[:2]
    assert [tool["function"]["name"] for tool in first.tools] == ["get_weather"]
    assert [(message.role, message.text) for message in second.messages] == [
        ("user", "How warm?"),
        ("assistant", "Let me see."),
        ("tool", "12"),
        ("tool", "noon"),
    ]
    calls = second.messages[1].tool_calls
    assert [(call.name, call.arguments) for call in calls] == list(CALLS)


async def test_a_terminal_says_what_the_next_line_is() -> None:
    session = with_tools(on_terminal(Script(calls=CALLS)))
    await session.play("How warm?", "12")
    assert 'get_weather({"city":"Oslo"})\nnow({})\n' in session.out
    assert "the next line is the result of get_weather" in session.out
    assert "the next line is the result of now" in session.out


async def test_reset_forgets_calls_and_keeps_tools() -> None:
    session = with_tools(in_pipe(Script(calls=CALLS), Script((("content", "Hi."),))))
    await session.play("How warm?", "/reset", "Hello")
    chat = session.frontend.chats[1]
    assert [(message.role, message.text) for message in chat.messages] == [("user", "Hello")]
    assert chat.tools


async def test_call_that_is_cut_off_ends_its_line_and_waits_for_no_result() -> None:
    session = with_tools(in_pipe())
    printer = AnswerPrinter(session.console)
    printer.write("content", "Look:")
    printer.write("call", 'f({"a":')
    printer.finish()
    assert session.out == 'Look:\nf({"a":\n'
    cut = Script((("content", "a"),), finish=FinishReason.OUTPUT_LIMIT)
    session = with_tools(in_pipe(cut, Script((("content", "b"),))))
    await session.play("one", "two")
    assert [message.role for message in session.frontend.chats[1].messages] == [
        "user",
        "assistant",
        "user",
    ]


async def test_saved_calls_go_on_waiting(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    session = with_tools(in_pipe(Script(calls=CALLS[:1])))
    await session.play("How warm?", f"/save {path}")
    later = with_tools(in_pipe(Script((("content", "Cold."),))))
    await later.play(f"/load {path}", "12")
    (chat,) = later.frontend.chats
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[1].tool_calls[0].arguments == {"city": "Oslo"}


def test_run_shows_a_call_or_prints_it_as_json(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([WEATHER_TOOL]))
    flags = ["--tools", str(tools), "--temperature", "0", "--prompt", WEATHER_QUESTION]
    assert ninfer("run", *flags).stdout == 'get_weather({"city":"Hamburg"})\n'
    request = tmp_path / "request.json"
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    request.write_text(json.dumps({"messages": messages, "tools": [WEATHER_TOOL]}))
    done = ninfer("run", "--messages", str(request), "--temperature", "0", "--json")
    assert json.loads(done.stdout)["tool_calls"] == [
        {"name": "get_weather", "arguments": {"city": "Hamburg"}}
    ]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function"}], "tools[0].name"),
        ({"tools": 5}, "tools"),
        ({"tools": [WEATHER_TOOL], "tool_choice": "x"}, "tool_choice"),
        (5, "tools"),
    ],
)
def test_bad_tools_are_named(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(tools)
    assert caught.value.param == param


def test_bad_tools_are_one_clear_line(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function"}]')
    for flags, message in (([], "tools[0].name"), (["--raw"], "--raw omits")):
        done = ninfer("run", "--tools", str(tools), "--prompt", "a", *flags)
        assert done.returncode != 0
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
