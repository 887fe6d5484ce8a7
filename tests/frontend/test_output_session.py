"""Tokens to text: characters, channels, stops, what is reported and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import Finish, FinishReason
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.output_session import TextOutputSession
from tests.helpers.output_text import (
    Expected,
    run_pieces,
    run_session,
    session_rules,
    whole_text_oracle,
)

LIMIT = FinishReason.OUTPUT_LIMIT


class TestCharacters:
    def test_letter_split_over_tokens_comes_whole(self) -> None:
        output = run_pieces(b"\xc4", b"\x8f\xc3\xa1")
        assert output.texts() == ["ďá"]
        assert output.token_ids() == [0, 1]

    def test_dangling_bytes_are_flushed_once_as_a_replacement(self) -> None:
        output = run_pieces("a", b"\xc4")
        assert output.texts() == ["a", "\ufffd"]
        assert output.token_ids() == [0, 1]

    def test_dangling_bytes_come_out_of_a_flush(self) -> None:
        session = TextOutputSession(session_rules([b"\xf0\x9f"]))
        session.commit(session.preview([GeneratedToken(0)], None))
        assert [delta.text for delta in session.flush()] == ["\ufffd"]
        assert session.flush() == ()

    def test_stream_goes_on_after_a_split_emoji(self) -> None:
        output = run_pieces("ok ", b"\xf0\x9f", b"\x8c\x8d", " end")
        assert output.texts() == ["ok ", "🌍", " end"]

    def test_invalid_byte_is_replaced_once_it_is_known_to_be_invalid(self) -> None:
        output = run_pieces(b"\xf0\x9f", "x", b"\xff", "y")
        assert output.texts() == ["\ufffdx", "\ufffd", "y"]

    def test_special_tokens_have_no_text_but_are_reported(self) -> None:
        output = run_pieces("a", "<|im_start|>", "b", hidden_ids=frozenset({1}))
        assert output.text() == "ab"
        assert output.token_ids() == [0, 1, 2]

    def test_tokens_without_any_text_are_reported_one_by_one(self) -> None:
        output = run_session(session_rules([]), [7, 8, 9])
        assert output.text() == ""
        assert [len(delta.tokens) for delta in output.deltas] == [1, 1, 1]


class TestStops:
    def test_stop_string_across_tokens_is_not_emitted(self) -> None:
        output = run_pieces("alpha be", "ta gam", "ma delta", stops=["beta gamma"])
        assert output.text() == "alpha "
        assert output.finish == Finish(FinishReason.STOP_STRING, "beta gamma")
        assert output.token_ids() == []

    def test_nothing_behind_a_match_leaks_when_the_engine_is_a_step_late(self) -> None:
        rules = session_rules(["four, ", "five, ", "six"], stops=["five"])
        output = run_session(rules, [0, 1, 2], batch_sizes=[3])
        assert output.text() == "four, "
        assert output.accepted == 2
        assert output.token_ids() == [0]

    def test_longest_possible_beginning_is_held_back_and_released(self) -> None:
        output = run_pieces("one ST", "O", "RM two", stops=["STOP"])
        assert output.texts() == ["one ", "STORM two"]
        assert [len(delta.tokens) for delta in output.deltas] == [0, 3]

    def test_text_held_back_at_the_end_is_released(self) -> None:
        output = run_pieces("wait ST", "O", stops=["STOP"])
        assert output.text() == "wait STO"
        assert output.finish == Finish(LIMIT)

    def test_natural_stop_wins_over_the_limit_at_the_same_token(self) -> None:
        output = run_pieces("go", "END", stops=["END"])
        assert output.finish == Finish(FinishReason.STOP_STRING, "END")

    def test_matched_string_is_kept_on_request(self) -> None:
        output = run_pieces("go EN", "D on", stops=["END"], includes_stop_string=True)
        assert output.text() == "go END"
        assert output.token_ids() == [0]

    def test_stop_token_is_hidden_and_not_reported(self) -> None:
        output = run_pieces("hi", "<|im_end|>", stop_ids=frozenset({1}))
        assert output.text() == "hi"
        assert output.finish == Finish(FinishReason.STOP_TOKEN, 1)
        assert output.token_ids() == [0]
        assert output.accepted == 2

    def test_stop_token_is_reported_where_that_is_asked_for(self) -> None:
        output = run_pieces("hi", "<|im_end|>", stop_ids=frozenset({1}), reports_stop_token=True)
        assert output.texts() == ["hi"]
        assert output.token_ids() == [0, 1]
        assert output.finish == Finish(FinishReason.STOP_TOKEN, 1)

    def test_stop_token_inside_a_batch_ends_there(self) -> None:
        rules = session_rules(["a", "#", "b"], stop_ids=frozenset({1}))
        output = run_session(rules, [0, 1, 2], batch_sizes=[3], limit=None)
        assert (output.text(), output.accepted) == ("a", 2)

    def test_minimum_of_tokens_lets_early_matches_pass(self) -> None:
        output = run_pieces("x.", "y.", "z.", "w.", stops=["."], min_tokens=2)
        assert output.text() == "x.y.z"
        assert output.accepted == 3

    def test_stops_leave_reasoning_alone(self) -> None:
        output = run_pieces("a END b</think>c END d", stops=["END"], opens_in_reasoning=True)
        assert (output.text("reasoning"), output.text()) == ("a END b", "c ")

    def test_stops_match_in_reasoning_on_request(self) -> None:
        output = run_pieces(
            "a E", "ND b</think>c", stops=["END"], stops_in_reasoning=True, opens_in_reasoning=True
        )
        assert (output.text("reasoning"), output.text()) == ("a", "")
        assert output.matched == "END"

    def test_stop_never_spans_the_closing_tag(self) -> None:
        output = run_pieces(
            "ab<", "/think>\n\ncd", stops=["b<", "bcd", "\n\n"], stops_in_reasoning=True,
            opens_in_reasoning=True,
        )  # fmt: skip
        assert (output.text("reasoning"), output.text(), output.matched) == ("ab", "cd", None)


class TestReasoning:
    def test_template_opened_the_thought(self) -> None:
        output = run_pieces("Let me see", "</th", "ink>\n\nHello", opens_in_reasoning=True)
        assert (output.text("reasoning"), output.text()) == ("Let me see", "Hello")
        assert output.reasoning_tokens == 2

    def test_closed_block_in_the_prompt_leaves_only_content(self) -> None:
        output = run_pieces("Paris.", opens_in_reasoning=False)
        assert (output.text("reasoning"), output.text()) == ("", "Paris.")

    def test_model_opens_the_thought_itself(self) -> None:
        output = run_pieces("<think>", "\n", "hm", "\n", "</think>", "\n\n", "Yes")
        assert (output.text("reasoning"), output.text()) == ("hm", "Yes")
        assert output.reasoning_tokens == 5
        assert (output.token_ids("reasoning"), output.token_ids()) == ([2], [6])

    def test_opening_tag_counts_only_at_the_very_beginning(self) -> None:
        output = run_pieces("a<think>b</think>c")
        assert (output.text("reasoning"), output.text()) == ("", "a<think>b</think>c")
        assert output.reasoning_tokens == 0

    def test_refuted_opening_tag_is_content(self) -> None:
        output = run_pieces("<", "th", "ought>")
        assert output.texts() == ["<thought>"]
        assert output.token_ids() == [0, 1, 2]
        assert output.reasoning_tokens == 0

    def test_only_the_first_closing_tag_counts(self) -> None:
        output = run_pieces("a</think>b</think>c", opens_in_reasoning=True)
        assert (output.text("reasoning"), output.text()) == ("a", "b</think>c")

    def test_unclosed_thought_is_all_reasoning(self) -> None:
        output = run_pieces("so <", "/thin", opens_in_reasoning=True)
        assert (output.text("reasoning"), output.text()) == ("so </thin", "")
        assert output.reasoning_tokens == 2

    def test_inner_white_space_of_a_thought_is_kept(self) -> None:
        output = run_pieces("a \n", "\n b \n", "</think>", "c", opens_in_reasoning=True)
        assert output.texts("reasoning") == ["a", " \n\n b"]

    def test_hidden_tags_are_no_special_case_for_raw_output(self) -> None:
        output = run_pieces("<think>", "a", "</think>", "\n\nb", splits_reasoning=False)
        assert (output.text(), output.reasoning_tokens) == ("<think>a</think>\n\nb", 0)

    def test_token_that_ends_in_the_answer_belongs_to_it(self) -> None:
        output = run_pieces("a", "</think>\n\nok", opens_in_reasoning=True)
        assert (output.reasoning_tokens, output.token_ids()) == (1, [1])

    def test_call_markup_inside_an_open_thought_is_text_of_the_thought(self) -> None:
        thought = 'I could emit <tool_call>{"name":"rm","arguments":{}}</tool_call> but no.'
        output = run_pieces(thought + "</think>No.", opens_in_reasoning=True)
        assert (output.text("reasoning"), output.text()) == (thought, "No.")


class TestProtocol:
    def test_preview_changes_nothing(self) -> None:
        session = TextOutputSession(session_rules(["a", b"\xc4", b"\x8f"], stops=["b"]))
        session.commit(session.preview([GeneratedToken(0), GeneratedToken(1)], None))
        first = session.preview([GeneratedToken(2)], LIMIT)
        assert session.preview([GeneratedToken(2)], LIMIT).deltas == first.deltas
        assert session.preview([GeneratedToken(0)], None).deltas[0].text == "\ufffda"
        session.commit(first)
        assert session.flush() == ()

    def test_stale_preview_is_refused(self) -> None:
        session = TextOutputSession(session_rules(["a"]))
        preview = session.preview([GeneratedToken(0)], None)
        session.commit(preview)
        with pytest.raises(InvariantError, match="present state"):
            session.commit(preview)

    @pytest.mark.parametrize("stops", [[], ["ab"]])
    def test_what_surely_goes_on_has_no_finish(self, stops: list[str]) -> None:
        session = TextOutputSession(session_rules(["a", "b"], stops=stops, stop_ids={2}))
        sure = []
        for token_id in (0, 1, 2):
            token = GeneratedToken(token_id)
            preview = session.preview([token], None)
            sure.append(session.goes_on_after(token))
            assert not sure[-1] or (preview.accepted, preview.finish) == (1, None)
            if preview.finish is None:
                session.commit(preview)
        assert sure == ([False] * 3 if stops else [True, True, False])

    def test_ended_session_takes_no_tokens(self) -> None:
        session = TextOutputSession(session_rules(["a"]))
        session.commit(session.preview([GeneratedToken(0)], LIMIT))
        with pytest.raises(InvariantError, match="ended"):
            session.preview([GeneratedToken(0)], None)

    def test_preview_needs_a_token(self) -> None:
        with pytest.raises(InvariantError, match="at least one"):
            TextOutputSession(session_rules([])).preview([], None)


FRAGMENTS = st.sampled_from(
    [
        b"<think>", b"</think>", b"<thi", b"nk>", b"</", b"think>", b"<", b"\n", b" ", b"\xc2\xa0",
        b"a", b"ab", b"END", b"EN", b"D", "é".encode(), "🌍".encode(), b"\xf0\x9f", b"\x8c",
        b"\xff", b"\xed\xa0\x80", b"\xe0",
    ]
)  # fmt: skip
STOPS = st.lists(
    st.sampled_from(["END", "ND", "a<", "\n\n", "ab", "\ufffd", "🌍", " ", "é\n", "</think>"]),
    max_size=3,
    unique=True,
)


@given(
    data=st.lists(FRAGMENTS, max_size=10).map(b"".join),
    cuts=st.lists(st.integers(0, 60), max_size=14),
    batch_sizes=st.lists(st.integers(1, 4), max_size=10),
    stops=STOPS,
    splits=st.booleans(),
    opens=st.booleans(),
    includes=st.booleans(),
    in_reasoning=st.booleans(),
)
@example(b"x<", [1], [], ["a<"], True, True, False, True)
@example(b"<think>\n\nEN", [3, 8], [], ["END"], True, False, False, False)
def test_any_split_gives_what_the_whole_text_gives(
    data: bytes,
    cuts: list[int],
    batch_sizes: list[int],
    stops: list[str],
    splits: bool,
    opens: bool,
    includes: bool,
    in_reasoning: bool,
) -> None:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:stop] for start, stop in pairwise(borders)]
    how = {
        "stops": stops,
        "splits_reasoning": splits,
        "opens_in_reasoning": opens,
        "includes_stop_string": includes,
        "stops_in_reasoning": in_reasoning,
    }
    rules = session_rules(pieces, **how)  # type: ignore[arg-type]
    output = run_session(rules, range(len(pieces)), batch_sizes=batch_sizes)
    expected = whole_text_oracle(data, **how)  # type: ignore[arg-type]
    assert Expected(output.text("reasoning"), output.text(), output.matched) == expected
    flushed = run_session(rules, range(len(pieces)), batch_sizes=batch_sizes, limit=None)
    assert (flushed.text("reasoning"), flushed.text()) == (expected.reasoning, expected.content)


@given(
    st.lists(st.sampled_from(["a", " ", "EN", "D", "", "é", "STO", "P"]), max_size=12),
    st.lists(st.sampled_from(["STOP", "D", "END "]), max_size=2),
)
def test_tokens_travel_with_the_text_they_end_in(pieces: list[str], stops: list[str]) -> None:
    output = run_session(session_rules(pieces, stops=stops), range(len(pieces)))
    text = spelled = ""
    for delta in output.deltas:
        text += delta.text
        spelled += "".join(pieces[token.token_id] for token in delta.tokens)
        assert text.startswith(spelled)
    if output.matched is None:
        assert output.token_ids() == list(range(len(pieces)))
    reported = output.token_ids()
    assert reported == list(range(len(reported)))


@given(st.lists(st.sampled_from(["a", " ", "\n", "b \n", " c", "", "</", "<"]), max_size=12))
def test_tokens_of_a_thought_travel_with_its_text(pieces: list[str]) -> None:
    pieces = ["a", *pieces]
    output = run_session(session_rules(pieces, opens_in_reasoning=True), range(len(pieces)))
    text = spelled = ""
    for delta in output.deltas:
        text += delta.text
        spelled += "".join(pieces[token.token_id] for token in delta.tokens)
        assert text.startswith(spelled)
    whole = "".join(pieces)
    ends = [len("".join(pieces[: index + 1])) for index in range(len(pieces))]
    in_text = [index for index, end in enumerate(ends) if end <= len(whole.rstrip())]
    reported = output.token_ids("reasoning")
    assert reported == sorted(reported)
    assert [index for index in reported if pieces[index]] == [i for i in in_text if pieces[i]]


def test_rules_can_be_narrowed_for_another_request() -> None:
    rules = session_rules(["a", "b"], stop_ids=frozenset({1}))
    assert run_session(replace(rules, stop_ids=frozenset()), [0, 1]).text() == "ab"
