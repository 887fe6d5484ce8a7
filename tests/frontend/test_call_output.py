"""Calls in the output: what an answer comes to, however it is cut into tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.contract.generation import FinishReason, OutputDelta
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_session import TextOutputSession
from tests.helpers.call_output import (
    STOP_ID,
    Answer,
    call_rules,
    cut_at,
    cut_every,
    merged,
    object_schema,
    run_answer,
    run_transcript,
)
from tests.helpers.output_text import session_rules

TOOLS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ls": object_schema(path="string"),
    "write": object_schema(filePath="string", content="string"),
    "run": object_schema(cmd="string"),
    "f": object_schema(n="integer", ok="boolean", items="array", maybe=["string", "null"]),
    "g": {},
    "note": object_schema(text="string"),
    "rm": {},
}
RULES: Final = call_rules(TOOLS)
LONG: Final = "x" * 40 + "\n</parameter>\n<b>ďá🌍</b>\n" + "y" * 60

XML: Final = (
    "Let me look.\n\n<tool_call>\n<function=ls>\n<parameter=path>\n/srv\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=write>\n<parameter=filePath>\na.txt\n</parameter>\n"
    f"<parameter=content>\n{LONG}\n\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=f>\n<parameter=n>\n-3\n</parameter>\n<parameter=ok>\nTrue\n"
    "</parameter>\n<parameter=items>\n[1, None]\n</parameter>\n<parameter=maybe>\nnull\n"
    "</parameter>\n<parameter=n>\n4\n</parameter>\n</function>\n</tool_call>\nThat is all.\n"
)
JSON: Final = (
    'Well <tool_call>\n{"name": "note", "arguments": {"text": "use </tool_call> \\u00e9 \\"{['
    '\\\\"}}\n</tool_call>\n<tool_call>{"name":"f","arguments":{"x":"oops}}</tool_call>'
    '<tool_call>{"arguments":{"a":[1,{}],"e":1.50e2},"name":"g"}</tool_call> '
    '<tool_call>{"name":"write","arguments":{"content":"'
    + "word \\ud83c\\udf0d\\n"
    * 12
    + '","filePath":"b"}}</tool_call><tool_call>{"name":"g","arguments":"{\\"k\\": 2}"}'
    '</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call> a < b '
)
THOUGHT: Final = (
    '<think>\nI could emit <tool_call>{"name":"rm","arguments":{}}</tool_call> but no.\n <b> \n'
    '</think>\n\n<think> is text, </think> too.\n<tool_call>{"name":"g"}</tool_call>'
)
FORGOTTEN: Final = (
    'Let me call.\n\n<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
    "<function=ls>\n<parameter=path>\n/\n</parameter>\n</function>\n</tool_call>\n"
)


def _by_characters(text: str, **fields: Any) -> Answer:
    return run_answer(list(text), RULES, **fields)


def _xml(name: str, /, **values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _json(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class TestXml:
    def test_calls_of_an_answer_with_all_that_surrounds_them(self) -> None:
        answer = _by_characters(XML)
        assert answer.calls == [
            ("ls", {"path": "/srv"}),
            ("write", {"filePath": "a.txt", "content": LONG + "\n"}),
            ("f", {"n": 4, "ok": True, "items": [1, None], "maybe": None}),
        ]
        assert answer.order == ["content", "call", "call", "content", "call", "content"]
        assert answer.text() == (
            "Let me look.<tool_call>\n<function=nobody>\n<parameter=a>\n1\n</parameter>\n"
            "</function>\n</tool_call>That is all.\n"
        )

    @pytest.mark.parametrize("text", ["", "\n", " lead", "a\n", "\n\na\n\n", "</tool_call>", "<"])
    def test_string_is_exact_but_for_one_line_break_at_each_end(self, text: str) -> None:
        assert _by_characters(_xml("note", text=text)).calls == [("note", {"text": text})]

    def test_value_on_the_line_of_its_marks(self) -> None:
        text = "<tool_call><function=note><parameter=text>a</parameter></function></tool_call>"
        assert _by_characters(text).calls == [("note", {"text": "a"})]

    @pytest.mark.parametrize(
        "text",
        [
            "</function>",
            "a</function>\n</tool_call>b",
            "</parameter>",
            "</parameter>\n</tool_call>\nb",
            "</parameter>\n</tool_call>\n<tool",
            "<parameter=x>",
            "</parameter>\n<parameter=\nx>",
            "<tool_call>\n<function=ls>",
            "</parameter",
            "a\n</parameter>\n\n\n</parameter>",
        ],
    )
    def test_marks_inside_a_value_are_text(self, text: str) -> None:
        assert _by_characters(_xml("note", text=text)).calls == [("note", {"text": text})]

    @pytest.mark.parametrize(
        "end",
        [
            "</parameter>\n</function>\n",
            "</parameter>\n</function>",
            "</parameter>\n",
            "</parameter>",
            "</parameter>\n</tool_call>\n",
        ],
    )
    def test_missing_closing_marks_at_the_end(self, end: str) -> None:
        text = f"<tool_call>\n<function=note>\n<parameter=text>\na\n{end}"
        assert _by_characters(text).calls == [("note", {"text": "a"})]

    def test_missing_end_of_a_function_before_another_call(self) -> None:
        first = _xml("note", text="a").replace("</function>\n", "")
        bare = "<tool_call>\n<function=g>\n</tool_call>"
        answer = _by_characters(f"{first}\n{bare}\n{_xml('ls', path='/')}")
        assert answer.calls == [("note", {"text": "a"}), ("g", {}), ("ls", {"path": "/"})]
        assert answer.text() == ""

    def test_parameter_left_open_at_the_end_is_text(self) -> None:
        text = "<tool_call>\n<function=note>\n<parameter=text>\na\n"
        answer = _by_characters(text)
        assert (answer.calls, answer.text()) == ([], text)

    def test_function_without_parameters(self) -> None:
        text = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
        assert [piece.text for piece in _by_characters(text).pieces] == ["{}"]

    def test_two_functions_in_one_block(self) -> None:
        text = "<tool_call>\n<function=g>\n</function>\n<function=rm>\n</function>\n</tool_call>"
        assert _by_characters(text).calls == [("g", {}), ("rm", {})]


class TestJson:
    def test_calls_of_an_answer_with_all_that_surrounds_them(self) -> None:
        answer = _by_characters(JSON)
        assert answer.calls == [
            ("note", {"text": 'use </tool_call> é "{[\\'}),
            ("g", {"a": [1, {}], "e": 150.0}),
            ("write", {"content": "word 🌍\n" * 12, "filePath": "b"}),
            ("g", {"k": 2}),
            ("g", {}),
        ]
        assert answer.text() == (
            'Well<tool_call>{"name":"f","arguments":{"x":"oops}}</tool_call>a < b '
        )

    @pytest.mark.parametrize(
        "block",
        [
            '{"name": "nobody", "arguments": {}}',
            '{"name": "g", "arguments": {}',
            '{"name": "g", "arguments": [1]}',
            '{"name": "g", "arguments": "no object"}',
            '{"name": "g", "arguments": 5}',
            '{"name": "g", "arguments": {"a": NaN}}',
            '{"name": "g", "arguments": {"a": 1e999}}',
            '{"name": "g", "arguments": {"a": 01}}',
            '{"name": "g", "arguments": {"a": "line\nbreak"}}',
            '{"name": "g", "arguments": {,}}',
            '{"name": "g", "arguments": {}, "arguments": {}}',
            '{"arguments": {}}',
            '{"name": 5, "arguments": {}}',
            "[]",
            "",
            "prose",
            "<tool_call>",
            '{"name": "g", "arguments": ' + "[" * 200,
            '{"name": "g", "arguments": {"a": "' + "z" * 80 + '" oops}}',
        ],
    )
    def test_malformed_block_is_text_and_costs_no_good_one(self, block: str) -> None:
        broken = f"<tool_call>\n{block}\n</tool_call>"
        answer = _by_characters(f"{_json('g')}\n{broken}\n{_json('rm')}")
        assert answer.calls == [("g", {}), ("rm", {})]
        assert answer.text() == broken

    def test_lone_surrogates_become_replacements(self) -> None:
        answer = _by_characters(_json("g", '{"a": "\\ud83d", "b": "\\ud83d\\ude00\\\\ud83d"}'))
        assert answer.calls == [("g", {"a": "\ufffd", "b": "😀\\ud83d"})]


class TestWhere:
    def test_white_space_without_a_call_stays(self) -> None:
        assert _by_characters("\n a \n\n b \n ").text() == "\n a \n\n b \n "

    def test_stop_strings_do_not_apply_inside_calls(self) -> None:
        answer = _by_characters(
            f"one {_json('note', json.dumps({'text': 'STOP'}))} two STOP three", stops=["STOP"]
        )
        assert answer.calls == [("note", {"text": "STOP"})]
        assert answer.text() == "onetwo "
        assert answer.finish is not None
        assert answer.finish.reason is FinishReason.STOP_STRING

    @pytest.mark.parametrize(
        ("stop", "text", "shown"),
        [
            ("b<tool_call>z", "ab<tool_call>zz", "a"),
            ("b<tool_c", "ab<tool_cx", "a"),
            ("\n\n<tool_call>\n5", "a\n\n<tool_call>\n5", "a"),
            (" STOP", "a  \n STOP", "a  \n"),
        ],
    )
    def test_stop_strings_apply_to_what_only_looked_like_a_call(
        self, stop: str, text: str, shown: str
    ) -> None:
        answer = _by_characters(text, stops=[stop])
        assert answer.text() == shown
        assert answer.finish is not None
        assert answer.finish.matched == stop

    def test_stop_string_that_a_call_interrupts_is_none(self) -> None:
        answer = _by_characters(f"ab{_json('g')}c", stops=["b<tool_call>x", "bc"])
        assert answer.text() == "abc"

    @pytest.mark.parametrize("size", [1, 3, 1000])
    def test_one_call_ends_the_answer_when_no_more_are_allowed(self, size: int) -> None:
        text = f"a {_json('g')}\n{_json('rm')} b"
        rules = call_rules(TOOLS, parallel=False)
        answer = run_answer(cut_every(text, size), rules)
        assert answer.calls == [("g", {})]
        assert answer.text() == "a"
        assert answer.finish is not None
        assert answer.finish.reason is FinishReason.TOOL_CALL

    def test_only_allowed_functions_are_called(self) -> None:
        rules = call_rules(TOOLS, allowed=("rm",))
        answer = run_answer([_json("g"), _json("rm")], rules)
        assert (answer.calls, answer.text()) == ([("rm", {})], _json("g"))

    def test_calls_are_text_without_rules(self) -> None:
        answer = run_answer([_json("g")], None)
        assert answer.text() == _json("g")


class TestCut:
    """The end comes before the call is complete and the model did not want it."""

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>",
            "<tool_call>\n<function=no",
            "<tool_call>\n<function=note>\n<parameter=text>\nshort",
            "<tool_call>\n<function=note>\n<parameter=text>\nshort\n</parameter>\n",
            '<tool_call>\n{"name": "note", "arg',
            "<function=note>\n<par",
        ],
    )
    def test_half_a_call_is_not_shown(self, text: str) -> None:
        answer = _by_characters(f"Look: {text}", ends=False)
        assert [(piece.channel, piece.text) for piece in answer.pieces] == [("content", "Look:")]

    def test_long_string_was_shown_but_never_ends(self) -> None:
        half = f"<tool_call>\n<function=note>\n<parameter=text>\n{'z' * 90}"
        answer = _by_characters(f"{_json('g')}\n{half}", ends=False)
        assert [(piece.text, piece.is_complete) for piece in answer.pieces] == [
            ("{}", True),
            ('{"text":"' + "z" * 90, False),
        ]
        assert answer.finish is not None
        assert answer.finish.reason is FinishReason.OUTPUT_LIMIT

    def test_call_that_lacks_nothing_but_its_closing_mark_is_complete(self) -> None:
        assert _by_characters(_json("g").removesuffix("</tool_call>"), ends=False).calls == [
            ("g", {})
        ]

    @pytest.mark.parametrize("text", ["a <tool_c", "a <", "a <function=gg", "a \n"])
    def test_what_need_not_be_a_call_is_shown(self, text: str) -> None:
        assert _by_characters(text, ends=False).text() == text


class TestThought:
    def test_prose_about_calls_in_a_thought_is_no_call(self) -> None:
        answer = _by_characters(THOUGHT)
        assert answer.text("reasoning") == (
            'I could emit <tool_call>{"name":"rm","arguments":{}}</tool_call> but no.\n <b>'
        )
        assert answer.text() == "<think> is text, </think> too."
        assert answer.calls == [("g", {})]

    def test_calls_that_end_an_unclosed_thought_are_meant(self) -> None:
        answer = _by_characters(FORGOTTEN, opens_in_reasoning=True)
        assert answer.text("reasoning") == "Let me call."
        assert answer.calls == [("g", {"a": 1}), ("ls", {"path": "/"})]
        assert answer.reasoning_tokens == len("Let me call.\n\n")

    @pytest.mark.parametrize(
        ("end", "fields"),
        [
            ("and so on", {}),
            ("</think>", {}),
            ("", {"ends": False}),
            ("<tool_call>\n{", {}),
            (_json("nobody"), {}),
        ],
    )
    def test_they_are_prose_with_anything_behind_them(
        self, end: str, fields: dict[str, Any]
    ) -> None:
        answer = _by_characters(f"{FORGOTTEN}{end}", opens_in_reasoning=True, **fields)
        assert answer.calls == []
        thought = f"{FORGOTTEN}{end}".removesuffix("</think>").rstrip()
        assert answer.text("reasoning") == thought
        assert answer.text() == ""

    def test_only_one_of_them_counts_when_no_more_are_allowed(self) -> None:
        rules = call_rules(TOOLS, parallel=False)
        answer = run_answer(list(FORGOTTEN), rules, opens_in_reasoning=True)
        assert answer.calls == [("g", {"a": 1})]

    def test_thought_goes_on_at_once_behind_what_is_no_call(self) -> None:
        pieces = ["I see <tool_call>", " in", " it"]
        deltas = run_transcript(pieces, RULES, ends=False, opens_in_reasoning=True).deltas
        assert [delta.text for delta in deltas] == ["I see", " <tool_call> in", " it"]


class TestTokens:
    def test_tokens_of_a_call_are_reported_in_its_channel(self) -> None:
        pieces = [
            "a",
            "\n\n",
            "<tool_call>",
            '{"name":"g",',
            '"arguments":{}}',
            "</tool_call>",
            "b",
        ]
        transcript = run_transcript(pieces, RULES)
        assert transcript.token_ids() == [0, 6]
        assert transcript.token_ids("call") == [2, 3, 4, 5]

    def test_token_that_ends_in_dropped_white_space_is_reported_for_its_text(self) -> None:
        call = ["<tool_call>", '{"name":"g"}', "</tool_call>"]
        assert run_transcript(["a", "b.\n\n", *call], RULES).token_ids() == [0, 1]
        assert run_transcript(["a", "b.\n", "\n", *call, "c"], RULES).token_ids() == [0, 1, 6]
        assert run_transcript(["b.\n", "\n", "c", *call], RULES).token_ids() == [0, 1, 2]

    def test_tokens_of_what_is_no_call_belong_to_the_text(self) -> None:
        pieces = ["a", "\n\n", "<tool_call>", "b", *("{c" for _ in range(100))]
        assert run_transcript(pieces, RULES).token_ids() == list(range(104))

    def test_long_string_is_shown_while_it_comes(self) -> None:
        head = "<tool_call>\n<function=note>\n<parameter=text>\n"
        pieces = [head, *("word " for _ in range(20)), "\n</parameter>\n</function>\n</tool_call>"]
        transcript = run_transcript(pieces, RULES)
        texts = transcript.texts("call")
        assert texts[0] == '{"text":"' + "word " * 13
        assert texts[1:] == ["word "] * 7 + ['"}']
        assert transcript.token_ids("call") == list(range(22))

    def test_many_tokens_wait_while_a_value_is_read(self) -> None:
        head = "<tool_call>\n<function=f>\n<parameter=items>\n["
        pieces = [head, *("1," for _ in range(200)), "1]\n</parameter>\n</function>\n</tool_call>"]
        transcript = run_transcript(pieces, RULES)
        assert [len(delta.tokens) for delta in transcript.deltas] == [202]
        assert json.loads(transcript.text("call")) == {"items": [1] * 201}


class TestGoesOn:
    def test_sure_unless_the_only_call_may_end(self) -> None:
        pieces = ["a", _json("g"), '{"name":', "x"]
        for parallel, expected in [(True, [True] * 4), (False, [True, False, True, True])]:
            rules = session_rules(pieces, calls=call_rules(TOOLS, parallel=parallel))
            session = TextOutputSession(rules)
            tokens = [GeneratedToken(index) for index in range(4)]
            assert [session.goes_on_after(token) for token in tokens] == expected

    def test_in_doubt_while_the_only_call_is_read(self) -> None:
        rules = session_rules(["<tool_call>", "a"], calls=call_rules(TOOLS, parallel=False))
        session = TextOutputSession(rules)
        session.commit(session.preview([GeneratedToken(0)], None))
        assert not session.goes_on_after(GeneratedToken(1))

    @given(st.data())
    def test_it_is_no_more_than_a_promise(self, data: st.DataObject) -> None:
        """Whoever goes on for sure is taken by a preview without a finish."""
        pieces = [*FRAGMENTS, _xml("note", text="v") + "x", _json("g") + "\n", ""]
        parallel = data.draw(st.booleans())
        rules = session_rules(
            pieces,
            calls=call_rules(TOOLS, parallel=parallel),
            stop_ids=frozenset({STOP_ID}),
            opens_in_reasoning=data.draw(st.booleans()),
        )
        session, finish = TextOutputSession(rules), None
        token_ids = st.sampled_from([*range(len(pieces)), STOP_ID])
        for _ in range(10):
            token = GeneratedToken(data.draw(token_ids))
            goes_on = session.goes_on_after(token)
            preview = session.preview([token], None)
            finish = preview.finish
            assert not (goes_on and finish is not None)
            assert goes_on or finish is not None or not parallel
            if finish is not None:
                return
            session.commit(preview)


ANSWERS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "xml": (XML, {}),
    "json": (JSON, {}),
    "thought": (THOUGHT, {}),
    "forgotten": (FORGOTTEN, {"opens_in_reasoning": True}),
    "stops": (f"a {XML} STOP {JSON}", {"stops": ["STOP", "is all.\n STO"]}),
    "cut": (XML[:-80], {"ends": False}),
}
WHOLE: Final = {
    name: run_answer([text], RULES, **fields) for name, (text, fields) in ANSWERS.items()
}


class TestChunking:
    """The pieces in which text comes change nothing but when it is shown."""

    @pytest.mark.parametrize("name", ANSWERS)
    def test_every_single_cut(self, name: str) -> None:
        text, fields = ANSWERS[name]
        for place in range(1, len(text.encode())):
            self._check(name, run_answer(cut_at(text, [place]), RULES, **fields))

    @pytest.mark.parametrize("name", ANSWERS)
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
    def test_equal_pieces(self, name: str, size: int) -> None:
        text, fields = ANSWERS[name]
        self._check(name, run_answer(cut_every(text, size), RULES, **fields))

    @given(
        name=st.sampled_from(sorted(ANSWERS)),
        places=st.sets(st.integers(1, 1200), max_size=40),
        batch_sizes=st.lists(st.integers(1, 4), max_size=8),
    )
    @example(name="xml", places={400, 401, 402}, batch_sizes=[2, 3])
    def test_any_pieces_in_any_batches(
        self, name: str, places: set[int], batch_sizes: list[int]
    ) -> None:
        text, fields = ANSWERS[name]
        pieces = cut_at(text, places)
        self._check(name, run_answer(pieces, RULES, batch_sizes=batch_sizes, **fields))

    @given(st.data())
    def test_any_row_of_fragments(self, data: st.DataObject) -> None:
        """Markup in any disorder: whole, character by character and cut anywhere."""
        fragments = data.draw(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=14))
        fields: dict[str, Any] = {
            "opens_in_reasoning": data.draw(st.booleans()),
            "ends": data.draw(st.booleans()),
        }
        if data.draw(st.booleans()):
            fields["stops"] = ["a<tool_call>", "</parameter>", "\n{"]
        text = "".join(fragments)
        whole = run_answer([text], RULES, **fields)
        cuts = data.draw(st.sets(st.integers(1, max(1, len(text))), max_size=6))
        for pieces in (cut_every(text, 1), cut_at(text, cuts)):
            answer = run_answer(pieces, RULES, **fields)
            assert (answer.pieces, answer.finish) == (whole.pieces, whole.finish)

    @pytest.mark.parametrize("length", [63, 64, 65])
    @pytest.mark.parametrize("end", ["\n", '" oops', "\\x", '", 5', ""])
    def test_string_that_is_long_enough_to_be_shown_and_breaks(self, length: int, end: str) -> None:
        text = f'<tool_call>{{"name":"g","arguments":{{"a":"{"z" * length}{end}'
        whole = run_answer([text], RULES)
        assert whole.pieces[0].channel == ("call" if length >= 64 else "content")
        assert run_answer(list(text), RULES).pieces == whole.pieces

    def _check(self, name: str, answer: Answer) -> None:
        whole = WHOLE[name]
        assert (answer.pieces, answer.finish) == (whole.pieces, whole.finish)


class TestNoCall:
    """Tools change nothing of an answer without calls."""

    @given(
        pieces=st.lists(st.text(alphabet="ab<> \n", min_size=1, max_size=5), max_size=12),
        ends=st.booleans(),
        stops=st.sampled_from([(), ("ab",), (" \n",), ("<a",)]),
        opens=st.booleans(),
        sizes=st.lists(st.integers(1, 3), max_size=6),
    )
    def test_same_text_and_tokens(
        self, pieces: list[str], ends: bool, stops: tuple[str, ...], opens: bool, sizes: list[int]
    ) -> None:
        told, plain = (
            run_transcript(
                [*pieces, "."],
                calls,
                ends=ends,
                stops=stops,
                opens_in_reasoning=opens,
                batch_sizes=sizes,
            )
            for calls in (RULES, None)
        )
        assert told.finish == plain.finish
        assert told.accepted == plain.accepted
        for channel in ("reasoning", "content"):
            assert told.text(channel) == plain.text(channel)
            assert told.token_ids(channel) == plain.token_ids(channel)


FRAGMENTS: Final = [
    "<tool_call>",
    "</tool_call>",
    "<function=note>",
    "<function=nobody>",
    "</function>",
    "<parameter=text>",
    "<parameter=n>",
    "</parameter>",
    "</think>",
    "\n",
    " ",
    "a",
    '{"name":"note","arguments":{"text":"',
    '{"name":"g","arguments":{}}',
    '"}}',
    "\\ud83d",
    "\\u",
    "x" * 64,
    "<",
    _xml("note", text="v"),
    _json("g"),
]


class TestPurity:
    @given(places=st.sets(st.integers(1, 600), max_size=20), name=st.sampled_from(["xml", "json"]))
    def test_previews_change_nothing(self, places: set[int], name: str) -> None:
        """Of several previews from one state any may be committed."""
        text, fields = ANSWERS[name]
        pieces = cut_at(text, places)
        rules = session_rules(pieces, calls=RULES, stop_ids=frozenset({STOP_ID}), **fields)
        session = TextOutputSession(rules)
        deltas: list[OutputDelta] = []
        tokens = [GeneratedToken(index) for index in (*range(len(pieces)), STOP_ID)]
        for token, other in pairwise([*tokens, tokens[0]]):
            first = session.preview([token], None)
            session.preview([other, token], FinishReason.OUTPUT_LIMIT)
            assert session.preview([token], None).deltas == first.deltas
            session.commit(first)
            deltas += first.deltas
        assert merged(deltas) == WHOLE[name].pieces

    def test_answer_that_opens_calls_without_end_is_read_in_bounded_time(self) -> None:
        """Each mark could be a call up to the very end of the text."""
        text = '<tool_call>{"name":"g","arguments":{"a":"' * 3000
        answer = run_answer(cut_every(text, 4000), RULES)
        assert answer.text() == text


@pytest.mark.parametrize(
    ("text", "num_broken"),
    [
        (_json("g") + _xml("ls", path="/"), 0),
        ("no calls at all, a < b", 0),
        ("<tool_call> of which nothing comes, " + _json("g"), 1),
        ("<tool_call>{broken}</tool_call><tool_call>[]</tool_call>", 2),
        (f"<think>\nI could <tool_call> this.\n</think>\n\n{_json('g')}", 0),
    ],
)
def test_openings_that_were_none_are_counted(text: str, num_broken: int) -> None:
    pieces = cut_every(text, 3)
    session = TextOutputSession(session_rules(pieces, calls=RULES, stop_ids=frozenset({STOP_ID})))
    for token_id in (*range(len(pieces)), STOP_ID):
        preview = session.preview((GeneratedToken(token_id),), None)
        before = session.broken_calls
        session.preview((GeneratedToken(token_id),), None)
        assert session.broken_calls == before, "a preview changes nothing"
        session.commit(preview)
    assert session.broken_calls == num_broken
