"""Scores of the demo model on held-out text equal those of an independent implementation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from ninfer.convert.source import open_model
from ninfer.engine.score import CausalScorer
from ninfer.options import EngineOptions
from ninfer.program.loader import load_program
from tests.helpers.model_paths import DEMO_MODEL

DATA = Path(__file__).parents[1] / "data"
NUM_TOKENS = 1100
NLL_TOLERANCE = 1e-3
"""As for logits; the reference is rounded to four digits."""


@pytest.fixture(name="scorer")
def _scorer() -> CausalScorer:
    program, _ = load_program(open_model(DEMO_MODEL), EngineOptions(), lambda *_: None)
    return CausalScorer(program)


@pytest.fixture(name="token_ids")
def _token_ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = (DATA / "heldout.txt").read_text()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


async def test_token_scores_equal_the_reference(scorer: CausalScorer, token_ids: list[int]) -> None:
    reference = json.loads((DATA / "heldout_nll.json").read_text())
    window = reference["window"]
    assert len(token_ids) == reference["tokens"]
    result = await scorer.score(token_ids[:NUM_TOKENS], window=window, stride=reference["stride"])
    unscored = [index for index, nll in enumerate(result.token_nlls) if nll is None]
    assert unscored == [0, window]
    scores = [nll for nll in result.token_nlls if nll is not None]
    expected = [nll for nlls in reference["nll"][:2] for nll in nlls][: len(scores)]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=NLL_TOLERANCE)
    first_mean = np.mean(scores[: window - 1])
    assert first_mean == pytest.approx(reference["window_mean_nll"][0], abs=1e-5)
