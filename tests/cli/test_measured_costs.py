"""What drafts cost is found out before an engine starts, and only where there are drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer.cli.loading import (
    LoadedModel,
    load_model,
    measured_costs,
    open_named_model,
    running_engine,
)
from ninfer.contract.chat import GenerationParams
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.program import SequenceSpec
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.options import EngineOptions, SamplingOptions
from tests.helpers.engine_rig import prompt_of, read
from tests.helpers.faulty_program import FaultyProgram

PROMPT: PreparedPrompt = prompt_of(9)


def options(spec: str) -> EngineOptions:
    return EngineOptions(
        executor="cpu", spec=spec, max_concurrency=2, max_context=128, cpu_threads=1
    )


def load(spec: str) -> LoadedModel:
    source = open_named_model(None)
    return load_model(source, options(spec), SamplingOptions(), lambda *_: None)


async def answer(spec: str) -> list[int]:
    model = load(spec)
    async with running_engine(model, options(spec)) as engine:
        params = GenerationParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        request = model.frontend.build_request("r", PROMPT, params, now=engine.now())
        return (await read(engine.submit(request))).token_ids


async def test_an_engine_with_measured_costs_says_the_same() -> None:
    """Whether anything is drafted is up to what this machine measures."""
    assert await answer("mtp") == await answer("none")


async def test_costs_are_measured_where_there_are_drafts() -> None:
    model = load("mtp")
    costs = await measured_costs(model)
    assert costs is not None
    assert costs.step(1, 1, 1) > 0.0
    assert costs.proposals(1, 3) >= costs.proposals(1, 1) >= 0.0
    model.program.close()


async def test_without_drafts_no_step_is_run() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    model = load("none")
    idle = replace(model, program=FaultyProgram(model.program, refuse))
    assert await measured_costs(idle) is None
    model.program.close()


async def test_a_device_that_fails_leaves_nothing_behind() -> None:
    def fail(name: str) -> None:
        if name == "measure_drafts":
            raise DeviceError("lost")

    model = load("ngram")
    failing = replace(model, program=FaultyProgram(model.program, fail))
    with pytest.raises(DeviceError):
        await measured_costs(failing)
    with pytest.raises(InvariantError, match="closed"):
        model.program.open_sequence(SequenceSpec("r", PROMPT, SamplingParams()))
