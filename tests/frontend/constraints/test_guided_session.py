"""Guided sessions: where a grammar takes its turn, budgets of thought, ends, and previews."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from ninfer.contract.chat import Constraint, GenerationParams, ToolRules, ToolSpec
from ninfer.contract.errors import InvariantError, RequestError
from ninfer.contract.generation import Finish, FinishReason, GenerationRequest
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.constraints.guides import BARE_CLOSING, CLOSING_TEXT
from ninfer.frontend.frontend import ModelFrontend
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, IM_END, THINK_END, demo_frontend
from tests.helpers.grammar_rig import allowed_ids, constraint

FRONTEND = demo_frontend()
SCHEMA = constraint("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}},
                                    "required": ["a"], "additionalProperties": False})  # fmt: skip
TOOL = ToolSpec(
    "get",
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    is_strict=True,
)


def encode(text: str) -> list[int]:
    tokenizer = FRONTEND._tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


async def request(
    frontend: ModelFrontend = FRONTEND, *, thinks: bool = False, **fields: Any
) -> GenerationRequest:
    prompt = PreparedPrompt(np.array([1, 2], np.int32), opens_in_reasoning=thinks)
    result = frontend.build_request("r", prompt, GenerationParams(**fields), now=0.0)
    if result.prepare is not None:
        await result.prepare()
    return result


def allowed(target: GenerationRequest) -> list[int] | None:
    """None: any token."""
    if target.mask is None or not target.mask.is_active:
        return None
    words = np.full(DEMO_VOCAB_SIZE // 32, 0x5A5A5A5A, np.uint32)
    target.mask.fill(words)
    return [int(token_id) for token_id in allowed_ids(words)]


class Feed:
    """Feeds tokens as an engine would: each must be allowed; collects what is shown."""

    def __init__(self, target: GenerationRequest) -> None:
        self.request = target
        self.texts = {"reasoning": "", "content": "", "call": ""}
        self.finish: Finish | None = None

    def take(self, token_ids: list[int], *, checks: bool = True) -> None:
        for token_id in token_ids:
            assert self.finish is None, "tokens behind the end"
            ids = allowed(self.request)
            assert not checks or ids is None or token_id in ids, (token_id, ids)
            session = self.request.session
            preview = session.preview((GeneratedToken(token_id),), None)
            if session.goes_on_after(GeneratedToken(token_id)):
                assert preview.finish is None
                session.commit(preview)
                assert allowed(self.request) is None
            else:
                session.commit(preview)
            for delta in preview.deltas:
                self.texts[delta.channel] += delta.text
            self.finish = preview.finish

    def text(self, text: str) -> Feed:
        self.take(encode(text))
        return self


async def test_a_grammar_holds_from_the_first_token_when_nothing_is_thought() -> None:
    feed = Feed(await request(constraint=SCHEMA))
    ids = allowed(feed.request)
    assert ids is not None
    assert all(FRONTEND.token_bytes(i).startswith(b"{") for i in ids)
    feed.text('{"a": 12')
    assert IM_END not in (allowed(feed.request) or [])
    feed.text("}")
    assert feed.finish == Finish(FinishReason.STOP_TOKEN)
    assert feed.texts == {"reasoning": "", "content": '{"a": 12}', "call": ""}


async def test_a_grammar_waits_for_the_end_of_the_thought() -> None:
    feed = Feed(await request(constraint=SCHEMA, thinks=True))
    ids = allowed(feed.request)
    assert ids is not None
    assert len(ids) == DEMO_VOCAB_SIZE - 2
    assert IM_END not in ids
    feed.text('{"b": I think.\n</think>')
    assert allowed(feed.request) == encode("\n\n")[:1]
    feed.text('\n\n{"a":1}')
    assert feed.finish == Finish(FinishReason.STOP_TOKEN)
    assert feed.texts["reasoning"] == '{"b": I think.'
    assert feed.texts["content"] == '{"a":1}'


async def test_a_mark_that_is_spelt_out_ends_a_thought_as_well() -> None:
    feed = Feed(await request(constraint=constraint("regex", "[a-z]+"), thinks=True))
    feed.take([token for part in ("So", "</", "thi", "nk", ">") for token in encode(part)])
    feed.text("\n\nyes")
    feed.take([IM_END])
    assert feed.texts == {"reasoning": "So", "content": "yes", "call": ""}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("text", ["<think>", "<think>so</think>yes", "</think>", "<tool_call>"])
async def test_marks_that_the_grammar_asks_for_are_content(text: str, thinks: bool) -> None:
    feed = Feed(await request(constraint=constraint("choice", [text]), thinks=thinks))
    if thinks:
        feed.text("Well.</think>").text("\n\n")
    tokenizer = FRONTEND._tokenizer
    assert tokenizer is not None
    feed.take(tokenizer.encode_plain(text))
    assert feed.finish == Finish(FinishReason.STOP_TOKEN)
    assert feed.texts["content"] == text
    assert feed.texts["reasoning"] == ("Well." if thinks else "")


async def test_the_end_is_allowed_only_where_the_grammar_may_end() -> None:
    feed = Feed(await request(constraint=constraint("regex", "[0-9]{2,4}")))
    for text, may_end in (("1", False), ("2", True), ("3", True)):
        feed.text(text)
        assert (IM_END in (allowed(feed.request) or [])) == may_end
    feed.text("4")
    assert feed.finish == Finish(FinishReason.STOP_TOKEN)


async def test_min_tokens_delay_the_end_but_do_not_extend_a_grammar() -> None:
    target = await request(constraint=constraint("regex", "[0-9]{1,3}"), min_tokens=2)
    assert target.suppressed_ids == ()
    feed = Feed(target)
    feed.text("1")
    assert IM_END not in (allowed(target) or [])
    feed.text("2")
    assert IM_END in (allowed(target) or [])
    short = Feed(await request(constraint=constraint("choice", ["a"]), min_tokens=50))
    short.text("a")
    assert short.finish == Finish(FinishReason.STOP_TOKEN)


async def test_other_stop_tokens_end_only_where_the_grammar_may_end() -> None:
    (stop,) = encode("x")
    grammar = constraint("regex", "ax?b")
    feed = Feed(await request(constraint=grammar, stop_token_ids=(stop,)))
    feed.text("a")
    assert allowed(feed.request) == encode("b")
    free = Feed(await request(constraint=constraint("regex", "a+"), stop_token_ids=(stop,)))
    free.text("a")
    free.take([stop])
    assert free.finish == Finish(FinishReason.STOP_TOKEN, stop)


async def test_ignored_ends_of_turn_never_come_and_a_complete_grammar_still_ends() -> None:
    feed = Feed(await request(constraint=constraint("regex", "[ab]{1,2}"), ignore_eos=True))
    feed.text("a")
    assert IM_END not in (allowed(feed.request) or [])
    feed.text("b")
    assert feed.finish == Finish(FinishReason.STOP_TOKEN)


async def test_stop_strings_still_end_the_answer() -> None:
    feed = Feed(await request(constraint=constraint("regex", "[a-z ]+"), stop=("end",)))
    feed.text("the end")
    assert feed.finish == Finish(FinishReason.STOP_STRING, "end")
    assert feed.texts["content"] == "the "


async def test_a_dead_end_says_so() -> None:
    (stop,) = encode("a")
    target = await request(
        constraint=constraint("regex", "a"), stop_token_ids=(stop,), ignore_eos=True
    )
    assert allowed(target) == []
    assert target.mask is not None
    error = target.mask.failure()
    assert isinstance(error, RequestError)
    assert (error.code, error.param) == ("constraint_dead_end", "response_format")


async def test_a_budget_closes_the_thought() -> None:
    target = await request(thinks=True, thinking_budget=3, max_tokens=200)
    feed = Feed(target)
    feed.text("One two")
    spent = len(encode("One two"))
    feed.take(encode(" x" * 3)[: 3 - spent])
    for token_id in encode(CLOSING_TEXT):
        assert allowed(target) == [token_id]
        feed.take([token_id])
    assert allowed(target) is None
    feed.text("Yes.")
    feed.take([IM_END])
    assert feed.texts["content"] == "Yes."
    assert feed.texts["reasoning"].endswith(CLOSING_TEXT.split("</think>")[0].strip())
    num_closing = len(encode(CLOSING_TEXT.removesuffix("\n\n")))
    assert target.session.reasoning_tokens == 3 + num_closing


async def test_a_thought_is_not_closed_inside_a_character() -> None:
    token_ids = encode("\U0001f30d")
    assert len(token_ids) > 2
    target = await request(thinks=True, thinking_budget=1, max_tokens=200)
    feed = Feed(target)
    for token_id in token_ids[:-1]:
        feed.take([token_id])
        assert allowed(target) is None
    feed.take(token_ids[-1:])
    assert allowed(target) == encode(CLOSING_TEXT)[:1]
    assert feed.texts["reasoning"] == "\U0001f30d"


async def test_what_can_only_come_is_forced() -> None:
    target = await request(constraint=constraint("regex", "The answer is [0-9]+\\."))
    feed = Feed(target)
    assert target.mask is not None
    forced = list(target.mask.forced())
    text = b"".join(map(FRONTEND.token_bytes, forced)).decode()
    assert text
    assert "The answer is ".startswith(text)
    preview = target.session.preview([GeneratedToken(token_id) for token_id in forced], None)
    target.session.commit(preview)
    feed.text("The answer is 7"[len(text) :])
    assert target.mask.forced() == ()


async def test_a_thought_that_ends_in_time_is_not_closed() -> None:
    feed = Feed(await request(thinks=True, thinking_budget=3, max_tokens=200))
    feed.text("a")
    feed.take([THINK_END])
    feed.text("b" * 9)
    assert allowed(feed.request) is None


async def test_a_budget_and_a_grammar_together() -> None:
    feed = Feed(await request(thinks=True, thinking_budget=1, constraint=SCHEMA, max_tokens=200))
    feed.text("a")
    feed.text(CLOSING_TEXT)
    feed.text('{"a":1}')
    assert feed.texts["content"] == '{"a":1}'
    assert feed.finish == Finish(FinishReason.STOP_TOKEN)


WORDS = len(encode(CLOSING_TEXT))


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "closes_at", "closing"),
    [
        (5, 200, 5, CLOSING_TEXT),
        (30, 40, 40 - WORDS - 1, CLOSING_TEXT),
        (8, 15, 8, BARE_CLOSING),
        (3, 5, 2, BARE_CLOSING),
        (1, 3, 0, BARE_CLOSING),
        (1, 2, 0, BARE_CLOSING),
        (5, WORDS + 1, 5, BARE_CLOSING),
        (5, WORDS + 2, 1, CLOSING_TEXT),
        (0, 200, 0, BARE_CLOSING),
        (0, 1, 0, BARE_CLOSING),
        (50, 40, None, ""),
        (5, 5, None, ""),
    ],
)
async def test_a_thought_is_never_longer_than_its_budget(
    wanted: int, max_tokens: int, closes_at: int | None, closing: str
) -> None:
    target = await request(thinks=True, thinking_budget=wanted, max_tokens=max_tokens)
    feed = Feed(target)
    for _ in range(max_tokens if closes_at is None else closes_at):
        assert allowed(target) is None
        feed.text("a")
    if closes_at is not None:
        for token_id in encode(closing):
            assert allowed(target) == [token_id]
            feed.take([token_id])
        assert allowed(target) is None
        assert "Yes" in feed.text("Yes").texts["content"]


async def test_a_thought_that_the_model_opens_itself_has_the_budget_too() -> None:
    feed = Feed(await request(thinking_budget=2, max_tokens=200))
    feed.text("<think>")
    assert allowed(feed.request) is None
    feed.text("ab" if len(encode("ab")) == 2 else "a b")
    assert allowed(feed.request) == encode(CLOSING_TEXT)[:1]


async def test_a_thought_without_a_budget_that_the_model_opens_is_closed_at_once() -> None:
    target = await request(thinking_budget=0, max_tokens=200)
    feed = Feed(target).text("<think>")
    assert allowed(target) == [THINK_END]
    feed.text(BARE_CLOSING).text("Yes.")
    assert feed.texts == {"reasoning": "", "content": "Yes.", "call": ""}


async def test_raw_text_has_no_thoughts() -> None:
    target = await request(thinks=True, thinking_budget=1, split_reasoning=False)
    assert target.mask is None


async def test_strict_tools_bind_a_call_once_it_has_begun() -> None:
    rules = ToolRules(tools=(TOOL,))
    feed = Feed(await request(tools=rules))
    feed.text("Let me look.\n\n")
    assert allowed(feed.request) is None
    feed.text("<tool_call>")
    assert allowed(feed.request) is not None
    assert IM_END not in (allowed(feed.request) or [])
    feed.text("\n<function=get>\n<parameter=n>\n")
    ids = allowed(feed.request) or []
    assert encode("7")[0] in ids
    assert encode("x")[0] not in ids
    feed.text("7\n</parameter>\n</function>\n</tool_call>")
    assert allowed(feed.request) is None
    feed.text("\n<tool_call>\n<function=get>\n")
    feed.text("<parameter=n>\n8\n</parameter>\n</function>\n</tool_call>")
    feed.take([IM_END])
    assert feed.finish is not None


async def test_calls_that_are_demanded() -> None:
    rules = ToolRules(tools=(TOOL,), choice="required", parallel=False)
    feed = Feed(await request(tools=rules))
    assert allowed(feed.request) == encode("<tool_call>")
    feed.text(
        "<tool_call>\n<function=get>\n<parameter=n>\n8\n</parameter>\n</function>\n</tool_call>"
    )
    assert feed.finish is not None


async def test_no_call_is_possible_where_none_is_wanted() -> None:
    target = await request(tools=ToolRules(tools=(TOOL,), choice="none"))
    assert target.sampling.logit_bias == ((encode("<tool_call>")[0], -np.inf),)


async def test_a_demanded_call_excludes_a_constraint() -> None:
    with pytest.raises(RequestError) as caught:
        await request(tools=ToolRules(tools=(TOOL,), choice="required"), constraint=SCHEMA)
    assert caught.value.param == "response_format"


async def test_previews_change_nothing_and_fit_one_state() -> None:
    target = await request(constraint=constraint("regex", "[ab]{3}"))
    session, (a,), (b,) = target.session, encode("a"), encode("b")
    before = allowed(target)
    stale = session.preview((GeneratedToken(a),), None)
    assert session.preview((GeneratedToken(b),), None).deltas[0].text == "b"
    assert allowed(target) == before
    session.commit(session.preview((GeneratedToken(b),), None))
    with pytest.raises(InvariantError):
        session.commit(stale)
    whole = session.preview((GeneratedToken(a), GeneratedToken(b), GeneratedToken(b)), None)
    assert (whole.accepted, whole.finish) == (2, Finish(FinishReason.STOP_TOKEN))
    session.commit(whole)


async def test_a_token_outside_the_grammar_is_a_fault() -> None:
    target = await request(constraint=constraint("regex", "a"))
    with pytest.raises(InvariantError):
        target.session.preview((GeneratedToken(encode("b")[0]),), None)


async def test_a_grammar_that_fails_ends_every_answer_of_it_with_the_same_refusal() -> None:
    """The library's lexer is one for all answers, and only one of them is told."""
    heavy = constraint("lark", 'start: T\nT: (/(?s:.{0,400})/ & ~(/(?s:.*)xyz(?s:.*)/)) "q"')
    target, mate = await request(constraint=heavy), await request(constraint=heavy)
    Feed(target).take(encode("axy"), checks=False)
    assert allowed(target) == []
    assert target.mask is not None
    assert mate.mask is not None
    with pytest.raises(RequestError) as caught:
        mate.session.preview((GeneratedToken(encode("b")[0]),), None)
    for failure in (target.mask.failure(), mate.mask.failure(), caught.value):
        assert isinstance(failure, RequestError)
        assert (failure.code, failure.param) == ("schema_too_complex", "response_format")
    await request(constraint=heavy)


async def test_any_grouping_of_tokens_shows_the_same() -> None:
    text = 'So it is.\n</think>\n\n{"a": -12}'
    token_ids = encode(text)
    rng = random.Random(5)
    shown = set()
    for _ in range(30):
        target = await request(constraint=SCHEMA, thinks=True)
        place, texts, finish = 0, {"reasoning": "", "content": ""}, None
        while place < len(token_ids):
            count = rng.randint(1, 5)
            tokens = [GeneratedToken(token) for token in token_ids[place : place + count]]
            preview = target.session.preview(tokens, None)
            target.session.commit(preview)
            for delta in preview.deltas:
                texts[delta.channel] += delta.text
            place, finish = place + preview.accepted, preview.finish
        shown.add((json.dumps(texts), finish))
    assert shown == {
        (
            json.dumps({"reasoning": "So it is.", "content": '{"a": -12}'}),
            Finish(FinishReason.STOP_TOKEN),
        )
    }


async def test_without_a_tokenizer_nothing_can_be_constrained() -> None:
    frontend = demo_frontend(tokenizer_json=None, chat_template=None)
    with pytest.raises(RequestError) as caught:
        await request(frontend, constraint=Constraint("json_object", "", "grammar"))
    assert (caught.value.code, caught.value.param) == ("tokenizer_unavailable", "grammar")
