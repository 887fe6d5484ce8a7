"""What each storage format costs on the demo model's held-out text, on the device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from ninfer.convert.source import open_model
from ninfer.engine.score import CausalScorer, ScoreResult
from ninfer.options import EngineOptions
from ninfer.program.loader import load_program
from tests.helpers.cuda_models import require_device
from tests.helpers.distributions import divergences
from tests.helpers.model_paths import DEMO_MODEL

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parents[1] / "data"
NUM_TOKENS = 1100
WINDOW = 1024
OPTIONS = EngineOptions(
    executor="cuda",
    weights="bf16",
    max_concurrency=2,
    max_context=1024,
    memory_budget=4 << 30,
    host_cache_bytes=0,
)
MOST = {
    ("fp8", "bf16"): (1.5e-3, 1.01),
    ("nvfp4", "bf16"): (1.2e-2, 1.04),
    ("bf16", "fp8"): (1e-2, 1.02),
    ("bf16", "int8"): (3e-3, 1.01),
}
"""(weights, KV): most mean divergence from bf16, most perplexity as a multiple of its own. The
quantised weights alone, computed in float32, give 3.2e-4 and 5.0e-3 nats."""


async def score(options: EngineOptions) -> ScoreResult:
    require_device()
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = (DATA / "heldout.txt").read_text()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:NUM_TOKENS]
    program, _ = load_program(open_model(DEMO_MODEL), options, lambda *_: None)
    try:
        return await CausalScorer(program).score(
            token_ids, window=WINDOW, stride=WINDOW, with_logits=True
        )
    finally:
        program.close()


async def test_bf16_scores_are_those_of_float32() -> None:
    reference = json.loads((DATA / "heldout_nll.json").read_text())
    assert reference["window"] == WINDOW
    assert reference["stride"] == WINDOW
    result = await score(OPTIONS)
    scores = [nll for nll in result.token_nlls[:WINDOW] if nll is not None]
    want = reference["nll"][0]
    print(f"bf16: mean NLL {np.mean(scores):.5f}, float32 {np.mean(want):.5f}")
    assert np.mean(scores) == pytest.approx(np.mean(want), abs=5e-3)
    assert np.abs(np.array(scores) - np.array(want)).mean() < 2e-2


@pytest.mark.parametrize(("weights", "kv_dtype"), MOST)
async def test_a_format_costs_no_more_than_expected(weights: str, kv_dtype: str) -> None:
    wide = await score(OPTIONS)
    narrow = await score(dataclasses.replace(OPTIONS, weights=weights, kv_dtype=kv_dtype))
    assert wide.logits is not None
    assert narrow.logits is not None
    divergence = float(divergences(wide.logits, narrow.logits).mean())
    assert wide.perplexity is not None
    assert narrow.perplexity is not None
    ratio = narrow.perplexity / wide.perplexity
    print(
        f"weights {weights}, KV {kv_dtype}: divergence {divergence:.2e},"
        f" perplexity {narrow.perplexity:.4f} against {wide.perplexity:.4f}"
    )
    most_divergence, most_ratio = MOST[weights, kv_dtype]
    assert divergence <= most_divergence
    assert ratio <= most_ratio
