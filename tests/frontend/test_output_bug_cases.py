"""Reported faults of servers in the reading of answers, by the number of their case."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from ninfer.contract.chat import GenerationParams
from ninfer.contract.generation import Finish, FinishReason
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_session import TextOutputSession
from tests.helpers.call_output import (
    Answer,
    call_rules,
    cut_at,
    cut_every,
    object_schema,
    run_answer,
)
from tests.helpers.demo_frontend import IM_END, chat, demo_frontend, demo_tokenizer, turn
from tests.helpers.output_text import run_pieces, session_rules

RULES: Final = call_rules(
    {
        "ls": object_schema(path="string"),
        "write": object_schema(filePath="string", content="string"),
        "run": object_schema(cmd="string"),
        "note": object_schema(text="string"),
        "f": {},
        "g": {},
        "rm": {},
    }
)


def every_way(text: str, **fields: Any) -> Answer:
    """What the text comes to; the same whole, by single characters, by pieces, cut once."""
    whole = run_answer([text], RULES, **fields)
    ways = [cut_every(text, size) for size in (1, 2, 3, 5, 8)]
    ways += [cut_at(text, [place]) for place in range(1, len(text.encode()))]
    for pieces in ways:
        answer = run_answer(pieces, RULES, **fields)
        assert (answer.pieces, answer.finish) == (whole.pieces, whole.finish)
    return whole


def test_o01_opening_mark_cut_by_a_piece() -> None:
    answer = every_way(
        "<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n</function>\n</tool_call>"
    )
    assert answer.calls == [("ls", {"path": "/srv"})]
    assert answer.text() == ""


def test_o02_parameters_that_come_with_the_end_of_the_function() -> None:
    pieces = [
        "<tool_call>\n<function=write>\n<parameter=filePath>\na.txt\n</parameter>\n",
        "<parameter=content>\nhi\n</parameter>\n</function>\n</tool_call>",
    ]
    answer = run_answer(pieces, RULES)
    assert [piece.text for piece in answer.pieces] == ['{"filePath":"a.txt","content":"hi"}']
    assert every_way("".join(pieces)).pieces == answer.pieces


def test_o03_thought_text_and_calls_in_one_piece() -> None:
    answer = every_way(
        'plan</think>ok <tool_call>{"name":"f","arguments":{}}</tool_call> '
        '<tool_call>{"name":"g","arguments":{"k":1}}</tool_call> done',
        opens_in_reasoning=True,
    )
    assert [(piece.channel, piece.index, piece.text) for piece in answer.pieces] == [
        ("reasoning", None, "plan"),
        ("content", None, "ok"),
        ("call", 0, "{}"),
        ("call", 1, '{"k":1}'),
        ("content", None, "done"),
    ]


def test_o04_closing_mark_inside_a_string() -> None:
    answer = every_way(
        '<tool_call>\n{"name":"note","arguments":{"text":"use </tool_call> to close"}}\n'
        "</tool_call>"
    )
    assert answer.calls == [("note", {"text": "use </tool_call> to close"})]
    assert answer.text() == ""


@pytest.mark.parametrize("arguments", ['{"n":3}', '{"ok":true}', '{"a":{"b":[1]}}', "{}"])
def test_o05_arguments_that_do_not_end_with_a_string(arguments: str) -> None:
    answer = every_way(f'<tool_call>\n{{"name":"f","arguments":{arguments}}}\n</tool_call>')
    assert [piece.text for piece in answer.pieces] == [arguments]


def test_o06_opening_mark_left_out() -> None:
    block = "<function={}>\n<parameter=cmd>\necho hi\n</parameter>\n</function>\n</tool_call>"
    answer = every_way(block.format("run"))
    assert (answer.calls, answer.text()) == ([("run", {"cmd": "echo hi"})], "")
    for text in (block.format("walk"), "write <function=run> in docs", "write <function=run>"):
        answer = every_way(text)
        assert (answer.calls, answer.text()) == ([], text)


async def test_o10_thought_that_the_prompt_closes_already() -> None:
    answer = await _demo_answer("Paris.", enable_thinking=False)
    assert answer == {"content": "Paris."}


async def test_o11_thought_that_the_prompt_opens() -> None:
    answer = await _demo_answer("Let me see</think>\n\nHello", enable_thinking=True)
    assert answer == {"reasoning": "Let me see", "content": "Hello"}
    output = run_pieces("Let me see", "</th", "ink>\n\nHello", opens_in_reasoning=True)
    assert (output.text("reasoning"), output.text()) == ("Let me see", "Hello")


async def _demo_answer(text: str, **template_kwargs: Any) -> dict[str, str]:
    """Channels of an answer to a prompt of the demo model."""
    frontend = demo_frontend()
    prompt = await frontend.prepare_chat(chat(turn("user", "Hi."), template_kwargs=template_kwargs))
    request = frontend.build_request("r", prompt, GenerationParams(), now=0.0)
    texts: dict[str, str] = {}
    for token_id in (*demo_tokenizer().encode(text), IM_END):
        preview = request.session.preview([GeneratedToken(token_id)], None)
        request.session.commit(preview)
        for delta in preview.deltas:
            texts[delta.channel] = texts.get(delta.channel, "") + delta.text
    return texts


def test_o12_prose_about_a_call_in_a_thought() -> None:
    thought = 'I could emit <tool_call>{"name":"rm","arguments":{}}</tool_call> but no.'
    answer = every_way(f"{thought}</think>No.", opens_in_reasoning=True)
    assert answer.calls == []
    assert (answer.text("reasoning"), answer.text()) == (thought, "No.")


def test_o14_letter_over_two_tokens() -> None:
    session = TextOutputSession(session_rules([b"\xc4", b"\x8f\xc3\xa1"]))
    steps = []
    for token_id in (0, 1):
        preview = session.preview([GeneratedToken(token_id)], None)
        session.commit(preview)
        steps.append("".join(delta.text for delta in preview.deltas))
    assert steps == ["", "ďá"]
    assert run_pieces(b"\xc4").texts() == ["\ufffd"]


def test_o15_stream_goes_on_behind_an_emoji_over_two_tokens() -> None:
    output = run_pieces("ok ", b"\xf0\x9f", b"\x8c\x8d", " end", calls=RULES)
    assert "".join(output.texts()) == "ok 🌍 end"
    assert run_pieces("ok ", b"\xf0\x9f", b"\x8c\x8d", " end").texts() == ["ok ", "🌍", " end"]


def test_o16_stop_string_over_tokens() -> None:
    for calls in (None, RULES):
        output = run_pieces("alpha be", "ta gam", "ma delta", stops=["beta gamma"], calls=calls)
        assert output.text() == "alpha "
        assert output.finish == Finish(FinishReason.STOP_STRING, "beta gamma")


def test_o17_text_behind_a_stop_string() -> None:
    for calls in (None, RULES):
        output = run_pieces("four, five, ", "six", stops=["five"], calls=calls)
        assert output.text() == "four, "
        assert output.token_ids() == []
        assert output.accepted == 1


def test_arguments_of_every_call_are_one_json_object() -> None:
    text = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    for piece in every_way(text * 3).pieces:
        assert json.loads(piece.text) == {}
