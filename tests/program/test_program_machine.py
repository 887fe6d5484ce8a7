"""Random lives of sequences, with faults: invariants and counts after every step, tokens equal to
the pure function at the end of each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer.contract.errors import DeviceError
from ninfer.contract.program import (
    Draft,
    Occupancy,
    PendingBatch,
    SequenceHandle,
    SequenceSpec,
)
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.program.program import ModelProgram
from tests.helpers.fake_executor import FakeExecutor, Fault
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import expected_of, spec_of

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

VOCAB_SIZE = 13
CAPACITY = Capacity(
    max_concurrency=3,
    max_context=200,
    num_pages=6,
    num_slots=6,
    prefill_chunk=70,
    max_draft_tokens=5,
)
Ending: TypeAlias = Literal["commit", "refuse", "abort", "device_error", "non_finite", "cancel"]
ENDINGS = st.sampled_from(
    ("commit", "commit", "commit", "refuse", "abort", "device_error", "non_finite", "cancel")
)
SAMPLINGS = st.sampled_from(
    (SamplingParams(), SamplingParams(temperature=1.0, seed=7), SamplingParams(presence_penalty=1))
)


@dataclass(eq=False)
class Model:
    """What a sequence should look like from outside."""

    spec: SequenceSpec
    handle: SequenceHandle
    frontier: int = 0
    accepted: list[int] = field(default_factory=list)
    proposal: tuple[int, ...] = ()
    num_pages: int = 0
    has_provisional: bool = False
    has_ended: bool = False

    @property
    def num_prompt_left(self) -> int:
        return max(0, self.spec.prompt.num_tokens - self.frontier)

    @property
    def can_decode(self) -> bool:
        is_room_left = self.frontier < CAPACITY.max_context
        return not self.has_ended and bool(self.accepted) and is_room_left

    @property
    def num_slots(self) -> int:
        return (self.frontier > 0) + self.has_provisional


class ProgramMachine(RuleBasedStateMachine):
    has_draft_model = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        capacity = replace(CAPACITY, has_draft_model=self.has_draft_model)
        self.executor = FakeExecutor(VOCAB_SIZE, capacity)
        self.program = ModelProgram(hybrid_config(vocab_size=VOCAB_SIZE), self.executor, capacity)
        self.models: list[Model] = []
        self.num_opened = 0

    def teardown(self) -> None:
        for model in self.models:
            self.program.close_sequence(model.handle)
        self.program.check()
        assert self.program.occupancy() == Occupancy(0, 0, 6, 0, 5)
        self.program.close()
        self.loop.close()

    @precondition(lambda self: len(self.models) < CAPACITY.max_concurrency)
    @rule(
        num_tokens=st.integers(1, 195),
        sampling=SAMPLINGS,
        bends=st.booleans(),
        min_tokens=st.integers(0, 3),
    )
    def open(self, num_tokens: int, sampling: SamplingParams, bends: bool, min_tokens: int) -> None:
        self.num_opened += 1
        spec = spec_of(
            num_tokens,
            f"request {self.num_opened}",
            vocab_size=VOCAB_SIZE,
            sampling=sampling,
            min_tokens=min_tokens,
            suppressed_ids=(0, 1, 2, 3, 4, 5),
            positions=bends,
            rope_delta=-num_tokens // 2 if bends else 0,
        )
        self.models.append(Model(spec, self.program.open_sequence(spec)))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.models))
        self.program.close_sequence(model.handle)
        self.models.remove(model)

    @precondition(lambda self: any(not model.has_ended for model in self.models))
    @rule(data=st.data())
    def reserve_ahead(self, data: st.DataObject) -> None:
        """More than the next unit needs, as far as the context goes."""
        model = data.draw(st.sampled_from([m for m in self.models if not m.has_ended]))
        limit = CAPACITY.max_context - model.frontier
        if limit > 0:
            self.reserve(model, data.draw(st.integers(1, limit)))

    @precondition(lambda self: any(m.num_prompt_left and not m.has_ended for m in self.models))
    @rule(data=st.data(), ending=ENDINGS)
    def prefill(self, data: st.DataObject, ending: Ending) -> None:
        candidates = [m for m in self.models if m.num_prompt_left and not m.has_ended]
        model = data.draw(st.sampled_from(candidates))
        limit = min(model.num_prompt_left, CAPACITY.prefill_chunk)
        num_tokens = data.draw(st.integers(1, limit) | st.just(limit))
        if self.reserve(model, num_tokens):
            self.loop.run_until_complete(self.run_prefill(model, num_tokens, ending))

    @precondition(lambda self: any(model.can_decode for model in self.models))
    @rule(data=st.data(), ending=ENDINGS)
    def decode(self, data: st.DataObject, ending: Ending) -> None:
        candidates = [model for model in self.models if model.can_decode]
        chosen = data.draw(st.permutations(candidates))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        rows = [model for model in chosen if self.reserve(model, 1)]
        drafts = [self.draft(data, model) for model in rows] if data.draw(st.booleans()) else []
        goes_on = not any(drafts) and data.draw(st.booleans()) and ending not in ("abort", "cancel")
        num_proposed = [
            data.draw(st.integers(0, CAPACITY.max_draft_tokens)) if self.has_draft_model else 0
            for model in rows
        ]
        if rows:
            self.loop.run_until_complete(
                self.run_decode(rows, drafts, num_proposed, ending, goes_on)
            )

    def draft(self, data: st.DataObject, model: Model) -> list[int]:
        """Right as far as a number says, as long as there are pages. Or what the draft model
        proposed."""
        if self.has_draft_model and data.draw(st.booleans()) and model.proposal:
            return list(model.proposal) if self.reserve(model, 1 + len(model.proposal)) else []
        limit = min(CAPACITY.max_draft_tokens, CAPACITY.max_context - model.frontier - 1)
        size = data.draw(st.integers(0, limit))
        num_right = data.draw(st.integers(0, size))
        num_known = len(model.accepted)
        text = expected_of(model.spec, num_known + size, vocab_size=VOCAB_SIZE)
        draft = [
            token if place < num_right else (token + 1) % VOCAB_SIZE
            for place, token in enumerate(text[num_known:])
        ]
        return draft if size == 0 or self.reserve(model, 1 + size) else []

    def reserve(self, model: Model, num_tokens: int) -> bool:
        """Reserve and compare with what the model of the pool says."""
        before = self.program.occupancy()
        needed = max(model.num_pages, -(-(model.frontier + num_tokens) // 64))
        is_possible = (
            before.pages_used + needed - model.num_pages <= CAPACITY.num_pages
            and before.slots_used + (not model.has_provisional) <= CAPACITY.num_slots - 1
        )
        assert self.program.reserve_units(model.handle, num_tokens) == is_possible
        if is_possible:
            model.num_pages, model.has_provisional = needed, True
        else:
            assert self.program.occupancy() == before
        return is_possible

    async def run_prefill(self, model: Model, num_tokens: int, ending: Ending) -> None:
        if ending in ("device_error", "non_finite"):
            self.executor.faults[len(self.executor.calls)] = Fault(ending)
        batch = self.program.launch_prefill(model.handle, num_tokens)
        await self.settle(batch, [model], ending)

    async def run_decode(
        self,
        rows: list[Model],
        drafts: list[list[int]],
        num_proposed: list[int],
        ending: Ending,
        goes_on: bool,
    ) -> None:
        if ending in ("device_error", "non_finite"):
            self.executor.faults[len(self.executor.calls)] = Fault(ending)
        handles = [model.handle for model in rows]
        batch = self.program.launch_decode(
            handles,
            drafts=[Draft(tuple(draft)) for draft in drafts],
            num_proposed=num_proposed,
            goes_on=goes_on,
        )
        for model in rows if goes_on and not self.has_draft_model else ():
            needed = -(-(model.frontier + 2) // 64)
            num_free = CAPACITY.num_pages - sum(other.num_pages for other in self.models)
            if model.frontier + 2 <= CAPACITY.max_context and needed - model.num_pages <= num_free:
                model.num_pages = max(model.num_pages, needed)
        await self.settle(batch, rows, ending)

    async def settle(self, batch: PendingBatch, rows: list[Model], ending: Ending) -> None:
        """Faults and refusals hit the first row, so that its mates must go on."""
        if not await self.wait(batch, ending):
            self.program.abort(batch)
            return
        outputs = batch.outputs
        assert outputs is not None
        tokens = [[token.token_id for token in output.tokens] for output in outputs]
        accepted = [len(produced) for produced in tokens]
        is_refused = ending == "refuse" and accepted[0] == 1
        if ending == "refuse" and accepted[0] > 0:
            # Of several tokens the first are taken.
            accepted[0] -= 1
        await self.program.rewind(batch, accepted)
        self.program.commit(batch, accepted)
        rows[0].has_ended = is_refused or ending == "non_finite"
        for index, (model, output) in enumerate(zip(rows, outputs, strict=True)):
            if model.has_ended:
                continue
            has_draft = model.num_prompt_left == 0 and bool(output.tokens)
            model.frontier += accepted[index] if has_draft else batch.num_inputs[index]
            model.has_provisional = False
            model.accepted += tokens[index][: accepted[index]]
            is_whole = accepted[index] == len(tokens[index])
            is_room_left = model.frontier + 1 + len(output.proposal) <= CAPACITY.max_context
            model.proposal = output.proposal if is_whole and is_room_left else ()

    async def wait(self, batch: PendingBatch, ending: Ending) -> bool:
        """Complete the unit; False when it has to be aborted."""
        if ending == "cancel":
            waiter = asyncio.ensure_future(self.program.complete(batch))
            await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait((waiter,))
            return False
        try:
            await self.program.complete(batch)
        except DeviceError:
            assert ending == "device_error"
            return False
        return ending != "abort"

    @invariant()
    def counts_agree(self) -> None:
        self.program.check()
        assert self.program.occupancy() == Occupancy(
            lanes_used=len(self.models),
            pages_used=sum(model.num_pages for model in self.models),
            pages_total=6,
            slots_used=sum(model.num_slots for model in self.models),
            slots_total=5,
        )

    @invariant()
    def tokens_are_those_of_the_pure_function(self) -> None:
        for model in self.models:
            assert self.program.frontier(model.handle) == model.frontier
            expected = expected_of(model.spec, len(model.accepted), vocab_size=VOCAB_SIZE)
            assert model.accepted == expected


class ProposingMachine(ProgramMachine):
    has_draft_model = True


TestProgramMachine = ProgramMachine.TestCase
TestProgramMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestProposingMachine = ProposingMachine.TestCase
TestProposingMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
