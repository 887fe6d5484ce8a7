"""Where tokens stand in a choice's text, whatever they are made of, and what the lists name."""

from __future__ import annotations

import codecs
import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ninfer.contract.generation import FinishReason, OutputDelta
from ninfer.contract.sampling import GeneratedToken, PromptScores, TokenLogprobs
from ninfer.frontend.output_session import TextOutputSession
from ninfer.frontend.output_state import SessionRules
from ninfer.gateway.completion_logprobs import (
    EchoedPrompt,
    GeneratedLogprobs,
    LogprobLists,
    TokenNames,
    top_object,
)
from tests.helpers.fake_engine import FakeFrontend

LOGPROBS = TokenLogprobs(-1.0, ())


class PieceFrontend(FakeFrontend):
    """Token i stands for piece i."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__()
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def scores(first: int, count: int) -> PromptScores:
    return PromptScores(
        first, np.full(count, -1.0), np.empty((count, 0), np.int32), np.empty((count, 0))
    )


def places(pieces: list[bytes], hidden: set[int]) -> list[int]:
    """Characters that are complete before each token; hidden ones show none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_characters, result = 0, []
    for index, piece in enumerate(pieces):
        result.append(num_characters)
        if index not in hidden:
            num_characters += len(decoder.decode(piece))
    return result


def session_deltas(
    pieces: list[bytes], hidden: set[int], group_sizes: list[int]
) -> list[OutputDelta]:
    """What the product's own output session makes of the tokens, some of them at once."""
    rules = SessionRules(
        token_bytes=pieces.__getitem__, hidden_ids=frozenset(hidden), splits_reasoning=False
    )
    session, first = TextOutputSession(rules), 0
    deltas: list[OutputDelta] = []
    while first < len(pieces):
        size = group_sizes[first % len(group_sizes)]
        tokens = [GeneratedToken(i, LOGPROBS) for i in range(first, min(first + size, len(pieces)))]
        first += size
        limit = FinishReason.OUTPUT_LIMIT if first >= len(pieces) else None
        preview = session.preview(tokens, limit)
        session.commit(preview)
        deltas += preview.deltas
    return deltas


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    """Into stretches, some perhaps empty."""
    places = sorted(border % (len(data) + 1) for border in borders)
    return [data[a:b] for a, b in itertools.pairwise([0, *places, len(data)])]


texts = st.one_of(
    st.text(alphabet="aé…😀 \n", max_size=12).map(str.encode), st.binary(max_size=12)
).filter(lambda data: b"<" not in data)


@settings(max_examples=100)
@given(
    data=texts,
    borders=st.lists(st.integers(0, 40), max_size=8),
    hidden=st.sets(st.integers(0, 8), max_size=3),
    group_sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@example(data="é".encode(), borders=[1], hidden={1}, group_sizes=[1])
@example(data=b"\xc3", borders=[], hidden=set(), group_sizes=[1])
def test_generated_tokens_stand_where_their_text_begins(
    data: bytes, borders: list[int], hidden: set[int], group_sizes: list[int]
) -> None:
    pieces = cut(data, borders)
    hidden = {index for index in hidden if index < len(pieces)}
    for index in sorted(hidden, reverse=True):
        pieces.insert(index, b"<|hidden|>")
    hidden = {index for index, piece in enumerate(pieces) if piece == b"<|hidden|>"}
    frontend = PieceFrontend(pieces)
    record = GeneratedLogprobs(TokenNames(frontend, by_id=True))
    lists = LogprobLists()
    for delta in session_deltas(pieces, hidden, group_sizes):
        lists.extend(record.read(delta.text, delta.tokens))
    assert lists.tokens == [f"token_id:{index}" for index in range(len(pieces))]
    assert lists.text_offset == places(pieces, hidden)


@given(data=texts, borders=st.lists(st.integers(0, 40), max_size=8), chunk=st.integers(1, 5))
def test_echoed_tokens_and_their_text(data: bytes, borders: list[int], chunk: int) -> None:
    pieces = cut(data, borders)
    frontend = PieceFrontend(pieces)
    names = TokenNames(frontend, by_id=False)
    prompt = EchoedPrompt(list(range(len(pieces))), names)
    text, lists = prompt.beginning()
    for first in range(1, len(pieces), chunk):
        more, part = prompt.scored(scores(first, min(chunk, len(pieces) - first)))
        text += more
        lists.extend(part)
    assert text == data.decode("utf-8", "replace")
    assert lists.text_offset == places(pieces, set())
    assert lists.token_logprobs == [None] + [-1.0] * (len(pieces) - 1)
    assert lists.tokens == [names[index] for index in range(len(pieces))]


def test_places_behind_an_echo_count_its_characters() -> None:
    lists, more = LogprobLists(), LogprobLists()
    lists.add("a", None, None, 0)
    more.add("b", -1.0, {"b": -1.0}, 0)
    lists.extend(more, 7)
    assert lists.as_json() == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"b": -1.0}],
        "text_offset": [0, 7],
    }


def test_tokens_of_one_name_share_an_entry() -> None:
    frontend = PieceFrontend([b"x", b"x", b"y", b"\xff", b"bytes:\\xff"])
    names = TokenNames(frontend, by_id=False)
    assert top_object(names, [(0, -0.1), (2, -2.0)], 1, -5.0) == {"x": -0.1, "y": -2.0}
    assert top_object(names, [(2, -0.1), (0, -2.0)], 1, -1.0) == {"y": -0.1, "x": -1.0}
    assert top_object(names, [], 1, -float("inf")) == {"x": -9999.0}
    assert names[3] == "bytes:\\xff"
    assert top_object(names, [(3, -0.1)], 2, -3.0) == {"bytes:\\xff": -0.1, "y": -3.0}
