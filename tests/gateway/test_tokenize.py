"""/tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fake_engine import CARD, SPECIAL_ID, bad_prompt
from tests.helpers.gateway_rig import MESSAGES, PATIENT_LIMITS, Rig, running_gateway

HEAD = {"max_model_len": CARD.max_context}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hi"},
        {"content": "hi"},
        {"prompt": "hi", "add_special_tokens": True, "model": "any", "with_pieces": False},
        {"content": "hi", "add_special": True, "parse_special": None},
    ],
)
async def test_both_forms_have_one_answer(rig: Rig, fields: dict[str, Any]) -> None:
    answer = await rig.post("/tokenize", fields)
    assert answer.json() == {"tokens": [104, 105], "count": 2, **HEAD}
    assert rig.engine.handles == []


async def test_special_tokens_are_parsed_unless_they_are_to_be_text(rig: Rig) -> None:
    parsed = await rig.post("/tokenize", {"content": "a<s>b"})
    assert parsed.json()["tokens"] == [97, SPECIAL_ID, 98]
    plain = await rig.post("/v1/tokenize", {"content": "a<s>b", "parse_special": False})
    assert plain.json()["tokens"] == list(b"a<s>b")


async def test_texts_and_pieces(rig: Rig) -> None:
    answer = await rig.post(
        "/tokenize", {"prompt": "aé<s>", "return_token_strs": True, "with_pieces": True}
    )
    assert answer.json() == {
        "tokens": [
            {"id": 97, "piece": "a"},
            {"id": 195, "piece": [195]},
            {"id": 169, "piece": [169]},
            {"id": SPECIAL_ID, "piece": "<s>"},
        ],
        "token_strs": ["a", "\ufffd", "\ufffd", "<s>"],
        "count": 4,
        **HEAD,
    }


async def test_conversations_are_tokenised_as_chat_would(rig: Rig) -> None:
    fields = {"messages": [*MESSAGES, {"role": "assistant", "content": "ho"}]}
    answer = await rig.post("/tokenize", {**fields, "continue_final_message": True})
    await rig.post("/v1/chat/completions", {**fields, "continue_final_message": True})
    tokenised, served = rig.frontend.chats
    assert tokenised == served
    prompt = rig.engine.handles[0].request.prompt
    assert answer.json()["tokens"] == prompt.token_ids.tolist()
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    await rig.post("/tokenize", {"messages": MESSAGES, **kwargs})
    assert rig.frontend.chats[-1].template_kwargs == {"enable_thinking": False}
    assert not rig.frontend.chats[-1].add_generation_prompt


@pytest.mark.parametrize("name", ["prompt", "content", "messages"])
async def test_texts_may_be_longer_than_the_context(rig: Rig, name: str) -> None:
    text = "x" * 1000
    value: Any = [{"role": "user", "content": text}] if name == "messages" else text
    answer = await rig.post("/tokenize", {name: value})
    assert answer.json()["count"] == 1000 + (name == "messages")


async def test_long_lists_come_whole(rig: Rig) -> None:
    text = "é" * 20_000
    tokens = (await rig.post("/tokenize", {"prompt": text})).json()["tokens"]
    assert len(tokens) == 40_000
    assert (await rig.post("/detokenize", {"tokens": tokens})).json()["content"] == text


async def test_nothing_has_no_tokens(rig: Rig) -> None:
    assert (await rig.post("/tokenize", {"prompt": ""})).json()["tokens"] == []
    answer = await rig.post("/detokenize", {"tokens": []})
    assert answer.json() == {"prompt": "", "content": ""}


async def test_detokenize(rig: Rig) -> None:
    answer = await rig.post("/detokenize", {"tokens": [104, 195, 169, SPECIAL_ID, 195, 299]})
    text = "hé<s>\ufffd"
    assert answer.json() == {"prompt": text, "content": text}


@given(text=st.text(max_size=30).filter(lambda text: "<s>" not in text))
async def test_what_was_tokenised_comes_back(text: str) -> None:
    async with running_gateway(limits=PATIENT_LIMITS) as rig:
        tokens = (await rig.post("/tokenize", {"prompt": text})).json()["tokens"]
        assert (await rig.post("/detokenize", {"tokens": tokens})).json()["content"] == text


async def test_apply_template(rig: Rig) -> None:
    answer = await rig.post("/apply-template", {"messages": MESSAGES})
    assert answer.json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/tokenize", {}, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
        ("/tokenize", {"content": ["a"]}, "invalid_type", "content"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "invalid_value", "content"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_value", "prompt"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/tokenize", {"prompt": "a", "with_pieces": 1}, "invalid_type", "with_pieces"),
        ("/tokenize", {"prompt": "a", "add_special": "x"}, "invalid_type", "add_special"),
        ("/tokenize", {"content": "a", "parse_special": 0}, "invalid_type", "parse_special"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
        ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "invalid_type", "tokens[0]"),
        ("/apply-template", {}, "missing_required_parameter", "messages"),
    ],
)
async def test_refusals_name_the_field(
    rig: Rig, path: str, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = await rig.post(path, fields)
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == (code, param)


async def test_errors_of_the_template_are_the_clients(rig: Rig) -> None:
    rig.frontend.error = bad_prompt()
    answer = await rig.post("/tokenize", {"messages": MESSAGES})
    assert (answer.status, answer.error["code"]) == (400, "invalid_template")
