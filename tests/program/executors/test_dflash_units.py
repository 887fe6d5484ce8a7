"""Units of the CPU executor with a DFlash draft model beside the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.arrays import FloatArray
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Move, UnitRow
from ninfer.convert.source import open_model
from ninfer.program.executors.cpu import CpuExecutor
from ninfer.program.executors.cpu_batch import TokenBatch
from ninfer.program.executors.cpu_dflash import DflashModel
from ninfer.program.executors.cpu_draft import CpuDraft, DraftTarget, ProposalRow
from ninfer.program.executors.cpu_memory import CpuMemory
from ninfer.program.executors.draft_shape import DraftShape
from tests.helpers import executor_driver as driver
from tests.helpers.dflash_checkpoints import DflashSpec, write_dflash
from tests.helpers.dflash_models import (
    BIGRAM_VOCAB,
    build_executor,
    load_draft,
    weights_of,
    write_bigram_pair,
)
from tests.helpers.dflash_reference import DflashReference
from tests.helpers.executor_driver import DrivenSequence, sequence
from tests.helpers.model_paths import GOLDEN, golden_model
from tests.helpers.mtp_driver import draft_image, ids_of, run_round
from tests.helpers.tolerance import GOLDEN as GOLDEN_TOLERANCE
from tests.helpers.tolerance import assert_close

CASE = "qwen3_5-dense"
SPECS = [DflashSpec(), DflashSpec(is_second=True, layer_types=("sliding_attention",) * 2)]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)


class RecordingModel:
    """A DraftModel that keeps the taps of what its draft absorbs, by cache ordinal."""

    def __init__(self, model: DflashModel) -> None:
        self._model = model
        self.taps: dict[int, FloatArray] = {}

    @property
    def shape(self) -> DraftShape:
        return self._model.shape

    def build(self, target: DraftTarget, memory: CpuMemory) -> CpuDraft:
        return _RecordingDraft(self._model.build(target, memory), self.taps)

    def until(self, stop: int) -> FloatArray:
        """[stop, taps * C]"""
        return np.stack([self.taps[ordinal] for ordinal in range(stop)])


class _RecordingDraft:
    def __init__(self, draft: CpuDraft, taps: dict[int, FloatArray]) -> None:
        self._draft = draft
        self._taps = taps

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._draft.tap_layers

    def absorb(
        self, batch: TokenBatch, hidden: FloatArray, taps: FloatArray, num_right: Sequence[int]
    ) -> None:
        for segment in batch.segments:
            for index in range(segment.first, segment.last):
                self._taps[segment.start + index - segment.first] = taps[index].copy()
        self._draft.absorb(batch, hidden, taps, num_right)

    def propose(self, rows: Sequence[ProposalRow]) -> list[tuple[int, ...]]:
        return self._draft.propose(rows)


@pytest.fixture(scope="module", params=SPECS, ids=["first", "second"])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dflash(tmp_path_factory.mktemp("draft"), request.param)


@pytest.fixture
def executor(draft: Path) -> Iterator[CpuExecutor]:
    built = build_executor(open_model(golden_model(CASE)), draft)
    yield built
    built.close()


def golden(name: str, what: str) -> np.ndarray:
    return np.asarray(np.load(GOLDEN / CASE / "golden.npz")[f"{name}/{what}"])


def prompt(name: str = "p64") -> list[int]:
    return [int(token_id) for token_id in golden(name, "input_ids")]


def recorded(spec: DflashSpec, folder: Path) -> tuple[CpuExecutor, RecordingModel]:
    source = open_model(golden_model(CASE))
    model = RecordingModel(load_draft(write_dflash(folder, spec), source.config.vocab_size))
    executor = CpuExecutor(
        source.config,
        weights_of(source),
        driver.default_capacity(),
        draft_model=model,
        num_threads=1,
    )
    return executor, model


async def test_taps_are_the_residual_streams_behind_the_layers(tmp_path: Path) -> None:
    spec = DflashSpec(tap_layers=(0, 1, 2, 3))
    executor, model = recorded(spec, tmp_path)
    await driver.prefill(executor, sequence(), prompt("p7"), [7])
    outputs = golden("p7", "layer_outputs")
    assert_close(model.until(7), np.concatenate(list(outputs), axis=1), GOLDEN_TOLERANCE)
    executor.close()


@pytest.mark.parametrize("spec", SPECS, ids=["first", "second"])
async def test_proposals_are_those_of_the_definition_over_what_was_fed(
    tmp_path: Path, spec: DflashSpec
) -> None:
    """After a prompt in chunks and rounds with wrong drafts."""
    executor, model = recorded(spec, tmp_path)
    weights = weights_of(open_model(golden_model(CASE)))
    reference = DflashReference(
        spec, weights["embed_tokens"].astype(np.float64), weights["lm_head"].astype(np.float64)
    )
    target = sequence()
    newest = driver.taken(await driver.prefill(executor, target, prompt(), [50, 9])).token_id
    for _ in range(6):
        (output,) = await run_round(executor, [target], [newest], [(1, 2)], 5)
        newest = driver.taken(output).token_id
        taps = model.until(target.frontier).astype(np.float64)
        assert list(output.proposal) == reference.guesses(taps, newest, 5)
    executor.close()


async def tokens_with_proposals(
    executor: CpuExecutor, targets: Sequence[DrivenSequence], count: int
) -> list[list[int]]:
    """Rounds that feed back what the draft model proposed."""
    said = []
    for index, target in enumerate(targets):
        output = await driver.prefill(executor, target, prompt()[: 40 + 5 * index], [16])
        said.append([driver.taken(output).token_id])
    drafts: list[tuple[int, ...]] = [()] * len(targets)
    while min(map(len, said)) < count:
        outputs = await run_round(executor, targets, [text[-1] for text in said], drafts, 4)
        drafts = [output.proposal for output in outputs]
        for text, output in zip(said, outputs, strict=True):
            text += ids_of(output)
    return [text[:count] for text in said]


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
async def test_outputs_are_those_without_a_draft_model(
    executor: CpuExecutor, params: SamplingParams
) -> None:
    plain = driver.build_executor(open_model(golden_model(CASE)))
    wanted = []
    for index in range(3):
        target = sequence(index, params)
        first = await driver.prefill(plain, target, prompt()[: 40 + 5 * index], [16])
        wanted.append(await driver.generate(plain, target, driver.taken(first).token_id, 24))
    plain.close()
    targets = [sequence(index, params) for index in range(3)]
    assert await tokens_with_proposals(executor, targets, 24) == wanted


async def test_keys_are_those_of_the_same_inputs_without_drafts(executor: CpuExecutor) -> None:
    """Wrong columns leave no trace; a prompt's chunks matter to the target's own rounding alone."""
    drafted, plain = sequence(0), sequence(1)
    newest = 0
    for target in (drafted, plain):
        newest = driver.taken(await driver.prefill(executor, target, prompt(), [16])).token_id
    text, drafts = [newest], (newest, 7)
    while len(text) < 12:
        (output,) = await run_round(executor, [drafted], [text[-1]], [drafts])
        text += ids_of(output)
        drafts = (text[-1], 7)
    for token_id in text[: drafted.frontier - plain.frontier]:
        await run_round(executor, [plain], [token_id], [()], 0)
    assert draft_image(executor, drafted) == draft_image(executor, plain)


async def test_copies_and_moves_carry_the_keys(executor: CpuExecutor) -> None:
    first, second = sequence(0), sequence(1)
    newest = driver.taken(await driver.prefill(executor, first, prompt("p65"), [65])).token_id
    image = draft_image(executor, first)
    pages = tuple((int(page), block) for block, page in enumerate(first.pages[:2]))
    num_state_blocks = -(-executor.slot_bytes // executor.page_bytes)
    states = tuple(range(8, 8 + num_state_blocks))
    await executor.save(Move(pages, first.slot, states))
    moved = tuple((int(second.pages[block]), block) for _, block in pages)
    second.tokens, second.slot = list(first.tokens), 4
    await executor.load(Move(moved, 4, states))
    assert draft_image(executor, second) == image
    third = sequence(2)
    third.tokens, third.slot = list(first.tokens), first.slot
    row = with_copies(third.row([newest], samples=True), first, third)
    (copied,) = await executor.verify((dataclasses.replace(row, num_proposed=3),))
    (alone,) = await run_round(executor, [second], [newest], [()], 3)
    assert copied.proposal == alone.proposal
    assert len(copied.proposal) == 3


def with_copies(row: UnitRow, source: DrivenSequence, target: DrivenSequence) -> UnitRow:
    pairs = zip(source.pages[:2].tolist(), target.pages[:2].tolist(), strict=True)
    return dataclasses.replace(row, copies=tuple(pairs))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=1.3, top_k=20, min_p=0.01, seed=5)],
    ids=["greedy", "sampled"],
)
async def test_a_draft_that_knows_its_target_is_always_right(
    tmp_path: Path, params: SamplingParams
) -> None:
    target_folder, draft_folder = write_bigram_pair(tmp_path)
    source = open_model(target_folder)
    plain, drafting = driver.build_executor(source), build_executor(source, draft_folder)
    asked = [3, 1, 4, 1, 5]
    target = sequence(0, params)
    first = driver.taken(await driver.prefill(plain, target, asked, [5])).token_id
    wanted = await driver.generate(plain, target, first, 60)
    assert len(set(wanted)) > 3 or params.is_greedy
    target = sequence(0, params)
    said = [driver.taken(await driver.prefill(drafting, target, asked, [5])).token_id]
    (output,) = await run_round(drafting, [target], said, [()], 5)
    said += ids_of(output)
    while len(said) < 60:
        drafts = output.proposal
        assert len(drafts) == 5
        (output,) = await run_round(drafting, [target], said[-1:], [drafts], 5)
        assert len(output.tokens) == 6, "a guess was wrong"
        said += ids_of(output)
    assert said[:60] == wanted
    assert max(said) < BIGRAM_VOCAB
    for executor in (plain, drafting):
        executor.close()
