"""A thousand random answers to random schemas: every one is valid JSON of its schema."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from tests.helpers.grammar_rig import schema_matcher, walk
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
