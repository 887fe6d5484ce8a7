"""FakeExecutor: a deterministic pseudo-model that remembers as little as a real one.

The "StateImage" of a slot is a rolling hash of the tokens fed so far; the "KV" of a page is one
hash a token. A token is chosen from the hash of the slot, of all KV read back through the page
table, and of everything in the SampleRow. So a wrong page table, slot, start, position, count, a
lost commit or a stale state changes tokens, and `expected_tokens` (the same function computed from
the plain token list) tells. A decode unit that may go on leaves garbage where the step behind it
would have written, and so do guesses of the draft model, of which WRONG_GUESSES says where they are
wrong.

A host block holds a page's hashes as bytes. A StateImage fills STATE_BLOCKS of them, the last one
in part: the hash at the first byte and a check of it at the last, so a mixture of two is found.

    executor = FakeExecutor(vocab_size, capacity)
    executor.faults[3] = Fault("device_error")        # the fourth call fails
    executor.gate = asyncio.Event()                   # calls wait until it is set
    executor.move_faults.add(1)                       # the second save or load fails
    executor.move_gate = asyncio.Event()              # saves and loads wait until it is set
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import ByteArray, Float32Array, IntArray
from ninfer.contract.drafting import MAX_DRAFT_TOKENS
from ninfer.contract.errors import DeviceError, OpContractError
from ninfer.contract.masks import TokenMask
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import (
    GeneratedToken,
    PromptScores,
    SamplingParams,
    TokenLogprobs,
)
from ninfer.contract.units import (
    PAGE_TOKENS,
    ROOT_SLOT,
    Capacity,
    Move,
    RowOutput,
    SampleRow,
    ScoreRow,
    UnitRow,
)
from ninfer.ops import prompt_logprobs

STATE_BLOCKS = 3
PAGE_BYTES = 8 * PAGE_TOKENS
SLOT_BYTES = (STATE_BLOCKS - 1) * PAGE_BYTES + 24
_MASK = 2**64 - 1
WRONG_GUESSES = 3
"""Every third cache ordinal is guessed wrong by the draft model; others right, as far as the guess
stands on its own (no counts, masks or suppressed ids)."""
_POISON = 0xDEAD_BEEF_0BAD_F00D

HashArray = NDArray[np.uint64]
Kind: TypeAlias = Literal["prefill", "decode", "verify", "rewind", "score"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one call instead of a result.

    device_error   pages behind the frontier and write slots hold garbage, DeviceError is raised
    non_finite     `rows` come back with is_finite False, their write slots hold garbage
    """

    kind: Literal["device_error", "non_finite"]
    rows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it arrived: `num_tokens` inputs in each of `num_rows` rows."""

    kind: Kind
    num_rows: int
    num_tokens: int


class FakeExecutor:
    """Implements the contract's Executor.

    faults       what to do at the n-th call (from 0; prefill, decode and score count alike)
    gate         when set to an Event, every call waits for it
    calls        all calls so far
    is_running   a call is in flight
    moves        all saves and loads so far
    has_states   False: a model of attention alone, whose tokens depend on KV only
    num_going_on   decode calls that were told to go on
    has_draft_model   as the capacity says
    pads_rows    what it says of itself
    """

    def __init__(
        self,
        vocab_size: int,
        capacity: Capacity,
        *,
        delay_s: float = 0.0,
        has_states: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self.has_draft_model = capacity.has_draft_model
        self.pads_rows = False
        self.has_states = has_states
        self.move_faults: set[int] = set()
        self.move_gate: asyncio.Event | None = None
        self.moves: list[Move] = []
        self.is_moving = False
        self._blocks: ByteArray = np.full((capacity.num_host_blocks, PAGE_BYTES), 0xA5, np.uint8)
        self.delay_s = delay_s
        self.faults: dict[int, Fault] = {}
        self.gate: asyncio.Event | None = None
        self.calls: list[Call] = []
        self.is_running = False
        self.is_closed = False
        self.num_going_on = 0
        self._round: tuple[tuple[UnitRow, ...], list[int]] = (), []
        self._pages: HashArray = np.full((capacity.num_pages, PAGE_TOKENS), _POISON, np.uint64)
        self._slots = [_POISON] * capacity.num_slots
        self._slots[ROOT_SLOT] = 0

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def device_name(self) -> str:
        return "none"

    async def prefill(self, row: UnitRow) -> RowOutput:
        with self._call("prefill", (row,)) as fault:
            await self._wait()
            return self._run((row,), fault)[0]

    async def decode(
        self, rows: tuple[UnitRow, ...], *, goes_on: bool = False
    ) -> tuple[RowOutput, ...]:
        with self._call("decode", rows) as fault:
            if self.has_draft_model:
                raise OpContractError("a draft model follows verify units alone")
            if any(row.token_ids.shape[0] != 1 for row in rows):
                raise OpContractError("a decode row has one input")
            await self._wait()
            outputs = self._run(rows, fault)
            self.num_going_on += goes_on
            for row in rows if goes_on else ():
                self._spoil_next(row)
            return outputs

    @property
    def max_draft_tokens(self) -> int:
        return MAX_DRAFT_TOKENS

    async def verify(self, rows: tuple[UnitRow, ...]) -> tuple[RowOutput, ...]:
        with self._call("verify", rows) as fault:
            for row in rows:
                if len(row.checks) != row.token_ids.shape[0] - 1:
                    raise OpContractError("a row to verify has not one choice for each input")
                if row.checks and (row.sample is None or len(row.checks) > MAX_DRAFT_TOKENS):
                    raise OpContractError("a row with drafts draws nothing, or there are too many")
                if row.num_proposed and (row.sample is None or not self.has_draft_model):
                    raise OpContractError("a row that draws nothing, or nobody, is to propose")
            await self._wait()
            outputs = self._run(rows, fault)
            self._round = rows, [len(output.tokens) for output in outputs]
            return tuple(map(self._propose, rows, outputs))

    async def rewind(self, rows: tuple[UnitRow, ...], counts: Sequence[int]) -> None:
        newest, num_right = self._round
        with self._call("rewind", rows):
            await self._wait()
            if rows is not newest:
                raise OpContractError("rows go back that are not those of the newest round")
            for row, count, most in zip(rows, counts, num_right, strict=True):
                if not 1 <= count <= max(most, row.token_ids.shape[0] - len(row.checks)):
                    raise OpContractError(f"a row with {most} right inputs goes back to {count}")
                for place in range(row.start + count, row.start + row.token_ids.shape[0]):
                    self._pages[row.page_table[place // PAGE_TOKENS], place % PAGE_TOKENS] = _POISON
                if self.has_states:
                    inputs = row.token_ids[:count].tolist()
                    state = _plain_state(self._slots[row.read_slot], inputs, row.start)
                    self._slots[row.write_slot] = state

    async def score(self, row: UnitRow) -> Float32Array:
        with self._call("score", (row,)) as fault:
            await self._wait()
            self._run((row,), fault)
            if fault is not None:
                return np.full((row.token_ids.shape[0], self.vocab_size), np.nan, np.float32)
            return self._row_logits(row)

    @property
    def page_bytes(self) -> int:
        return PAGE_BYTES

    @property
    def slot_bytes(self) -> int:
        return SLOT_BYTES if self.has_states else 0

    @property
    def host_blocks(self) -> ByteArray:
        return self._blocks

    async def save(self, move: Move) -> None:
        with self._move(move):
            await self._wait_to_move()
            for page, block in move.pages:
                self._blocks[block] = self._pages[page].view(np.uint8)
            if move.slot is not None:
                words = self._state_blocks(move)
                words[:] = _POISON
                words[0] = self._slots[move.slot]
                words[-1] = _mix(self._slots[move.slot])
                self._blocks[list(move.state_blocks)] = _as_blocks(words)

    async def load(self, move: Move) -> None:
        with self._move(move):
            for page, _ in move.pages:
                self._pages[page] = _POISON
            await self._wait_to_move()
            for page, block in move.pages:
                self._pages[page] = self._blocks[block].view(np.uint64)
            if move.slot is not None:
                words = self._state_blocks(move)
                state = int(words[0])
                self._slots[move.slot] = state if int(words[-1]) == _mix(state) else _POISON

    def close(self) -> None:
        if self.is_running:
            raise OpContractError("closed while a call is in flight")
        self.is_closed = True

    @contextmanager
    def _move(self, move: Move) -> Iterator[None]:
        if self.is_closed or self.is_moving:
            raise OpContractError("a move on a closed executor, or two at once")
        pages, blocks = [page for page, _ in move.pages], [block for _, block in move.pages]
        blocks += move.state_blocks
        if len(set(pages)) != len(pages) or len(set(blocks)) != len(blocks):
            raise OpContractError(f"pages {pages} or blocks {blocks} are moved twice")
        if (move.slot is not None) != self.has_states or move.slot == ROOT_SLOT:
            raise OpContractError(f"a move of slot {move.slot}")
        if len(move.state_blocks) != (STATE_BLOCKS if self.has_states else 0):
            raise OpContractError(f"a state in {len(move.state_blocks)} blocks")
        self.moves.append(move)
        self.is_moving = True
        try:
            yield
        finally:
            self.is_moving = False

    async def _wait_to_move(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.move_gate is not None:
            await self.move_gate.wait()
        if len(self.moves) - 1 in self.move_faults:
            raise DeviceError("injected move error")

    def _state_blocks(self, move: Move) -> HashArray:
        """The words of a StateImage, gathered from its blocks."""
        gathered: HashArray = self._blocks[list(move.state_blocks)].reshape(-1).view(np.uint64)
        return gathered[: SLOT_BYTES // 8].copy()

    @contextmanager
    def _call(self, kind: Kind, rows: tuple[UnitRow, ...]) -> Iterator[Fault | None]:
        if self.is_closed or self.is_running:
            raise OpContractError("a call on a closed or busy executor")
        fault = self.faults.get(len(self.calls))
        self.calls.append(Call(kind, len(rows), sum(row.token_ids.shape[0] for row in rows)))
        self._check_rows(rows)
        self.is_running = True
        try:
            yield fault
        finally:
            self.is_running = False

    async def _wait(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.gate is not None:
            await self.gate.wait()

    def _check_rows(self, rows: tuple[UnitRow, ...]) -> None:
        for row in rows:
            stop = row.start + row.token_ids.shape[0]
            if row.page_table.shape[0] * PAGE_TOKENS < stop:
                raise OpContractError("a row has too few pages")
            if row.token_ids.shape[0] < 1 or row.token_ids.dtype != np.int32:
                raise OpContractError("a row has no inputs, or not int32 ones")
            if self.has_states and (row.read_slot == ROOT_SLOT) != (row.start == 0):
                raise OpContractError("the root is the state before the first input only")
        self._check_pages(rows)
        self._check_slots(rows)

    def _check_pages(self, rows: tuple[UnitRow, ...]) -> None:
        """Pages may be read by many, but what a row writes is its own."""
        pages = [int(page) for row in rows for page in row.page_table]
        written = [
            int(page)
            for row in rows
            for page in row.page_table[
                row.start // PAGE_TOKENS : -(
                    -(row.start + row.token_ids.shape[0] + row.num_proposed) // PAGE_TOKENS
                )
            ]
        ]
        if not set(pages) <= set(range(len(self._pages))):
            raise OpContractError(f"pages {pages} are out of range")
        if any(pages.count(page) > 1 for page in written):
            raise OpContractError(f"pages {written} are written and read by others")
        targets = [target for row in rows for _, target in row.copies]
        sources = [source for row in rows for source, _ in row.copies]
        if not set(targets) <= set(written) or set(sources) & set(targets):
            raise OpContractError(f"copies from {sources} to {targets}")

    def _check_slots(self, rows: tuple[UnitRow, ...]) -> None:
        reads, writes = {row.read_slot for row in rows}, [row.write_slot for row in rows]
        if not self.has_states:
            if reads | set(writes) != {ROOT_SLOT}:
                raise OpContractError("a model without StateImages has the root only")
            return
        if len(set(writes)) != len(writes) or set(writes) & (reads | {ROOT_SLOT}):
            raise OpContractError(f"slots {writes} are written and shared")
        if not reads | set(writes) <= set(range(len(self._slots))):
            raise OpContractError(f"slots {reads} and {writes} are out of range")

    def _run(self, rows: tuple[UnitRow, ...], fault: Fault | None) -> tuple[RowOutput, ...]:
        if fault is not None and fault.kind == "device_error":
            for row in rows:
                self._pages[[target for _, target in row.copies]] = _POISON
                self._spoil(row)
            raise DeviceError("injected device error")
        for row in rows:
            for source, target in row.copies:
                self._pages[target] = self._pages[source]
        outputs = [self._run_row(row) for row in rows]
        if fault is not None:
            for index in set(fault.rows) & set(range(len(rows))):
                self._spoil(rows[index])
                outputs[index] = RowOutput(None, is_finite=False)
        return tuple(outputs)

    def _run_row(self, row: UnitRow) -> RowOutput:
        return self._run_draft(row) if row.checks else self._run_inputs(row)

    def _run_draft(self, row: UnitRow) -> RowOutput:
        """Input after input, as far as each is what was chosen before it; behind them the KV is
        garbage."""
        tokens: list[GeneratedToken] = []
        slot, num_inputs = row.read_slot, row.token_ids.shape[0]
        self._write_kv(row, np.full(num_inputs, _POISON, np.uint64))
        for index, sample in enumerate((*row.checks, row.sample)):
            stop = index + 1
            positions = None if row.positions is None else row.positions[:, index:stop]
            step = replace(
                row,
                token_ids=row.token_ids[index:stop],
                start=row.start + index,
                read_slot=slot,
                positions=positions,
                sample=sample,
                checks=(),
            )
            before = self._slots[slot]
            output = self._run_inputs(step)
            if output.token is None and tokens:
                self._slots[row.write_slot] = before
                break
            slot = row.write_slot
            if output.token is None:
                return output
            tokens.append(output.token)
            if stop == num_inputs or row.token_ids[stop] != output.token.token_id:
                break
        return RowOutput(tokens[-1], drafts=tuple(tokens[:-1]))

    def _run_inputs(self, row: UnitRow) -> RowOutput:
        ordinals = _ordinals_of(row)
        self._write_kv(row, _kv_of(row.token_ids, row.positions, ordinals))
        scores = None if row.score is None else self._scores(row, row.score)
        state = 0
        if self.has_states:
            state = _plain_state(self._slots[row.read_slot], row.token_ids.tolist(), row.start)
            self._slots[row.write_slot] = state
        sample = row.sample
        if sample is None:
            return RowOutput(None, scores=scores)
        allowed = None if sample.mask is None else _allowed_by(sample.mask, self.vocab_size)
        kv = _kv_hash(self._read_kv(row))
        token = _choose(state, kv, sample, self.vocab_size, allowed)
        return RowOutput(token, scores=scores, is_dead_end=token is None)

    def _propose(self, row: UnitRow, output: RowOutput) -> RowOutput:
        """With guesses behind the row's newest token; their KV is garbage."""
        ordinal = row.start + len(output.tokens)
        stop = min(ordinal + row.num_proposed, row.page_table.shape[0] * PAGE_TOKENS)
        if output.token is None or row.sample is None or ordinal >= stop:
            return output
        no_ids = np.empty(0, np.int32)
        delta = 0 if row.positions is None else int(row.positions[0, 0]) - row.start
        kv = _kv_hash(self._pages[row.page_table].reshape(-1)[:ordinal])
        state = self._slots[row.write_slot] if self.has_states else 0
        proposal, token_id = list[int](), output.token.token_id
        for place in range(ordinal, stop):
            state = _next_state(state, token_id, place) if self.has_states else 0
            kv ^= _kv_term(token_id, place, delta)
            sample = SampleRow(row.sample.params, place + 1, no_ids, no_ids, no_ids)
            guess = _choose(state, kv, sample, self.vocab_size, None)
            assert guess is not None
            token_id = (guess.token_id + (place % WRONG_GUESSES == 0)) % self.vocab_size
            proposal.append(token_id)
            self._pages[row.page_table[place // PAGE_TOKENS], place % PAGE_TOKENS] = _POISON
        return replace(output, proposal=tuple(proposal))

    def _scores(self, row: UnitRow, score: ScoreRow) -> PromptScores | None:
        last = score.first + score.targets.shape[0]
        return prompt_logprobs.reference(
            self._row_logits(row)[score.first : last],
            score.targets,
            first=row.start + score.first + 1,
            num_top=score.num_top,
        )

    def _row_logits(self, row: UnitRow) -> Float32Array:
        state = self._slots[row.read_slot] if self.has_states else None
        token_ids = row.token_ids.tolist()
        return _all_logits(state, token_ids, row.start, self._read_kv(row), self.vocab_size)

    def _spoil(self, row: UnitRow) -> None:
        self._write_kv(row, np.full(row.token_ids.shape[0], _POISON, np.uint64))
        if self.has_states:
            self._slots[row.write_slot] = _POISON

    def _spoil_next(self, row: UnitRow) -> None:
        """What a step started ahead may overwrite."""
        if self.has_states:
            self._slots[row.read_slot] = _POISON
        page, offset = divmod(row.start + 1, PAGE_TOKENS)
        if page < row.page_table.shape[0]:
            self._pages[row.page_table[page], offset] = _POISON

    def _write_kv(self, row: UnitRow, values: HashArray) -> None:
        ordinals = _ordinals_of(row)
        self._pages[row.page_table[ordinals // PAGE_TOKENS], ordinals % PAGE_TOKENS] = values

    def _read_kv(self, row: UnitRow) -> HashArray:
        """All KV up to the row's last input: [start + T]."""
        stop = row.start + row.token_ids.shape[0]
        flat: HashArray = self._pages[row.page_table].reshape(-1)
        return flat[:stop]


def expected_tokens(
    prompt: PreparedPrompt,
    sampling: SamplingParams,
    num_tokens: int,
    vocab_size: int,
    *,
    min_tokens: int = 0,
    suppressed_ids: tuple[int, ...] = (),
    has_states: bool = True,
    allows: Callable[[Sequence[int]], Sequence[int] | None] | None = None,
) -> list[int]:
    """The first `num_tokens` tokens FakeExecutor generates for this request, whatever the pages,
    slots, chunks, batch mates, sources and pauses; fewer when there is a dead end before.

    allows   what a mask allows behind the tokens so far; None for all
    """
    token_ids = prompt.token_ids.tolist()
    generated: list[int] = []
    state = _plain_state(0, token_ids, 0) if has_states else 0
    kv = _plain_kv(prompt, token_ids)
    for _ in range(num_tokens):
        sample = SampleRow(
            params=sampling,
            position=len(token_ids),
            generated_ids=_distinct(sampling, generated),
            generated_counts=_multiplicities(sampling, generated),
            prompt_ids=_distinct(sampling, prompt.token_ids.tolist()),
            suppressed_ids=suppressed_ids if len(generated) < min_tokens else (),
        )
        allowed = None if allows is None else allows(generated)
        token = _choose(state, kv, sample, vocab_size, allowed)
        if token is None:
            return generated
        generated.append(token.token_id)
        if has_states:
            state = _next_state(state, generated[-1], len(token_ids))
        kv ^= _kv_term(generated[-1], len(token_ids), prompt.rope_delta)
        token_ids.append(generated[-1])
    return generated


def expected_logits(
    prompt: PreparedPrompt, vocab_size: int, *, has_states: bool = True
) -> Float32Array:
    """What FakeExecutor's score calls return for the whole prompt: [n, V]."""
    token_ids = prompt.token_ids.tolist()
    kv = _plain_kv_values(prompt, token_ids)
    return _all_logits(0 if has_states else None, token_ids, 0, kv, vocab_size)


def _as_blocks(words: HashArray) -> ByteArray:
    """A StateImage as whole blocks; bytes behind its end are arbitrary."""
    padded = np.full((STATE_BLOCKS, PAGE_BYTES), 0x5A, np.uint8)
    padded.reshape(-1)[:SLOT_BYTES] = words.view(np.uint8)
    return padded


def _plain_state(state: int, token_ids: list[int], start: int) -> int:
    for ordinal, token_id in enumerate(token_ids, start):
        state = _next_state(state, token_id, ordinal)
    return state


def _plain_kv(prompt: PreparedPrompt, token_ids: list[int]) -> int:
    """The KV hash after `token_ids`, from the list alone."""
    return _kv_hash(_plain_kv_values(prompt, token_ids))


def _plain_kv_values(prompt: PreparedPrompt, token_ids: list[int]) -> HashArray:
    num_tokens, num_prompt = len(token_ids), prompt.num_tokens
    rotary = np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1))
    rotary[:, num_prompt:] += np.int32(prompt.rope_delta)
    if prompt.positions is not None:
        rotary[:, :num_prompt] = prompt.positions[:, :num_tokens]
    ordinals = np.arange(num_tokens)
    return _kv_of(np.array(token_ids, dtype=np.int32), rotary, ordinals)


def _distinct(sampling: SamplingParams, token_ids: Sequence[int]) -> IntArray:
    counted = token_ids if sampling.counts_tokens else ()
    return np.array(sorted(set(counted)), dtype=np.int32)


def _multiplicities(sampling: SamplingParams, token_ids: Sequence[int]) -> IntArray:
    distinct = _distinct(sampling, token_ids).tolist()
    return np.array([token_ids.count(token_id) for token_id in distinct], dtype=np.int32)


def _ordinals_of(row: UnitRow) -> NDArray[np.int64]:
    return np.arange(row.start, row.start + row.token_ids.shape[0])


def _kv_of(
    token_ids: IntArray, positions: IntArray | None, ordinals: NDArray[np.int64]
) -> HashArray:
    """One hash a token of id, rotary positions and ordinal."""
    if ordinals.shape[0] == 1:
        # The same in plain numbers, which is faster for one.
        value, ordinal = _mix(int(token_ids[0])), int(ordinals[0])
        for place in (ordinal,) * 3 if positions is None else positions[:, 0].tolist():
            value = _mix(value ^ (place & _MASK))
        return np.array([_mix(value ^ ordinal)], np.uint64)
    rotary = np.tile(ordinals, (3, 1)) if positions is None else positions.astype(np.int64)
    values = _mix_array(token_ids.astype(np.uint64))
    for axis in rotary:
        values = _mix_array(values ^ axis.astype(np.uint64))
    return _mix_array(values ^ ordinals.astype(np.uint64))


def _kv_hash(values: HashArray) -> int:
    """Depends on every value and its place."""
    return int(np.bitwise_xor.reduce(_mix_array(values + _mixed_places(values.shape[0]))))


def _mixed_places(num_tokens: int) -> HashArray:
    rounded = -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS
    return _mixed_places_of_pages(rounded)[:num_tokens]


@cache
def _mixed_places_of_pages(num_tokens: int) -> HashArray:
    return _mix_array(np.arange(1, num_tokens + 1, dtype=np.uint64))


def _kv_term(token_id: int, ordinal: int, rope_delta: int) -> int:
    """What one generated token adds to the hash."""
    value = _mix(token_id)
    for _ in range(3):
        value = _mix(value ^ ((ordinal + rope_delta) & _MASK))
    return _mix((_mix(value ^ ordinal) + _mix(ordinal + 1)) & _MASK)


def _next_state(state: int, token_id: int, ordinal: int) -> int:
    return _mix(state ^ _mix((ordinal << 32) + token_id + 1))


def _allowed_by(mask: TokenMask, vocab_size: int) -> list[int]:
    words: NDArray[np.uint32] = np.full(-(-vocab_size // 32), 0xA5A5_A5A5, np.uint32)
    mask.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()


def _choose(
    state: int,
    kv: int,
    sample: SampleRow,
    vocab_size: int,
    allowed: Sequence[int] | None,
) -> GeneratedToken | None:
    """The next one, going up, of those that may come; None when none may."""
    choice = _mix(state ^ _mix(kv ^ _mix(sample.position)))
    if not sample.params.is_greedy:
        choice = _mix(choice ^ _mix(sample.params.seed & _MASK))
    for array in (sample.generated_ids, sample.generated_counts, sample.prompt_ids):
        choice = _mix(choice ^ (array.shape[0] << 32) ^ zlib.crc32(array.tobytes()))
    token_id = choice % vocab_size
    if allowed is not None or sample.suppressed_ids:
        may_come = set(range(vocab_size) if allowed is None else allowed)
        may_come.difference_update(sample.suppressed_ids)
        if not may_come:
            return None
        while token_id not in may_come:
            token_id = (token_id + 1) % vocab_size
    return GeneratedToken(token_id, _logprobs(choice, token_id, sample.params, vocab_size))


def _logprobs(
    choice: int, token_id: int, params: SamplingParams, vocab_size: int
) -> TokenLogprobs | None:
    if params.top_logprobs is None:
        return None
    best = -(1 + choice % 1000) / 1000
    top = tuple(
        ((token_id + rank) % vocab_size, best - rank) for rank in range(params.top_logprobs)
    )
    return TokenLogprobs(best, top)


def _all_logits(
    state: int | None, token_ids: list[int], start: int, kv: HashArray, vocab_size: int
) -> Float32Array:
    """What follows each token from `start` on, where the StateImage was `state`: [n, V]. `kv` has
    the hashes of all tokens up to the last."""
    states = np.zeros(len(token_ids), np.uint64)
    for index, token_id in enumerate(token_ids if state is not None else ()):
        state = _next_state(state or 0, token_id, start + index)
        states[index] = state
    histories = np.bitwise_xor.accumulate(_mix_array(kv + _mixed_places(kv.shape[0])))
    keys = _mix_array(states ^ histories[start:])
    words = _mix_array(np.arange(vocab_size, dtype=np.uint64) ^ keys[:, None])
    return (words >> np.uint64(40)).astype(np.float32)


def _mix(word: int) -> int:
    """splitmix64's output function."""
    word = (word + 0x9E37_79B9_7F4A_7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return word ^ (word >> 31)


def _mix_array(words: HashArray) -> HashArray:
    words = words + np.uint64(0x9E37_79B9_7F4A_7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))
