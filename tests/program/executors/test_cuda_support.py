"""Models that the CUDA executor's kernels do not cover are named with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ninfer.contract.model import ModelConfig, MoeConfig
from ninfer.models.synthetic import SYNTHETIC_MODELS
from ninfer.program.executors.cuda_support import unsupported_reason

MOE = SYNTHETIC_MODELS["qwen3.5-35b-a3b"]


def changed(**fields: Any) -> ModelConfig:
    """The model with other sizes of its mixture of experts."""
    moe = MOE.moe
    assert isinstance(moe, MoeConfig)
    return dataclasses.replace(MOE, moe=dataclasses.replace(moe, **fields))


def test_every_synthetic_model_has_its_kernels() -> None:
    assert {name: unsupported_reason(model) for name, model in SYNTHETIC_MODELS.items()} == (
        dict.fromkeys(SYNTHETIC_MODELS)
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(num_experts=513), "8 of 513 experts"),
        (changed(experts_per_token=17), "17 of 256 experts"),
        (changed(intermediate_size=516), "inner sizes (516, 512)"),
        (changed(shared_intermediate_size=100), "inner sizes (512, 100)"),
        (dataclasses.replace(MOE, hidden_size=2056), "width 2056"),
        (dataclasses.replace(MOE, hidden_size=16384), "width 16384"),
    ],
)
def test_a_mixture_of_experts_without_kernels_says_why(config: ModelConfig, reason: str) -> None:
    assert reason in (unsupported_reason(config) or "")
