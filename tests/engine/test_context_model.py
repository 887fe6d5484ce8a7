"""Random conversations against a model that knows all tokens and looks at every checkpoint.

Conversations branch, are edited and interleave; memory is short, copies move between tiers. After
every choice: the source is a true prefix, no longer than the prompt less one token, and nothing
that is there would have been cheaper. Bounds hold, and what is in use is never given up.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ninfer.contract.cache import CheckpointId, CheckpointKind, Tier
from ninfer.contract.program import Amounts
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.costs import CostModel
from ninfer.engine.context.limits import CacheLimits
from ninfer.engine.context_protocol import SourceChoice
from tests.helpers.context_rig import ContextRig, Running
from tests.helpers.memory_disk import MemoryDisk

pytestmark = pytest.mark.no_cover
"""Many steps: measuring coverage would take longer than the tests."""

LIMITS = CacheLimits(max_entries=12, max_id_bytes=120 * 256, min_tokens=16, min_stored_tokens=64)
MAX_LENGTH = 600
KINDS = [kind for kind in CheckpointKind if kind is not CheckpointKind.SESSION_END]


class Model:
    """Drives a rig at random; `tokens_of` is the truth about every checkpoint there is."""

    def __init__(self, seed: int, *, has_states: bool) -> None:
        self.random = random.Random(seed)
        self.has_states = has_states
        has_disk = self.random.random() < 0.5
        self.rig = ContextRig(
            lanes=2,
            pages=self.random.choice([36, 64, 200]),
            slots=self.random.choice([5, 8, 16]),
            host_blocks=self.random.choice([16, 64]),
            has_states=has_states,
            disk=MemoryDisk(seed, max_files=6, failures=0.1) if has_disk else None,
            limits=LIMITS,
        )
        self.costs = CostModel()
        self.tokens_of: dict[CheckpointId, tuple[int, ...]] = {}
        self.histories: list[tuple[int, ...]] = [()]
        self.num_hits = 0
        self._spy()

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            await self._step()
            holdings = self.rig.cache.holdings()
            assert holdings.num_entries <= LIMITS.max_entries
            assert holdings.id_bytes <= LIMITS.max_id_bytes + MAX_LENGTH // PAGE_TOKENS * 256
            self.rig.program.check()
        self.rig.cache.flush()
        occupancy = self.rig.program.occupancy()
        assert occupancy.num_checkpoints == 0
        assert (occupancy.pages_used, occupancy.slots_used, occupancy.host_blocks_used) == (0, 0, 0)
        assert self.rig.cache.holdings().id_bytes == 0

    async def _step(self) -> None:
        draw = self.random.random()
        if draw < 0.1:
            need = self.random.choice([Amounts(pages=3), Amounts(slots=1), Amounts(host_blocks=2)])
            self.rig.cache.relieve(need)
        elif draw < 0.25:
            await self._background()
        elif draw < 0.3:
            rates = [10 ** self.random.uniform(2, 5) for _ in range(2)]
            self.rig.cache.note_rates(prefill_tokens_s=rates[0], move_tokens_s=rates[1])
            self.costs.note(rates[0], rates[1])
        else:
            await self._request()

    async def _background(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            plan = self.rig.cache.next_transfer(is_idle=self.random.random() < 0.5)
            if plan is None:
                return
            await self.rig.transfer(plan)

    async def _request(self) -> None:
        prompt = self._prompt()
        places = {
            self.random.randint(1, len(prompt) - 1): self.random.choice(KINDS)
            for _ in range(self.random.randint(0, 3))
            if len(prompt) > 1
        }
        frontiers = tuple(
            PromptFrontier(frontier, kind, is_explicit=self.random.random() < 0.2)
            for frontier, kind in sorted(places.items())
        )
        prepared = PreparedPrompt(np.array(prompt, np.int32), frontiers=frontiers)
        key = self.random.choice([None, None, "a", "b"])
        running = await self.rig.start(prepared, key=key)
        self._note_captures(running, prompt)
        if self.random.random() < 0.2:
            self.rig.cancel(running)
            return
        known = set(self.tokens_of)
        served = await self.rig.end(running, self.random.randint(1, 90))
        self.histories.append(served.history)
        for checkpoint in self._there() - known:
            self.tokens_of[checkpoint] = served.history[:-1]

    def _prompt(self) -> tuple[int, ...]:
        base = self.random.choice(self.histories)
        base = base[: self.random.choice([len(base), self.random.randint(0, len(base))])]
        base = base[: MAX_LENGTH - 150]
        num_new = self.random.randint(1, 60)
        return (*base, *(self.random.randrange(3) for _ in range(num_new)))

    def _there(self) -> set[CheckpointId]:
        return {record.checkpoint_id for record in self.rig.program._checkpoints}

    def _note_captures(self, running: Running, prompt: tuple[int, ...]) -> None:
        there = self._there()
        for checkpoint in list(self.tokens_of):
            if checkpoint not in there:
                del self.tokens_of[checkpoint]
        for checkpoint in there - set(self.tokens_of):
            frontier = self.rig.program.checkpoint(checkpoint).frontier
            self.tokens_of[checkpoint] = prompt[:frontier]

    def _spy(self) -> None:
        """Look at every choice of the rig as it is made."""
        choose = self.rig.choose

        async def checked(ticket: int) -> SourceChoice:
            self._check_choice(ticket)
            choice = await choose(ticket)
            if choice.source is not None:
                self.num_hits += 1
                self.rig.cache.relieve(Amounts(pages=1000, slots=1000))
                facts = self.rig.program.checkpoint(choice.source.checkpoint)
                assert facts.is_on_device
            return choice

        self.rig.choose = checked  # type: ignore[method-assign]

    def _check_choice(self, ticket: int) -> None:
        prompt = self.rig.prompt_of_choice
        best_s = self.costs.prefill_s(len(prompt))
        for checkpoint in self._there():
            if checkpoint in self.tokens_of:
                best_s = min(best_s, self._cost_s(prompt, checkpoint))
        choice = self.rig.cache.choose(ticket)
        if choice.source is None and choice.move is None:
            assert best_s == pytest.approx(self.costs.prefill_s(len(prompt)))
            assert choice.use.num_tokens == 0
            return
        checkpoint = choice.source.checkpoint if choice.source else choice.move.checkpoint  # type: ignore[union-attr]
        tokens, num_used = self.tokens_of[checkpoint], choice.use.num_tokens
        assert 0 < num_used <= len(prompt) - 1
        assert tokens[:num_used] == prompt[:num_used]
        assert num_used == len(tokens) or not self.has_states
        assert self._cost_s(prompt, checkpoint) == pytest.approx(best_s)

    def _cost_s(self, prompt: tuple[int, ...], checkpoint: CheckpointId) -> float:
        tokens, facts = self.tokens_of[checkpoint], self.rig.program.checkpoint(checkpoint)
        num_used = self._usable(prompt, tokens)
        tier = Tier.DISK
        if facts.is_on_device or facts.is_on_host:
            tier = Tier.DEVICE if facts.is_on_device else Tier.HOST
        elif not facts.is_on_disk or len(tokens) // PAGE_TOKENS + 4 > self._num_host_blocks():
            return float("inf")
        if num_used == 0:
            return float("inf")
        return self.costs.source_s(len(prompt), num_used, len(tokens), tier)

    def _num_host_blocks(self) -> int:
        return self.rig.program.capacity.num_host_blocks

    def _usable(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
            return len(tokens)
        if self.has_states:
            return 0
        common = 0
        for ours, theirs in zip(prompt[:-1], tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        return common - common % PAGE_TOKENS


@pytest.mark.parametrize("has_states", [True, False])
@settings(max_examples=12, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_random_conversations(seed: int, has_states: bool) -> None:
    asyncio.run(Model(seed, has_states=has_states).run(30))
