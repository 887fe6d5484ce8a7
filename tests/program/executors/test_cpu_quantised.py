"""Quantised checkpoints on the CPU executor: the logits of the numbers they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array
from ninfer.convert.source import open_model
from tests.e2e.test_goldens import load_prompts
from tests.helpers import executor_driver as driver
from tests.helpers.model_paths import golden_model
from tests.helpers.quantised_checkpoints import LAYOUTS, decode_checkpoint, quantise_checkpoint

CASES = ("qwen3-dense", "qwen3-moe", "qwen3_5-dense", "qwen3_5-moe")
ROUNDING = 2e-5
"""NVFP4's two scales may be multiplied in two orders: a last bit of a weight. FP8's cannot."""


async def logits_of(folder: Path, prompt: list[int]) -> Float32Array:
    executor = driver.build_executor(open_model(folder))
    try:
        return await driver.score(executor, driver.sequence(), prompt, (1000,))
    finally:
        executor.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_logits_are_those_of_the_decoded_numbers(
    tmp_path: Path, case: str, layout: str
) -> None:
    source, prompt = golden_model(case), next(iter(load_prompts(case).values())).prompt
    want = await logits_of(decode_checkpoint(source, tmp_path / "f", layout), prompt)
    got = await logits_of(quantise_checkpoint(source, tmp_path / "q", layout), prompt)
    plain = await logits_of(source, prompt)
    is_exact = "nvfp4" not in layout and "mixed" not in layout
    np.testing.assert_allclose(got, want, rtol=0, atol=0 if is_exact else ROUNDING)
    assert np.abs(got - plain).max() > 1e-3
