"""How clearly a mixture-of-experts model chose its experts, from the float32 CPU model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.model import ModelSource
from ninfer.ops import moe_router, rotary
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu_batch import prefill_batch
from ninfer.program.executors.cpu_model import CpuModel
from tests.helpers import executor_driver as driver


def router_gaps(source: ModelSource, prompt: Sequence[int]) -> NDArray[np.float64]:
    """[n] the smallest distance, over all layers, of the router logit of a position's last chosen
    expert from that of the next one; infinite for a model without experts."""
    gaps = np.full(len(prompt), np.inf)
    moe = source.config.moe
    if moe is None:
        return gaps
    chosen = moe.experts_per_token
    choose = moe_router.reference

    def watch(logits: NDArray[Any], **settings: Any) -> Any:
        ordered = np.sort(logits.astype(np.float64), axis=1)[:, ::-1]
        np.minimum(gaps, ordered[:, chosen - 1] - ordered[:, chosen], out=gaps)
        return choose(logits, **settings)

    weights = {item.name: array for item, array in source.read_float32()}
    memory = cpu_memory.allocate(source.config, driver.default_capacity())
    batch = prefill_batch(
        driver.sequence().row(prompt, samples=False),
        0,
        len(prompt),
        rotary.frequencies(source.config.attention.rope),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_router, "reference", watch)
        for _ in CpuModel(source.config, weights, memory).hidden_states(batch):
            pass
    return gaps
