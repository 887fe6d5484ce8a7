"""Faults of structured output that users of other servers reported, and their kin."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from ninfer.contract.chat import ToolSpec
from ninfer.frontend.constraints.call_grammar import CallGrammars
from ninfer.frontend.constraints.grammar import build_grammar
from ninfer.frontend.constraints.matcher import Matcher
from ninfer.frontend.constraints.vocabulary import GrammarVocabulary
from ninfer.frontend.tokenizer import TextTokenizer
from ninfer.frontend.tool_calls.call_format import CallFormat, JsonCallFormat, XmlCallFormat
from tests.helpers.demo_frontend import DEMO_VOCAB_SIZE, RESOURCES
from tests.helpers.grammar_rig import (
    accepts,
    allowed_ids,
    constraint,
    matcher_of,
    schema_matcher,
    vocabulary,
    walk,
)

SCORE = {
    "type": "object",
    "properties": {
        "score": {"type": "integer", "multipleOf": 5},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 2}},
    },
    "required": ["score", "tags"],
    "additionalProperties": False,
    "patternProperties": {"^score$": {"type": "integer"}},
}
PAGE = {"type": "object", "properties": {"limit": {"type": "number"}, "page": {"type": "number"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        pytest.param(
            SCORE,
            ['{"score":15,"tags":["ab"]}', '{"score":0,"tags":[]}'],
            ['{"score":3,"tags":[]}', '{"tags":[],"score":5}'],
            id="guidance-ai/llguidance#265",
        ),
        pytest.param(
            PAGE,
            ['{"limit":5,"page":0}', '{"page":0}', "{}"],
            ['{"page":0,"limit":5}', "{\"page':0}"],
            id="guidance-ai/llguidance#187",
        ),
        pytest.param(
            {"type": "string", "maxLength": 8},
            ['"\\n\\"\\\\\\t"', '"\\u00e9/"', '"\\ud83d\\ude00"'],
            ['"\\n\\n\\n\\n\\n\\n\\n\\n\\n"'],
            id="mlc-ai/xgrammar#800",
        ),
        pytest.param(
            {"type": "string", "pattern": "\\S"},
            ['"a"', '" a "', '"\\n\\"x"'],
            ['""', '"  "'],
            id="ggml-org/llama.cpp#26930",
        ),
        pytest.param(
            {"type": "string", "pattern": "^(https:\\/\\/)?(www\\.)?x\\.com\\/[a-z_\\-]+$"},
            ['"https://www.x.com/a-b"', '"x.com/a"'],
            ['"https:\\\\/x.com/a"', '"x.com/"'],
            id="ggml-org/llama.cpp#27397",
        ),
        pytest.param(
            {"type": "string", "pattern": "^\\d{1,4} \\w+ [^\\s]+$"},
            ['"12 ab !"'],
            ['"٣ ab !"', '"12 é !"', '"12345 a b"'],
            id="datalab-to/surya#539",
        ),
        pytest.param(
            {"type": "string", "pattern": "^(?<org>[^,. ]+)\\.(?<id>[^,. ]+)$"},
            ['"a.b"'],
            ['"a."'],
            id="java-json-tools/json-schema-validator#413",
        ),
        pytest.param(
            {"type": "object", "properties": {}, "additionalProperties": False},
            ["{}"],
            ['{"a":1}'],
            id="ggml-org/llama.cpp#25923",
        ),
        pytest.param(
            {"type": "string", "maxLength": 65536},
            ['""', f'"{"a" * 3000}"'],
            ["1"],
            id="ggml-org/llama.cpp#25923-long",
        ),
        pytest.param(
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 10_000},
            ["[1,2]", f"[{','.join('1' * 500)}]"],
            ["[1]", "[]"],
            id="vllm-project/vllm#16880",
        ),
        pytest.param(
            {"type": "integer", "minimum": 1, "maximum": 5, "exclusiveMaximum": 9},
            ["1", "5"],
            ["0", "6", "1.0"],
            id="vllm-project/vllm#12028",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", 'q"', "é"]}}},
            ['{"a":"q\\""}', '{"a":"é"}'],
            ['{"a":"q"}'],
            id="quoted values",
        ),
        pytest.param(
            {"type": ["object", "null"], "properties": {"a": {"type": ["integer", "null"]}}},
            ["null", '{"a":null}'],
            ['{"a":"x"}', "1"],
            id="null beside objects",
        ),
        pytest.param(
            {"enum": ["a", "ab", "abc", 1, 12]},
            ['"a"', '"ab"', "1", "12"],
            ['"abcd"', "123"],
            id="values that begin alike",
        ),
    ],
)
def test_schemas(schema: Any, good: list[str], bad: list[str]) -> None:
    start = schema_matcher(schema)
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []


@pytest.mark.parametrize("form", [JsonCallFormat(), XmlCallFormat()], ids=["json", "xml"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_one_odd_schema_of_a_tool_does_not_cost_the_request(
    form: CallFormat, is_strict: bool
) -> None:
    patterns = [
        "\\S",
        "^session:.+",
        "^(https:\\/\\/)?x\\.com\\/[\\w\\-]+$",
        "^[\\s\\S]*\\S[\\s\\S]*$",
    ]
    tools = [
        ToolSpec(
            f"tool{index}",
            {"type": "object", "properties": {"v": {"type": "string", "pattern": pattern}}},
            is_strict=is_strict,
        )
        for index, pattern in enumerate(patterns)
    ]
    start = matcher_of(CallGrammars(form, vocabulary()).calls(tools, "tools", several=True))
    for seed in range(8):
        assert walk(start, random.Random(seed), limit=30).token_ids


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_never_stalls_in_white_space(seed: int) -> None:
    """However fond a model is of blanks, something else comes soon."""
    place, rng = schema_matcher(SCORE).copy(), random.Random(seed)
    blanks = {token_id for text in (" ", "\n", "  ", "\n\n") for token_id in _encoded(text)}
    run = 0
    for _ in range(120):
        if place.is_complete:
            break
        allowed = _allowed(place)
        fond = [token_id for token_id in allowed if token_id in blanks]
        run = run + 1 if fond else 0
        assert run < 40
        assert place.consume([rng.choice(fond or allowed)])


def _encoded(text: str) -> tuple[int, ...]:
    return vocabulary().encode(text)


def _allowed(place: Matcher) -> list[int]:
    words = np.zeros(-(-vocabulary().vocab_size // 32), np.uint32)
    place.fill(words)
    return [int(token_id) for token_id in allowed_ids(words)]


@pytest.mark.parametrize("num_extra", [1, 5, 32])
def test_masks_end_where_the_vocabulary_does(num_extra: int) -> None:
    """vllm-project/vllm#51467: one that is no multiple of 32, and more ids than tokens."""
    size = DEMO_VOCAB_SIZE + num_extra
    padded = GrammarVocabulary(TextTokenizer(RESOURCES.tokenizer_json or b"", size), size)
    grammar = build_grammar(constraint("json_schema", {"type": "string"}))
    start = Matcher(LLMatcher(padded.tokens(), grammar.text, log_level=0), size)
    words = np.full(-(-size // 32), 0xFFFFFFFF, np.uint32)
    start.fill(words)
    assert allowed_ids(words).size > 0
    assert allowed_ids(words).max() < DEMO_VOCAB_SIZE


def test_keys_come_in_the_order_in_which_they_are_declared() -> None:
    """ollama/ollama#8003: reasons before what follows from them."""
    names = ["zeta", "reasoning", "alpha", "answer"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": sorted(names),
        "additionalProperties": False,
    }
    answer = walk(schema_matcher(schema), random.Random(0), patience=5)
    assert answer.is_whole
    assert sorted(names, key=answer.text.find) == names
