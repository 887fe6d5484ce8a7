"""A thousand random answers to random schemas: every one is valid JSON of its schema."""

from __future__ import annotations

import contextlib
import json
import random

import jsonschema
import pytest

from ninfer.contract.errors import RequestError
from tests.helpers.grammar_rig import schema_matcher, walk
from tests.helpers.mixed_schemas import mixed_root
from tests.helpers.random_schemas import random_root

NUM_SCHEMAS = 250
ANSWERS_EACH = 4

pytestmark = pytest.mark.no_cover


@pytest.mark.parametrize("part", range(5))
def test_random_answers_are_valid(part: int) -> None:
    num_whole = 0
    for seed in range(part, NUM_SCHEMAS, 5):
        rng = random.Random(seed)
        schema = random_root(rng)
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        start = schema_matcher(schema)
        for _ in range(ANSWERS_EACH):
            answer = walk(start, rng, patience=25)
            if answer.is_whole:
                num_whole += 1
                validator.validate(json.loads(answer.text))
    assert num_whole >= 0.95 * (NUM_SCHEMAS // 5 * ANSWERS_EACH)


@pytest.mark.parametrize("part", range(4))
def test_keywords_side_by_side_are_enforced_or_refused(part: int) -> None:
    num_taken = 0
    for seed in range(part, 600, 4):
        rng = random.Random(seed)
        schema = mixed_root(rng)
        try:
            start = schema_matcher(schema)
        except RequestError:
            continue
        num_taken += 1
        answer = walk(start, rng, patience=15, limit=150)
        # A schema that refers to itself in place sends the validator round for ever.
        with contextlib.suppress(RecursionError):
            if answer.is_whole:
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    assert num_taken > 40
