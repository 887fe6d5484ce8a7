"""Grammars over the demo model's tokens: what they accept, and random walks through them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ninfer.contract.chat import Constraint, ConstraintKind
from ninfer.contract.errors import RequestError
from ninfer.frontend.constraints.compiler import LIBRARY_LIMITS
from ninfer.frontend.constraints.grammar import Grammar, build_grammar
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.constraints.vocabulary import GrammarVocabulary
from ninfer.frontend.tokenizer import TextTokenizer
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, demo_tokenizer

PARAM = "response_format"


@cache
def tokenizer() -> TextTokenizer:
    return demo_tokenizer()


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(), DEMO_VOCAB_SIZE)


def constraint(kind: ConstraintKind, value: Any = "", *, is_strict: bool = True) -> Constraint:
    text = value if isinstance(value, str) else json.dumps(value)
    return Constraint(kind, text, PARAM, is_strict)


def matcher_of(grammar: Grammar) -> Matcher:
    built = LLMatcher(
        vocabulary().tokens(),
        grammar.text,
        log_level=0,
        limits=LIBRARY_LIMITS,
    )
    if built.is_error():
        raise grammar.error(PARAM, built.get_error())
    return Matcher(built, DEMO_VOCAB_SIZE)


def matcher(kind: ConstraintKind, value: Any = "", *, is_strict: bool = True) -> Matcher:
    return matcher_of(build_grammar(constraint(kind, value, is_strict=is_strict)))


def schema_matcher(schema: Any, *, is_strict: bool = True) -> Matcher:
    return matcher("json_schema", json.dumps(schema), is_strict=is_strict)


def accepts(start: Matcher, text: str) -> bool:
    """Whether `text` is a whole answer."""
    copy = start.copy()
    token_ids = vocabulary().encode(text)
    return copy.accepts(token_ids) and copy.consume(token_ids) and copy.is_accepting


def refusal(kind: ConstraintKind, value: Any, *, is_strict: bool = True) -> tuple[str, str | None]:
    """(code, param) of the error; AssertionError when there is none."""
    try:
        matcher(kind, value if isinstance(value, str) else json.dumps(value), is_strict=is_strict)
    except RequestError as error:
        return error.code, error.param
    raise AssertionError(f"{value} is taken")


def allowed_ids(words: NDArray[np.uint32]) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


@cache
def _closers() -> frozenset[int]:
    return frozenset(vocabulary().encode(text)[0] for text in '"]},:0')


@dataclass(slots=True)
class Walk:
    """A random answer: `is_whole` when the grammar may end there."""

    token_ids: list[int]
    is_whole: bool

    @property
    def text(self) -> str:
        return b"".join(map(tokenizer().token_bytes, self.token_ids)).decode()


def walk(
    start: Matcher,
    rng: random.Random,
    *,
    patience: int = 40,
    limit: int = 400,
    closing: str = "",
) -> Walk:
    """Draw among the allowed tokens; after `patience` of them as if in a hurry to end, with
    `closing` wherever it may come."""
    closing_ids = vocabulary().encode(closing) if closing else ()
    place, token_ids = start.copy(), list[int]()
    words = np.zeros(DEMO_VOCAB_SIZE // 32, np.uint32)
    while len(token_ids) < limit and not place.is_complete:
        is_late = len(token_ids) > patience
        if place.is_accepting and rng.random() < (0.9 if is_late else 0.2):
            break
        if is_late and closing_ids and place.accepts(closing_ids):
            place.consume(closing_ids)
            token_ids += closing_ids
            continue
        place.fill(words)
        allowed = allowed_ids(words)
        if not allowed.size and place.is_accepting:
            break
        token_id = _drawn(allowed, rng, is_late=is_late)
        if not place.consume([token_id]):
            raise AssertionError(f"the mask allowed token {token_id}, the matcher does not")
        token_ids.append(token_id)
    return Walk(token_ids, place.is_accepting)


def _drawn(allowed: NDArray[np.int64], rng: random.Random, *, is_late: bool) -> int:
    closers = [token_id for token_id in _closers() if token_id in allowed] if is_late else []
    if closers and rng.random() < 0.9:
        return rng.choice(closers)
    return int(allowed[rng.randrange(allowed.size)])
