"""The draft model by itself: random taps in, guesses out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array, FloatArray, IntArray
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import PAGE_TOKENS, Capacity, UnitRow
from ninfer.convert.dflash_checkpoint import open_dflash
from ninfer.ops import linear, rotary, sampling
from ninfer.program.executors import cpu_memory
from ninfer.program.executors.cpu_batch import decode_batch, prefill_batch, window_batch
from ninfer.program.executors.cpu_dflash import DflashModel
from ninfer.program.executors.cpu_draft import CpuDraft, ProposalRow
from ninfer.program.executors.cpu_memory import CpuMemory
from tests.helpers.dflash_checkpoints import DflashSpec, variants, write_dflash
from tests.helpers.dflash_reference import DflashReference
from tests.helpers.executor_driver import sample_row
from tests.helpers.model_configs import hybrid_config
from tests.helpers.tolerance import FLOAT32_RECURRENCE, assert_close

GREEDY = SamplingParams()
SPEC = DflashSpec()
SECOND = DflashSpec(is_second=True)
SPECS = {
    **variants(SPEC, SECOND),
    "wide": replace(SPEC, layer_types=("full_attention",) * 2, num_heads=2, head_dim=32),
}
NUM_PAGES = 24


@dataclass(frozen=True)
class RandomTarget:
    """Implements DraftTarget."""

    embedding: Float32Array
    lm_head: Float32Array

    def embed(self, token_ids: IntArray) -> FloatArray:
        return self.embedding[token_ids]

    def head(self, hidden: FloatArray, project: linear.Projection) -> FloatArray:
        return project(hidden, self.lm_head)


class Rig:
    """A draft of a random target, and its memory."""

    def __init__(self, folder: Path, spec: DflashSpec, *, num_token_ids: int | None = None) -> None:
        rng = np.random.default_rng(5)
        shape = (spec.vocab_size, spec.hidden_size)
        self.target = RandomTarget(
            rng.standard_normal(shape).astype(np.float32),
            (rng.standard_normal(shape) / 3).astype(np.float32),
        )
        self.spec = spec
        self.reference = DflashReference(
            spec, self.target.embedding.astype(np.float64), self.target.lm_head.astype(np.float64)
        )
        opened = open_dflash(write_dflash(folder, spec))
        weights = {item.name: array for item, array in opened.read_float32()}
        limit = spec.vocab_size if num_token_ids is None else num_token_ids
        model = DflashModel(opened.config, weights, opened.token_ids, limit)
        config = hybrid_config(mixers="A")
        capacity = Capacity(4, 256, NUM_PAGES, 9, 256)
        self.memory: CpuMemory = cpu_memory.allocate(config, capacity, model.shape)
        self.poison()
        self.frequencies = rotary.frequencies(config.attention.rope)
        self.draft: CpuDraft = model.build(self.target, self.memory)

    def taps(self, length: int, seed: int) -> Float32Array:
        rng = np.random.default_rng(seed)
        shape = (length, len(self.spec.tap_layers) * self.spec.hidden_size)
        return rng.standard_normal(shape).astype(np.float32)

    def absorb(self, taps: Float32Array, table: IntArray, sizes: Sequence[int] = ()) -> None:
        """In prompt units of these sizes, the last as long as need be."""
        start = 0
        for size in (*sizes, taps.shape[0]):
            stop = min(start + size, taps.shape[0])
            if start < stop:
                row = unit_row(start, stop, table)
                batch = prefill_batch(row, 0, stop - start, self.frequencies)
                self.draft.absorb(batch, taps[start:stop], taps[start:stop], [stop - start])
            start = stop

    def keys(self, table: IntArray, length: int) -> list[Float32Array]:
        """Keys, then values of each layer [length, Hk, D]."""
        pools = (*self.memory.draft_k_pages, *self.memory.draft_v_pages)
        return [pages[table].reshape(-1, *pages.shape[2:])[:length] for pages in pools]

    def poison(self) -> None:
        for pages in (*self.memory.draft_k_pages, *self.memory.draft_v_pages):
            pages[:] = np.nan


def unit_row(start: int, stop: int, table: IntArray) -> UnitRow:
    return UnitRow(np.zeros(stop - start, np.int32), start, table, 0, 1)


def asked(
    token_id: int,
    ordinal: int,
    table: IntArray,
    num_tokens: int,
    params: SamplingParams = GREEDY,
) -> ProposalRow:
    positions = np.full(3, ordinal, np.int32)
    nothing = np.empty(0, np.float32)
    return ProposalRow(token_id, ordinal, positions, nothing, table, params, num_tokens)


def table_of(length: int, seed: int = 0) -> IntArray:
    count = -(-(length + 8) // PAGE_TOKENS)
    return np.random.default_rng(seed).permutation(NUM_PAGES)[:count].astype(np.int32)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("length", [1, 7, 64, 70])
def test_guesses_are_those_of_the_definition(tmp_path: Path, name: str, length: int) -> None:
    rig = Rig(tmp_path, SPECS[name])
    for seed in range(3):
        taps, table = rig.taps(length, seed), table_of(length, seed)
        rig.absorb(taps, table)
        for num_tokens in (1, 5):
            want = rig.reference.guesses(taps.astype(np.float64), 11 + seed, num_tokens)
            assert rig.draft.propose([asked(11 + seed, length, table, num_tokens)]) == [tuple(want)]


@pytest.mark.parametrize("name", ["first", "scaled"])
def test_context_keys_are_those_of_the_definition(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path, SPECS[name])
    taps, table = rig.taps(70, 1), table_of(70)
    rig.absorb(taps, table)
    keys, values = zip(*rig.reference.context(taps.astype(np.float64)), strict=True)
    for got, want in zip(rig.keys(table, 70), (*keys, *values), strict=True):
        assert_close(got, want, FLOAT32_RECURRENCE)


def test_context_keys_are_the_same_bits_however_they_came(tmp_path: Path) -> None:
    """In one unit, in chunks, by steps, in rounds beside others."""
    rig = Rig(tmp_path, SECOND)
    taps, table, other = rig.taps(75, 2), np.array([9, 4], np.int32), np.array([20, 21], np.int32)
    rig.absorb(taps, table)
    want = rig.keys(table, 75)
    rig.poison()
    rig.absorb(taps, table, [1, 30, 9, 8])
    assert_same_bits(rig.keys(table, 75), want)
    rig.poison()
    absorb_by_steps(rig, taps, table, other)
    assert_same_bits(rig.keys(table, 75), want)
    rig.poison()
    absorb_by_rounds(rig, taps, table, other)
    assert_same_bits(rig.keys(table, 75), want)


def assert_same_bits(got: list[Float32Array], want: list[Float32Array]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def absorb_by_steps(rig: Rig, taps: Float32Array, table: IntArray, other: IntArray) -> None:
    """Two rows a step; the other one's taps are garbage."""
    for start in range(taps.shape[0]):
        rows = (unit_row(start, start + 1, other), unit_row(start, start + 1, table))
        both = np.concatenate((taps[start : start + 1] * 9, taps[start : start + 1]))
        rig.draft.absorb(decode_batch(rows, rig.frequencies), both, both, [1, 1])


def absorb_by_rounds(rig: Rig, taps: Float32Array, table: IntArray, other: IntArray) -> None:
    """Rounds of four columns of which two are right: the others are written anew."""
    for start in range(0, taps.shape[0], 2):
        stop = min(start + 2, taps.shape[0])
        row = unit_row(start, stop + 2, table)
        columns = np.concatenate((taps[start:stop], np.full((2, taps.shape[1]), 7, np.float32)))
        rows = (unit_row(start, start + 1, other), row)
        both = np.concatenate((columns[:1], columns))
        rig.draft.absorb(window_batch(rows, rig.frequencies), both, both, [1, stop - start])


def test_a_rows_guesses_do_not_depend_on_its_batch(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SECOND)
    rows = []
    for index, length in enumerate((3, 64, 90, 17)):
        table = np.arange(3 * index, 3 * index + 3, dtype=np.int32)
        rig.absorb(rig.taps(length, index), table)
        params = SamplingParams(temperature=float(index), seed=index)
        rows.append(asked(40 + index, length, table, 1 + index, params))
    alone = [rig.draft.propose([row])[0] for row in rows]
    assert [len(guess) for guess in alone] == [1, 2, 3, 4]
    assert rig.draft.propose(rows) == alone
    assert rig.draft.propose(rows[::-1]) == alone[::-1]
    assert rig.draft.propose([]) == []


@pytest.mark.parametrize("name", ["first", "exported"])
def test_draws_take_the_noise_of_their_places(tmp_path: Path, name: str) -> None:
    """As the target's own sampler with the draft's logits would."""
    rig = Rig(tmp_path, SPECS[name])
    taps, table = rig.taps(20, 4), table_of(20)
    rig.absorb(taps, table)
    token_ids = np.array(rig.spec.token_ids or range(512))
    logits = rig.reference.logits(taps.astype(np.float64), 9, 5)
    for seed in range(12):
        params = SamplingParams(temperature=2.0, top_p=0.9, min_p=0.01, seed=seed)
        everything = np.full((5, 512), -1e4)
        everything[:, token_ids] = logits
        drawn = [
            sampling.reference(row, sample_row(21 + place, params))
            for place, row in enumerate(everything)
        ]
        counted = replace(params, presence_penalty=1.0, logit_bias=((3, 9.0),), top_logprobs=4)
        want = tuple(token.token_id for token in drawn if token is not None)
        assert rig.draft.propose([asked(9, 20, table, 5, counted)]) == [want]


@pytest.mark.parametrize("name", ["first", "second", "exported"])
def test_ids_behind_the_tokenizers_are_never_guessed(tmp_path: Path, name: str) -> None:
    def guesses(num_token_ids: int, params: SamplingParams = GREEDY) -> tuple[int, ...]:
        rig = Rig(tmp_path, SPECS[name], num_token_ids=num_token_ids)
        taps, table = rig.taps(9, 0), table_of(9)
        rig.absorb(taps, table)
        return rig.draft.propose([asked(3, 9, table, 5, params)])[0]

    free = guesses(512)
    assert guesses(max(free) + 1) == free
    assert max(guesses(max(free))) < max(free)
    hot = [guesses(30, SamplingParams(temperature=9.0, seed=seed)) for seed in range(4)]
    assert max(map(max, hot)) < 30


def test_blocks_are_as_long_as_asked_up_to_the_trained_length(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SPEC)
    table = table_of(12)
    rig.absorb(rig.taps(12, 0), table)
    lengths = [len(rig.draft.propose([asked(3, 12, table, count)])[0]) for count in range(1, 9)]
    assert lengths == [1, 2, 3, 4, 5, 5, 5, 5]


def test_sequences_with_pictures_get_no_guesses(tmp_path: Path) -> None:
    rig = Rig(tmp_path, SPEC)
    table = table_of(12)
    rig.absorb(rig.taps(12, 0), table)
    row = asked(3, 12, table, 2)
    moved = replace(row, positions=row.positions - np.array([4, 4, 4], np.int32))
    assert rig.draft.propose([moved]) == [()]
    assert [len(guess) for guess in rig.draft.propose([moved, row, moved])] == [0, 2, 0]


@pytest.mark.parametrize("name", ["first", "second"])
def test_numbers_that_are_not_finite_guess_nothing(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path, SPECS[name])
    table = table_of(12)
    with np.errstate(invalid="ignore"):
        rig.absorb(rig.taps(12, 0) * np.float32(np.nan), table)
        assert rig.draft.propose([asked(3, 12, table, 4)]) == [()]


def test_keys_out_of_sight_and_behind_the_frontier_change_nothing(tmp_path: Path) -> None:
    spec = replace(SECOND, layer_types=("sliding_attention",) * 2)
    rig = Rig(tmp_path, spec)
    taps, table = rig.taps(70, 6), table_of(70)
    rig.absorb(taps, table)
    want = rig.draft.propose([asked(5, 70, table, 5)])
    taps[: 70 - spec.sliding_window + 1] = np.nan
    rig.absorb(np.concatenate((taps, np.full((4, taps.shape[1]), np.nan, np.float32))), table)
    assert rig.draft.propose([asked(5, 70, table, 5)]) == want
    taps[70 - spec.sliding_window + 1] = np.nan
    rig.absorb(taps, table)
    assert rig.draft.propose([asked(5, 70, table, 5)]) == [()]
