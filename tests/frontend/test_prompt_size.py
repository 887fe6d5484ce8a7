"""Too long a text is seen early, and no text that fits is ever refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.contract.errors import RequestError
from ninfer.frontend.control_text import GuardedText
from ninfer.frontend.prompt_size import CUT_TOKENS, check_num_messages, encode_within
from ninfer.frontend.tokenizer import TextTokenizer
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, demo_tokenizer
from tests.helpers.model_paths import DEMO_MODEL

TOKENIZER = demo_tokenizer()
GUARD = "\U000f0000"


def changed_tokenizer(change: Callable[[dict[str, Any]], object]) -> TextTokenizer:
    document = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    change(document)
    return TextTokenizer(json.dumps(document).encode(), DEMO_VOCAB_SIZE)


PLAIN = changed_tokenizer(lambda document: document.update(normalizer=None))
COMPATIBLE = changed_tokenizer(lambda document: document.update(normalizer={"type": "NFKC"}))


def _bytes_alone(document: dict[str, Any]) -> None:
    vocabulary = [text for text in document["model"]["vocab"] if len(text) == 1]
    document["model"] = {
        **document["model"],
        "vocab": {text: token_id for token_id, text in enumerate(vocabulary)},
        "merges": [],
    }
    document["added_tokens"] = []


BYTES = changed_tokenizer(_bytes_alone)
"""A token is a byte of the normalised text, so that the bound is as tight as it can be."""
PIECES = st.sampled_from(
    [
        *TOKENIZER.control_texts,
        *("hello", " world", " ", "    ", "\n", "7", "-", "\u732b", "\U0001f30d"),
        *("e\u0301", "\u1fbe\u0308\u0301", "\u1112\u1161\u11ab", "\u212a", "\U0001d433"),
    ]
)


@given(st.lists(st.tuples(PIECES, st.integers(1, 60)), max_size=6))
@example([("\u1fbe\u0308\u0301", 500)])
@example([("\U0001d433", 500)])
@example([(" ", 5000)])
def test_no_text_has_fewer_tokens_than_its_length_says(pieces: list[tuple[str, int]]) -> None:
    text = "".join(piece * count for piece, count in pieces)
    for tokenizer in (TOKENIZER, PLAIN, COMPATIBLE, BYTES):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_length_is_that_of_utf_8_and_a_normaliser_counts_only_where_there_is_one() -> None:
    longest = max(len(PLAIN.token_bytes(token_id)) for token_id in range(DEMO_VOCAB_SIZE))
    assert PLAIN.least_tokens("\u732b" * 4000) == -(-12_000 // longest)
    assert TOKENIZER.least_tokens("\u732b" * 4000) == -(-3000 // longest)
    assert TOKENIZER.least_tokens("a" * 4000) == PLAIN.least_tokens("a" * 4000)
    assert PLAIN.least_tokens("a" * 4000) == -(-4000 // longest)


def _swallow_blanks(document: dict[str, Any]) -> None:
    document["added_tokens"][0]["lstrip"] = True


def _drop_blanks(document: dict[str, Any]) -> None:
    split = document["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"], split["behavior"] = {"Regex": "\\s+"}, "Removed"


def _drop_a_byte(document: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    vocabulary["<unused>"] = vocabulary.pop("\u0100")


def _strip(document: dict[str, Any]) -> None:
    document["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}


@pytest.mark.parametrize("change", [_swallow_blanks, _drop_blanks, _drop_a_byte, _strip])
def test_tokenizer_that_may_drop_text_is_asked_for_all_of_it(
    change: Callable[[dict[str, Any]], object],
) -> None:
    tokenizer = changed_tokenizer(change)
    assert not tokenizer.keeps_text
    assert tokenizer.least_tokens("a" * 100_000) == 0
    with pytest.raises(RequestError, match=r"has \d+ prompt tokens"):
        encode_within(GuardedText("ab " * 100_000), tokenizer, 10, "prompt")


def test_a_beginning_has_hardly_more_tokens_than_the_whole() -> None:
    source = random.Random(5)
    pieces = [
        *TOKENIZER.control_texts,
        "a",
        "aaaa",
        " ",
        "\n",
        "e\u0301",
        "1",
        "-",
        " world",
        "x" * 40,
    ]
    for _ in range(300):
        few = source.sample(pieces, source.randint(1, 4))
        text = "".join(source.choice(few) for _ in range(source.randint(1, 400)))
        whole = len(TOKENIZER.encode(text))
        for _ in range(4):
            beginning = text[: source.randrange(len(text) + 1)]
            assert len(TOKENIZER.encode(beginning)) <= whole + CUT_TOKENS // 16


class CountingTokenizer(TextTokenizer):
    """Remembers how long the texts were that it was given."""

    def __init__(self) -> None:
        super().__init__((DEMO_MODEL / "tokenizer.json").read_bytes(), DEMO_VOCAB_SIZE)
        self.lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text)

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode_guarded(text, guard)


@pytest.mark.parametrize("guard", [None, GUARD])
def test_only_the_beginning_of_a_far_too_long_text_is_tokenised(guard: str | None) -> None:
    tokenizer = CountingTokenizer()
    # By its length alone it could fit: spaces make long tokens.
    text = GuardedText("one two three " * 200_000 + " " * 500_000, guard)
    max_tokens = tokenizer.least_tokens(text.text) + 1
    with pytest.raises(RequestError, match=r"at least \d+ prompt tokens") as caught:
        encode_within(text, tokenizer, max_tokens, "text")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "text")
    assert sum(tokenizer.lengths) < len(text.text)


def test_length_alone_refuses_without_tokenising() -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(RequestError, match="at least 625000 prompt tokens"):
        encode_within(GuardedText("a" * 10_000_000), tokenizer, 2048, "text")
    assert tokenizer.lengths == []


@pytest.mark.parametrize("max_tokens", [None, 150_000])
def test_long_text_that_fits_is_tokenised_as_ever(max_tokens: int | None) -> None:
    text = "one " * 40_000 + " " * 200_000
    ids = encode_within(GuardedText(text), TOKENIZER, max_tokens, "text")
    assert ids == TOKENIZER.encode(text)
    exactly = encode_within(GuardedText(text), TOKENIZER, len(ids), "text")
    assert exactly == ids
    with pytest.raises(RequestError, match=f"{len(ids)} tokens > {len(ids) - 1} maximum"):
        encode_within(GuardedText(text), TOKENIZER, len(ids) - 1, "text")


def test_more_messages_than_tokens_cannot_fit() -> None:
    check_num_messages(10, 10, "messages")
    check_num_messages(10, None, "messages")
    with pytest.raises(RequestError, match="at least 11 prompt tokens") as caught:
        check_num_messages(11, 10, "input")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
