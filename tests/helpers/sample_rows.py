"""Random rows to sample: logits of several shapes and every kind of parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import SampleRow
from ninfer.ops.float_codecs import bf16_to_float, float_to_bf16


def random_logits(
    rng: np.random.Generator, size: int, *, is_rounded: bool = False
) -> NDArray[np.float32]:
    """Peaked, spread or flat; bf16 numbers, with their many ties, if `is_rounded`."""
    spread = float(rng.choice([0.01, 1.0, 3.0, 12.0]))
    logits = (rng.standard_normal(size) * spread + rng.normal() * 4).astype(np.float32)
    return bf16_to_float(float_to_bf16(logits)) if is_rounded else logits


def random_sample(rng: np.random.Generator, size: int, **fixed: Any) -> SampleRow:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    def some_ids(most: int) -> NDArray[np.int32]:
        count = int(rng.integers(0, min(most, size)))
        return np.sort(rng.choice(size, count, replace=False)).astype(np.int32)

    generated = some_ids(200)
    biased = some_ids(30).tolist()
    biases = tuple(zip(biased, rng.uniform(-9, 9, len(biased)).tolist(), strict=True))
    fields: dict[str, Any] = {
        "temperature": maybe(float(rng.choice([0.01, 0.3, 0.7, 1.0, 1.7])), 0.7),
        "top_k": int(maybe(rng.choice([1, 2, 20, 50, 1000, size - 1]), 0)),
        "top_p": float(maybe(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0)),
        "min_p": float(maybe(rng.choice([0.01, 0.05, 0.3, 1.0]), 0.0)),
        "presence_penalty": float(maybe(rng.uniform(-2, 2), 0.0)),
        "frequency_penalty": float(maybe(rng.uniform(-2, 2), 0.0)),
        "repetition_penalty": float(maybe(rng.uniform(0.5, 2), 1.0)),
        "logit_bias": maybe(biases, ()),
        "seed": int(rng.integers(0, 2**63)),
        **fixed,
    }  # fmt: skip
    return SampleRow(
        params=SamplingParams(**fields),
        position=int(rng.integers(0, 2**20)),
        generated_ids=generated,
        generated_counts=rng.integers(1, 9, generated.size).astype(np.int32),
        prompt_ids=some_ids(400),
        suppressed_ids=tuple(int(i) for i in some_ids(5)),
    )
