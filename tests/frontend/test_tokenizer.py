"""Ids and bytes of the demo model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ninfer.contract.errors import ModelFileError, RequestError
from ninfer.frontend.control_text import ControlMarks
from ninfer.frontend.tokenizer import TextTokenizer, UnsplittableText, replace_surrogates
from tests.helpers.demo_frontend import (
    DEMO_VOCAB_SIZE,
    IM_END,
    THINK,
    demo_frontend,
    demo_tokenizer,
)
from tests.helpers.model_paths import DEMO_MODEL

TOKENIZER = demo_tokenizer()
MARKS = ControlMarks(TOKENIZER.control_texts)
GUARD = "\U000f0000"


def changed_tokenizer(**changes: Any) -> bytes:
    document = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    return json.dumps({**document, **changes}).encode()


@given(st.text(max_size=40))
@example("naïve 🌍 \x00\u3000\r\n")
def test_token_bytes_rebuild_the_text(text: str) -> None:
    normal = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).normalizer
    data = b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text)))
    assert data.decode() == normal.normalize_str(text)


def test_every_single_byte_has_a_token() -> None:
    singles = {TOKENIZER.token_bytes(token_id) for token_id in range(DEMO_VOCAB_SIZE)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def test_added_tokens_are_parsed_and_spell_themselves() -> None:
    assert TOKENIZER.encode("<think><|im_end|>") == [THINK, IM_END]
    assert TOKENIZER.token_bytes(IM_END) == b"<|im_end|>"
    assert TOKENIZER.added_id("<think>") == THINK
    assert TOKENIZER.added_id("think") is None
    assert len(TOKENIZER.control_texts) == 13


@pytest.mark.parametrize("token_id", [-1, DEMO_VOCAB_SIZE, 10**9])
def test_unknown_ids_have_no_bytes(token_id: int) -> None:
    assert TOKENIZER.token_bytes(token_id) == b""


PIECES = st.sampled_from([*TOKENIZER.control_texts, "hello", " ", "\n", "é", "<", "|>", "im_end"])


@given(st.lists(st.tuples(PIECES, st.booleans()), max_size=8))
def test_guarded_marks_are_plain_and_the_rest_as_ever(pieces: list[tuple[str, bool]]) -> None:
    text = "".join(
        MARKS.break_up(piece, GUARD) if is_guarded else piece for piece, is_guarded in pieces
    )
    ids = TOKENIZER.encode_guarded(text, GUARD)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == text.replace(GUARD, "")
    real = [token_id for token_id in TOKENIZER.encode(text) if token_id >= 4083]
    assert [token_id for token_id in ids if token_id >= 4083] == real
    if GUARD not in text:
        assert ids == TOKENIZER.encode(text)


def test_text_next_to_a_guarded_stretch_is_tokenised_as_without_it() -> None:
    head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode_guarded(f"{head}<{GUARD}think>{tail}", GUARD)
    head_ids, tail_ids = TOKENIZER.encode(head), TOKENIZER.encode(tail)
    assert ids[0] == head_ids[0]
    assert ids[-len(tail_ids) :] == tail_ids


def test_lone_surrogates_become_replacement_characters() -> None:
    assert replace_surrogates("cut \ud83d") == "cut \ufffd"
    assert replace_surrogates("🌍 é") == "🌍 é"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nope", "tokenizer.json: expected"),
        (b"{}", "tokenizer.json: "),
        (b"\xff\xfe", "tokenizer.json: not UTF-8"),
        (changed_tokenizer()[:5000], "tokenizer.json: "),
        (changed_tokenizer(decoder=None, pre_tokenizer=None), "decoder: only byte-level"),
    ],
)
def test_bad_tokenizer_is_a_model_file_error(data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        TextTokenizer(data, DEMO_VOCAB_SIZE)


def test_tokenizer_larger_than_the_model_is_refused() -> None:
    data = (DEMO_MODEL / "tokenizer.json").read_bytes()
    with pytest.raises(ModelFileError, match=r"'</think>' has id 4095, but .* vocab_size is 4095"):
        TextTokenizer(data, DEMO_VOCAB_SIZE - 1)


def test_dropout_of_the_file_is_not_applied() -> None:
    model = json.loads(changed_tokenizer())["model"]
    data = changed_tokenizer(model={**model, "dropout": 0.9})
    tokenizer = TextTokenizer(data, DEMO_VOCAB_SIZE)
    text = "Once upon a time there was a little penguin."
    for _ in range(20):
        assert tokenizer.encode(text) == TOKENIZER.encode(text)
        assert tokenizer.encode_guarded(text + GUARD, GUARD) == TOKENIZER.encode(text)


def test_truncation_of_the_file_is_not_applied() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = TextTokenizer(changed_tokenizer(truncation=truncation), DEMO_VOCAB_SIZE)
    assert len(tokenizer.encode("one two three four five")) > 2


async def test_a_text_the_library_gives_up_on_is_a_request_error() -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    data = changed_tokenizer(pre_tokenizer={**pattern, "invert": False})
    text = "a" * 40 + "!"
    tokenizer = TextTokenizer(data, DEMO_VOCAB_SIZE)
    with pytest.raises(UnsplittableText):
        tokenizer.encode(text)
    with pytest.raises(UnsplittableText):
        tokenizer.encode_guarded(text + "\ue000", "\ue000")
    frontend = demo_frontend(tokenizer_json=data)
    with pytest.raises(RequestError) as caught:
        await frontend.prepare_text(text, "text")
    assert (caught.value.code, caught.value.param) == ("invalid_prompt", "text")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": "WordLevel", "unk_token": "a"}, "model.type"),
        ({"vocab": {"a": 0, "b": 1}, "merges": []}, "model.vocab"),
        ({"continuing_subword_prefix": "##"}, None),
    ],
)
def test_a_model_that_cannot_spell_text_is_refused(
    change: dict[str, Any], field: str | None
) -> None:
    model = json.loads(changed_tokenizer())["model"]
    data = changed_tokenizer(model={**model, **change})
    with pytest.raises(ModelFileError) as caught:
        TextTokenizer(data, DEMO_VOCAB_SIZE, path=Path("m/tokenizer.json"))
    assert (caught.value.path, caught.value.field) == (Path("m/tokenizer.json"), field)
