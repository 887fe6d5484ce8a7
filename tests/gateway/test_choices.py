"""Seeds of several choices, and batches larger than what the engine takes at once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import Unavailable
from ninfer.gateway.choices import derive_seed
from tests.helpers.fake_engine import hold, say
from tests.helpers.gateway_rig import Rig, until

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(0, 15))
def test_derived_seeds_are_signed_64_bit_and_repeatable(seed: int, index: int) -> None:
    derived = derive_seed(seed, index)
    assert -(2**63) <= derived < 2**63
    assert derived == derive_seed(seed, index)


@given(SEEDS)
def test_choice_zero_keeps_the_seed_and_all_differ(seed: int) -> None:
    seeds = [derive_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 16


async def test_a_batch_leaves_the_engine_room(rig: Rig) -> None:
    rig.engine.max_open = 8  # any more at once is refused
    answer = await rig.generate(text=["a"] * 100, sampling_params={"n": 2})
    assert answer.status == 200
    assert len(answer.json()) == 200
    assert rig.engine.num_open == 0


async def test_what_others_took_meanwhile_is_waited_for(rig: Rig) -> None:
    rig.engine.max_open = 8
    submit = rig.engine.submit
    refusals = iter([Unavailable("server_overloaded", "full", 0.001)] * 3)

    def submit_late(request):  # type: ignore[no-untyped-def]
        if len(rig.engine.handles) == 8 and (refusal := next(refusals, None)):
            raise refusal
        return submit(request)

    rig.engine.submit = submit_late  # type: ignore[method-assign]
    answer = await rig.generate(text=["a"] * 9)
    assert (answer.status, len(answer.json())) == (200, 9)
    assert next(refusals, None) is None


async def test_a_prompt_too_long_is_refused_before_anything_runs(rig: Rig) -> None:
    too_long = "a" * (rig.engine.max_context + 1)
    answer = await rig.generate(text=["a"] * 60 + [too_long])
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "text[60]"
    assert rig.engine.handles == []


async def test_the_first_of_a_batch_are_refused_at_once(rig: Rig) -> None:
    rig.engine.max_open = 3
    answer = await rig.generate(text=["a"] * 9)
    assert answer.status == 429
    assert rig.engine.num_open == 0


async def test_leaving_ends_what_runs_and_what_waits(rig: Rig) -> None:
    rig.engine.script = hold(asyncio.Event())
    asking = asyncio.create_task(rig.generate(text=["a"] * 20))
    await until(lambda: rig.engine.num_open == 8)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: rig.engine.num_open == 0)
    assert len(rig.engine.handles) == 8
    rig.engine.script = say("x")
    assert (await rig.generate(text="a")).status == 200
