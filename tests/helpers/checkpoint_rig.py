"""A Program over FakeExecutor with all tiers, and the steps that tests of checkpoints repeat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from ninfer.contract.cache import CheckpointId
from ninfer.contract.program import SequenceHandle, SequenceSpec, Source, TransferKind
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Capacity
from ninfer.program.program import ModelProgram
from ninfer.program.stores.disk_store import DiskLayout, DiskStore
from tests.helpers import program_driver
from tests.helpers.fake_executor import PAGE_BYTES, STATE_BLOCKS, FakeExecutor, expected_tokens
from tests.helpers.model_configs import hybrid_config
from tests.helpers.program_driver import decode, prefill, tokens_of

VOCAB_SIZE = 97
CAPACITY = Capacity(
    max_concurrency=3,
    max_context=256,
    num_pages=12,
    num_slots=9,
    prefill_chunk=100,
    num_host_blocks=20,
)


class CheckpointRig:
    """A Program with all tiers; attention only with `has_states` False."""

    def __init__(
        self, folder: Path, capacity: Capacity = CAPACITY, *, has_states: bool = True
    ) -> None:
        self.folder = folder
        self.capacity = capacity
        self.has_states = has_states
        self.executor = FakeExecutor(VOCAB_SIZE, capacity, has_states=has_states)
        config = hybrid_config(vocab_size=VOCAB_SIZE, mixers="GA" if has_states else "AA")
        layout = DiskLayout("fake", PAGE_BYTES, STATE_BLOCKS if has_states else 0)
        disk = DiskStore(folder, 1 << 20, layout)
        self.program = ModelProgram(config, self.executor, capacity, disk)

    def expected(self, spec: SequenceSpec, count: int) -> list[int]:
        return expected_tokens(
            spec.prompt, spec.sampling, count, VOCAB_SIZE, has_states=self.has_states
        )

    async def started(
        self, spec: SequenceSpec, num_tokens: int, source: Source | None = None
    ) -> SequenceHandle:
        """A sequence with so much of its prompt fed."""
        handle = self.program.open_sequence(spec, source)
        await self.feed(handle, num_tokens - self.program.frontier(handle))
        return handle

    async def feed(self, handle: SequenceHandle, num_tokens: int) -> None:
        """Prompt inputs that sample nothing."""
        while num_tokens:
            count = min(num_tokens, self.capacity.prefill_chunk)
            assert self.program.reserve_units(handle, count)
            batch = self.program.launch_prefill(handle, count)
            await self.program.complete(batch)
            assert tokens_of(batch) == [None]
            self.program.commit(batch, [0])
            self.program.check()
            num_tokens -= count

    async def finish(self, handle: SequenceHandle, spec: SequenceSpec, count: int = 4) -> list[int]:
        """The rest of the prompt and some tokens."""
        tokens = [await prefill(self.program, handle, spec, chunk=100)]
        while len(tokens) < count:
            tokens += await decode(self.program, [handle])
        return tokens

    async def captured(self, spec: SequenceSpec, num_tokens: int) -> CheckpointId:
        """A checkpoint whose sequence is gone."""
        handle = await self.started(spec, num_tokens)
        checkpoint = self.program.capture(handle)
        assert checkpoint is not None
        self.program.close_sequence(handle)
        return checkpoint

    async def transfer(self, kind: TransferKind, checkpoint: CheckpointId) -> bool:
        transfer = self.program.begin_transfer(kind, checkpoint, {"kind": "test"})
        assert transfer is not None
        assert (transfer.kind, transfer.checkpoint) == (kind, checkpoint)
        done = asyncio.Event()
        transfer.add_done_callback(done.set)
        await done.wait()
        is_ok = self.program.settle_transfer(transfer)
        self.program.check()
        return is_ok

    def tiers(self, checkpoint: CheckpointId) -> str:
        facts = self.program.checkpoint(checkpoint)
        tiers = zip("dhf", (facts.is_on_device, facts.is_on_host, facts.is_on_disk), strict=True)
        return "".join(letter for letter, is_there in tiers if is_there)


def spec_of(num_tokens: int, name: str = "request") -> SequenceSpec:
    return program_driver.spec_of(num_tokens, name, vocab_size=VOCAB_SIZE)


def spec_behind(spec: SequenceSpec, num_tokens: int, more: int, name: str) -> SequenceSpec:
    """A prompt that begins with so many tokens of another."""
    tail = spec_of(more, name).prompt.token_ids
    token_ids = np.concatenate([spec.prompt.token_ids[:num_tokens], tail])
    return SequenceSpec(name, PreparedPrompt(token_ids), SamplingParams())
