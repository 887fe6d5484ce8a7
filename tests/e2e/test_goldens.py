"""Whole models on the CPU executor against what an independent implementation computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.model import ModelConfig
from ninfer.convert.source import open_model
from ninfer.ops import rotary
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_batch import prefill_batch
from ninfer.program.executors.cpu_model import CpuModel
from tests.helpers import executor_driver as driver
from tests.helpers.tolerance import GOLDEN, assert_close

GOLDENS = Path(__file__).parent.parent / "golden"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
MEDIA_PROMPTS = {"image", "images", "video"}
CHUNKINGS = {
    "at once": (1000,),
    "one by one": (1,),
    "7": (7,),
    "63": (63,),
    "64": (64,),
    "65": (65,),
    "mixed": (5, 64, 1, 59, 2, 30),
}


@dataclass(frozen=True)
class Golden:
    """The arrays of one prompt, by what they hold."""

    arrays: dict[str, NDArray[Any]]

    @property
    def prompt(self) -> list[int]:
        return [int(token) for token in self.arrays["input_ids"]]

    @property
    def greedy(self) -> list[int]:
        return [int(token) for token in self.arrays["greedy"]]


def load_prompts(case: str) -> dict[str, Golden]:
    prompts: dict[str, dict[str, NDArray[Any]]] = {}
    with np.load(GOLDENS / case / "golden.npz") as data:
        for key in data.files:
            prompt, what = key.split("/")
            prompts.setdefault(prompt, {})[what] = data[key]
    return {
        name: Golden(arrays)
        for name, arrays in prompts.items()
        if "input_ids" in arrays and name not in MEDIA_PROMPTS
    }


PROMPTS = [(case, prompt) for case in CASES for prompt in load_prompts(case)]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, CpuExecutor]]:
    executor = driver.build_executor(open_model(GOLDENS / request.param / "model"))
    yield request.param, executor
    executor.close()


def test_every_supported_family_has_a_case() -> None:
    assert len(CASES) == 7
    assert len(PROMPTS) == 34


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS.keys())
async def test_logits_of_every_position(
    loaded: tuple[str, CpuExecutor], chunks: tuple[int, ...]
) -> None:
    case, executor = loaded
    for golden in load_prompts(case).values():
        logits = await driver.score(executor, driver.sequence(), golden.prompt, chunks)
        want = golden.arrays["logits"]
        assert_close(logits[-want.shape[0] :], want, GOLDEN)


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS.keys())
async def test_greedy_continuation(
    loaded: tuple[str, CpuExecutor], chunks: tuple[int, ...]
) -> None:
    case, executor = loaded
    for golden in load_prompts(case).values():
        target = driver.sequence()
        output = await driver.prefill(executor, target, golden.prompt, chunks)
        first = driver.taken(output).token_id
        assert await driver.generate(executor, target, first, 16) == golden.greedy


async def test_logits_of_the_greedy_continuation(loaded: tuple[str, CpuExecutor]) -> None:
    case, executor = loaded
    for golden in load_prompts(case).values():
        if "greedy_logits" not in golden.arrays:
            continue
        inputs = golden.prompt + golden.greedy[:-1]
        logits = await driver.score(executor, driver.sequence(), inputs, (len(golden.prompt), 1))
        assert_close(logits[-16:], golden.arrays["greedy_logits"], GOLDEN)


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS.keys())
async def test_state_after_the_prompt(
    loaded: tuple[str, CpuExecutor], chunks: tuple[int, ...]
) -> None:
    case, executor = loaded
    for golden in load_prompts(case).values():
        target = driver.sequence()
        await driver.prefill(executor, target, golden.prompt, chunks)
        memory = executor.memory
        for layer in range(memory.states.shape[1]):
            if f"layer{layer}.recurrent_state" not in golden.arrays:
                continue
            recurrent = golden.arrays[f"layer{layer}.recurrent_state"]
            window = golden.arrays[f"layer{layer}.conv_state"][:, 1:]
            assert_close(memory.states[target.slot, layer], recurrent, GOLDEN)
            assert_close(memory.windows[target.slot, layer], window, GOLDEN)


@pytest.mark.parametrize("case", CASES)
def test_residual_stream_of_every_layer(case: str) -> None:
    source = open_model(GOLDENS / case / "model")
    golden = load_prompts(case)["p7"]
    model = build_model(source.config, {item.name: x for item, x in source.read_float32()})
    batch = prefill_batch(
        driver.sequence().row(golden.prompt, samples=False),
        0,
        7,
        rotary.frequencies(source.config.attention.rope),
    )
    embedded, *layers = [hidden.copy() for hidden in model.hidden_states(batch)]
    assert_close(embedded, golden.arrays["embeddings"], GOLDEN)
    assert len(layers) == len(source.config.layers)
    for index, hidden in enumerate(layers[:-1]):
        assert_close(hidden, golden.arrays["layer_outputs"][index], GOLDEN)
    assert_close(model.final_norm(layers[-1]), golden.arrays["final_norm"], GOLDEN)


def build_model(config: ModelConfig, weights: dict[str, NDArray[np.float32]]) -> CpuModel:
    return CpuModel(config, weights, cpu_memory.allocate(config, driver.default_capacity()))
