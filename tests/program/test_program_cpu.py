"""ModelProgram over the CPU executor: settlements are exact to the bit on real models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.cache import CheckpointId
from ninfer.contract.errors import InvariantError, OptionError
from ninfer.contract.program import PendingBatch, SequenceHandle, Source, TransferKind
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import RowOutput
from ninfer.convert.source import open_model
from ninfer.options import EngineOptions
from ninfer.program.loader import load_program
from ninfer.program.program import ModelProgram
from tests.helpers.model_paths import golden_model
from tests.helpers.program_driver import move, prefill, spec_of

SAMPLING = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, top_logprobs=8)


@pytest.fixture(params=[("qwen3_5-moe", "none"), ("qwen3-dense", "none"), ("qwen3_5-moe", "mtp")])
def program(request: pytest.FixtureRequest) -> Iterator[ModelProgram]:
    """With an MTP module each step asks for proposals, which depend on all that it keeps."""
    case, spec = request.param
    source = open_model(golden_model(case))
    options = EngineOptions(max_concurrency=2, max_context=256, spec=spec)
    loaded, _ = load_program(source, options, _ignore)
    yield loaded
    loaded.close()


def _ignore(stage: str, done: int, total: int) -> None:
    pass


async def outputs_of(program: ModelProgram, batch: PendingBatch) -> tuple[RowOutput, ...]:
    await program.complete(batch)
    assert batch.outputs is not None
    return batch.outputs


async def generate(
    program: ModelProgram, *, num_aborts: int, num_steps: int
) -> list[tuple[RowOutput, ...]]:
    """Outputs of a prompt in two chunks and some steps, each unit aborted so often before."""
    spec = spec_of(75, vocab_size=128, sampling=SAMPLING)
    handle = program.open_sequence(spec)
    outputs = []
    for num_tokens in [70, 5] + [1] * num_steps:
        assert program.reserve_units(handle, num_tokens)
        for _ in range(num_aborts):
            batch = launch(program, handle, num_tokens)
            await program.complete(batch)
            program.abort(batch)
        batch = launch(program, handle, num_tokens)
        outputs.append(await outputs_of(program, batch))
        program.commit(batch, [0 if outputs[-1][0].token is None else 1])
        program.check()
    program.close_sequence(handle)
    return outputs


def launch(program: ModelProgram, handle: SequenceHandle, num_tokens: int) -> PendingBatch:
    if program.frontier(handle) < 75:
        return program.launch_prefill(handle, num_tokens)
    return launch_step(program, handle)


def launch_step(program: ModelProgram, handle: SequenceHandle) -> PendingBatch:
    """The newest token alone draws, and is what may be guessed behind."""
    asks = program.capacity.has_draft_model and program.num_replay_left(handle) == 0
    return program.launch_decode([handle], num_proposed=[3 if asks else 0])


async def test_aborted_units_leave_no_trace_in_the_bits(program: ModelProgram) -> None:
    plain = await generate(program, num_aborts=0, num_steps=6)
    assert await generate(program, num_aborts=2, num_steps=6) == plain


async def test_a_reused_lane_starts_from_nothing(program: ModelProgram) -> None:
    first = await generate(program, num_aborts=0, num_steps=2)
    other = spec_of(130, "other", vocab_size=128)
    handle = program.open_sequence(other)
    await prefill(program, handle, other, chunk=64)
    program.close_sequence(handle)
    assert await generate(program, num_aborts=0, num_steps=2) == first


async def test_a_cancelled_score_leaves_no_trace_in_the_bits(program: ModelProgram) -> None:
    spec = spec_of(200, vocab_size=128)
    scores = []
    for is_cancelled in (False, True):
        handle = program.open_sequence(spec)
        assert program.reserve_units(handle, 200)
        if is_cancelled:
            task = asyncio.ensure_future(program.score(handle, 200))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert program.frontier(handle) == 0
        scores.append(await program.score(handle, 200))
        program.close_sequence(handle)
    np.testing.assert_array_equal(scores[0], scores[1], strict=True)
    program.check()


LENGTH = 200
BORDERS = (70, 130)
"""Where prompts are cut: a frontier that is no multiple of anything, and the granule's rest."""


async def open_and_feed(program: ModelProgram, source: Source | None = None) -> SequenceHandle:
    """The prompt up to the first border, from a source or from nothing."""
    spec = spec_of(LENGTH, vocab_size=128, sampling=SAMPLING)
    handle = program.open_sequence(spec, source)
    if source is None:
        await run(program, handle, BORDERS[0])
    return handle


async def run(program: ModelProgram, handle: SequenceHandle, num_tokens: int) -> RowOutput:
    """One unit, committed."""
    assert program.reserve_units(handle, num_tokens)
    if program.frontier(handle) < LENGTH:
        batch = program.launch_prefill(handle, num_tokens)
    else:
        batch = launch_step(program, handle)
    (output,) = await outputs_of(program, batch)
    program.commit(batch, [0 if output.token is None else 1])
    program.check()
    return output


async def finish(program: ModelProgram, handle: SequenceHandle, num_steps: int) -> list[RowOutput]:
    """From the first border on."""
    outputs = [await run(program, handle, BORDERS[1])]
    for _ in range(num_steps):
        outputs.append(await run(program, handle, 1))
    return outputs


async def replay(program: ModelProgram, handle: SequenceHandle) -> None:
    """Everything that was fed before, with the same borders."""
    while program.num_replay_left(handle):
        frontier = program.frontier(handle)
        num_tokens = 1 if frontier >= LENGTH else BORDERS[0 if frontier == 0 else 1]
        assert (await run(program, handle, num_tokens)).token is None


async def checkpoint_at_the_border(program: ModelProgram) -> CheckpointId:
    handle = await open_and_feed(program)
    checkpoint = program.capture(handle)
    assert checkpoint is not None
    # The origin goes on, so that whoever shares with it shows.
    await finish(program, handle, 2)
    program.close_sequence(handle)
    return checkpoint


@pytest.mark.parametrize("consumes", [False, True])
async def test_a_fork_and_a_move_change_no_bit(program: ModelProgram, consumes: bool) -> None:
    want = await finish(program, await open_and_feed(program), 10)
    checkpoint = await checkpoint_at_the_border(program)
    source = Source(checkpoint, BORDERS[0], consumes)
    assert await finish(program, await open_and_feed(program, source), 10) == want


@pytest.mark.parametrize("how", ["snapshot", "checkpoint", "replay"])
async def test_a_pause_changes_no_bit(program: ModelProgram, how: str) -> None:
    handle = await open_and_feed(program)
    want = await finish(program, handle, 16)
    program.close_sequence(handle)
    checkpoint = await checkpoint_at_the_border(program)
    handle = await open_and_feed(program)
    outputs = await finish(program, handle, 8)
    paused = program.pause(handle, keeps_state=how == "snapshot")
    source = None
    if paused.checkpoint is not None:
        source = Source(paused.checkpoint, paused.frontier, consumes=True)
    elif how == "checkpoint":
        source = Source(checkpoint, BORDERS[0])
    handle = program.resume(paused, source)
    await replay(program, handle)
    for _ in range(8):
        outputs.append(await run(program, handle, 1))
    assert outputs == want


async def test_the_way_through_host_and_disk_changes_no_bit(tmp_path: Path) -> None:
    source = open_model(golden_model("qwen3_5-moe"))
    options = EngineOptions(max_concurrency=2, max_context=256, cache_dir=str(tmp_path))
    first, _ = load_program(source, options, _ignore)
    want = await finish(first, await open_and_feed(first), 10)
    checkpoint = await checkpoint_at_the_border(first)
    await move(first, TransferKind.DEMOTE, checkpoint)
    first.drop_device(checkpoint)
    await move(first, TransferKind.RESTORE, checkpoint)
    start = Source(checkpoint, BORDERS[0])
    assert await finish(first, await open_and_feed(first, start), 10) == want
    await move(first, TransferKind.STORE, checkpoint)
    first.close()
    second, _ = load_program(source, options, _ignore)
    (found,) = second.disk_notes()
    await move(second, TransferKind.FETCH, found)
    await move(second, TransferKind.RESTORE, found)
    start = Source(found, BORDERS[0])
    assert await finish(second, await open_and_feed(second, start), 10) == want
    second.close()


async def test_files_of_another_model_are_not_found(tmp_path: Path) -> None:
    options = EngineOptions(max_concurrency=2, max_context=256, cache_dir=str(tmp_path))
    program, _ = load_program(open_model(golden_model("qwen3_5-moe")), options, _ignore)
    checkpoint = await checkpoint_at_the_border(program)
    await move(program, TransferKind.STORE, checkpoint)
    program.close()
    for name, count in (("qwen3_5-dense", 0), ("qwen3_5-moe", 1)):
        program, _ = load_program(open_model(golden_model(name)), options, _ignore)
        assert len(program.disk_notes()) == count
        program.close()


def test_a_cache_folder_needs_host_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(
        max_concurrency=2, max_context=256, cache_dir=str(tmp_path / "c"), host_cache_bytes=0
    )
    program, _ = load_program(open_model(golden_model("qwen3-dense")), options, _ignore)
    program.close()
    assert "is not used without host memory" in caplog.text
    assert not (tmp_path / "c").exists()


def test_a_cache_folder_that_cannot_be_names_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = EngineOptions(
        max_concurrency=2, max_context=256, cache_dir=str(tmp_path / "file" / "below")
    )
    with pytest.raises(OptionError, match=r"--cache-dir: .*Not a directory"):
        load_program(open_model(golden_model("qwen3-dense")), options, _ignore)


async def forced(program: ModelProgram, parts: tuple[int, ...]) -> list[RowOutput]:
    """Outputs behind a prompt, 20 forced tokens that are fed in `parts`, and some steps."""
    spec = spec_of(60, vocab_size=128, sampling=SAMPLING)
    handle = program.open_sequence(spec)
    await prefill(program, handle, spec, chunk=60)
    program.force(handle, [7 * index % 128 for index in range(20)])
    assert program.num_replay_left(handle) == 20
    for count in parts:
        assert program.reserve_units(handle, count)
        batch = program.launch_replay(handle, count)
        assert await outputs_of(program, batch) == (RowOutput(None),)
        program.commit(batch, [0])
        program.check()
    outputs: list[RowOutput] = []
    while len(outputs) < 5:
        assert program.reserve_units(handle, 1)
        batch = launch_step(program, handle)
        (output,) = await outputs_of(program, batch)
        program.commit(batch, [0 if output.token is None else 1])
        if output.token is not None:
            outputs.append(output)
    program.close_sequence(handle)
    return outputs


async def test_forced_tokens_have_the_bits_of_decode_steps(program: ModelProgram) -> None:
    alone = await forced(program, ())
    for parts in ((16, 4), (1,) * 20, (3, 9)):
        assert await forced(program, parts) == alone


async def test_what_cannot_be_forced_or_replayed(program: ModelProgram) -> None:
    spec = spec_of(20, vocab_size=128)
    handle = program.open_sequence(spec)
    with pytest.raises(InvariantError):
        program.force(handle, [1])
    await prefill(program, handle, spec, chunk=20)
    with pytest.raises(InvariantError):
        program.force(handle, [program.vocab_size])
    program.force(handle, [1, 2])
    assert program.reserve_units(handle, 3)
    with pytest.raises(InvariantError):
        program.launch_replay(handle, 3)
