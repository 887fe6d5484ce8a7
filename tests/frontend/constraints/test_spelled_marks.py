"""Control marks that a grammar asks for are characters: the model's own marks never are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer.contract.chat import ToolSpec
from ninfer.frontend.constraints.call_grammar import CallGrammars
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.tool_calls.call_format import XmlCallFormat
from tests.helpers.grammar_rig import matcher, matcher_of, tokenizer, vocabulary

MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
)


def spelled(start: Matcher) -> str:
    """The only text of a grammar, as its forced tokens; none of them is a mark."""
    place, marks = start.copy(), {tokenizer().added_id(mark) for mark in MARKS}
    text = b""
    while not place.is_complete:
        forced = place.forced()
        assert forced
        assert not marks & set(forced)
        assert place.consume(forced)
        text += b"".join(map(tokenizer().token_bytes, forced))
    return text.decode()


@pytest.mark.parametrize("text", [*MARKS, *(f"x{mark}y{mark}" for mark in MARKS)])
def test_forced_marks_are_characters(text: str) -> None:
    assert spelled(matcher("choice", [text])) == text
    assert spelled(matcher("regex", text.replace("|", "[|]"))) == text
    assert spelled(matcher("gbnf", f'root ::= "{text}"')) == text
    assert spelled(matcher("lark", f'start: "{text}"')) == text
    for schema in ({"enum": [text]}, {"const": text}):
        assert spelled(matcher("json_schema", schema)) == json.dumps(text)


@pytest.mark.parametrize("mark", MARKS)
def test_names_and_choices_may_have_marks(mark: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {mark: {"const": 1}},
        "required": [mark],
        "additionalProperties": False,
    }
    place = matcher("json_schema", schema)
    ids = tokenizer().encode_plain(json.dumps({mark: 1}))
    assert place.accepts(ids)
    assert not place.accepts(tokenizer().encode(json.dumps({mark: 1})))
    several = matcher("choice", [f"a {mark}", f"b {mark}"])
    assert several.consume(tokenizer().encode_plain("b "))
    assert spelled(several) == mark


@pytest.mark.parametrize("mark", MARKS)
def test_arguments_of_calls_may_be_marks(mark: str) -> None:
    schema = {"type": "object", "properties": {"k": {"enum": [mark]}}, "required": ["k"]}
    grammars = CallGrammars(XmlCallFormat(), vocabulary())
    place = matcher_of(grammars.calls([ToolSpec("f", schema)], "tools", several=False))
    call_open = tokenizer().added_id("<tool_call>")
    assert call_open is not None
    assert place.consume([call_open])
    close = tokenizer().encode_plain(f"\n<function=f>\n<parameter=k>\n{mark}\n</parameter>\n")
    assert place.accepts(close)
    while not place.is_complete:
        assert place.consume(place.forced())


def test_plain_encoding_keeps_text_and_knows_no_marks() -> None:
    text = "a<think>b</think><|im_end|>"
    plain = tokenizer().encode_plain(text)
    assert b"".join(map(tokenizer().token_bytes, plain)).decode() == text
    assert len(plain) > len(tokenizer().encode(text))
