"""What a guided session says of tokens ahead is what it says when they have come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ninfer.contract.chat import ToolRules
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.masks import TokenMask
from ninfer.contract.sampling import GeneratedToken
from tests.frontend.constraints.test_guided_session import SCHEMA, TOOL, encode, request
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, IM_END
from tests.helpers.grammar_rig import constraint

CALL = "<tool_call>\n<function=get>\n<parameter=n>\n4\n</parameter>\n</function>\n</tool_call>"
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "plain": ("Hello there, all is well.", False, {}),
    "budget": ("I think so. And more.", True, {"thinking_budget": 9}),
    "schema": ('{"a": 12}', False, {"constraint": SCHEMA}),
    "behind a thought": ('Yes.\n</think>\n\n{"a":1}', True, {"constraint": SCHEMA}),
    "regex": ("abc def", False, {"constraint": constraint("regex", "[a-z]+ [a-z]+")}),
    "calls": (f"Well.\n{CALL}\n{CALL}", False, {"tools": ToolRules(tools=(TOOL,))}),
}


def bits(mask: TokenMask | None) -> list[int] | None:
    if mask is None or not mask.is_active:
        return None
    words = np.full(-(-DEMO_VOCAB_SIZE // 32), 0x5A5A5A5A, np.uint32)
    mask.fill(words)
    return [int(word) for word in words]


def commit(target: GenerationRequest, token_id: int) -> bool:
    """False when the answer has ended."""
    preview = target.session.preview((GeneratedToken(token_id),), None)
    target.session.commit(preview)
    return preview.finish is None


@pytest.mark.parametrize("name", CASES)
async def test_masks_ahead_are_those_of_the_tokens_when_they_come(name: str) -> None:
    text, thinks, fields = CASES[name]
    target = await request(thinks=thinks, **fields)
    token_ids = encode(text)
    ahead: dict[int, list[list[int] | None]] = {}
    num_seen = 0
    for place, token_id in enumerate(token_ids):
        before = bits(target.mask)
        for index, mask in enumerate(target.session.masks_behind(token_ids[place : place + 8])):
            ahead.setdefault(place + index + 1, []).append(bits(mask))
        assert bits(target.mask) == before
        if not commit(target, token_id):
            break
        for found in ahead.pop(place + 1, []):
            assert found == bits(target.mask)
            num_seen += 1
    assert num_seen > 0


async def test_a_draft_ends_before_what_may_not_come() -> None:
    target = await request(constraint=constraint("regex", "[a-z]{1,9} [0-9]{4}"))
    good, bad = encode("ab "), encode("x")
    assert len(target.session.masks_behind([*good, *bad, *good])) <= len(good)
    assert len(target.session.masks_behind(bad)) == 1
    assert not target.session.masks_behind(encode("7"))


async def test_a_draft_ends_before_what_ends_the_answer() -> None:
    target = await request()
    text = encode("all is well")
    assert len(target.session.masks_behind([*text, IM_END, *text])) == len(text)
    bound = await request(constraint=constraint("choice", ["yes", "yesterday"]))
    assert len(bound.session.masks_behind([*encode("yes"), IM_END])) == len(encode("yes"))
    whole = encode("yesterday")
    assert len(bound.session.masks_behind(whole)) < len(whole)


async def test_a_draft_ends_where_something_is_forced() -> None:
    """Forced tokens are accepted without a draw; a draft must not draw them."""
    target = await request(thinks=True, thinking_budget=3)
    text = encode("one two three four five")
    assert len(target.session.masks_behind(text)) == 2
