"""A DFlash draft beside the CUDA executor: what is queued for it, without a device; on one, guesses
of the definition and states of plain steps."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import OptionError
from ninfer.contract.model import ModelSource
from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import Move, RowOutput
from ninfer.convert.dflash_checkpoint import open_dflash
from ninfer.convert.source import open_model
from ninfer.ops import dflash_selector, sampling
from ninfer.ops.dflash_selector import Codebooks
from ninfer.ops.float_codecs import bf16_to_float
from ninfer.ops.linear_packing import WeightFormat
from ninfer.options import EngineOptions
from ninfer.program.dflash_loading import open_dflash_draft
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_dflash_buffers import DflashBuffers
from ninfer.program.executors.cuda_dflash_weights import unsupported_reason, with_dflash
from ninfer.program.executors.cuda_weights import WEIGHT_FORMATS, plan_weights
from ninfer.program.executors.cuda_window import widths
from ninfer.program.executors.dflash_setup import DflashSetup
from tests.helpers import executor_driver as driver
from tests.helpers.arrays import Float64Array
from tests.helpers.cuda_models import SMALL_OPTIONS, cuda_executor
from tests.helpers.dflash_checkpoints import DflashSpec, variants, write_dflash
from tests.helpers.dflash_reference import DflashReference
from tests.helpers.draft_rounds import SAMPLED, check_rounds_against_steps, read, start
from tests.helpers.executor_driver import DrivenSequence
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.model_paths import golden_model
from tests.program.executors.test_cuda import MOE, OPTIONS, build, small_config
from tests.program.executors.test_cuda_rounds import play

FIRST = DflashSpec(head_dim=32)
SECOND = replace(FIRST, is_second=True, selector_rank=16, conv_group=8)
SPECS = {
    **variants(FIRST, SECOND),
    "long": replace(FIRST, block_size=16, layer_types=("full_attention",) * 2),
    "wide": replace(SECOND, num_heads=2, head_dim=128, block_size=16, sliding_window=70),
}
MIXERS = {1: "gdn_decode", 5: "gdn_decode", 40: "gdn_prefill"}
"""The family of GDN layers in prompts of so many tokens."""


def setup_of(folder: Path, spec: DflashSpec, num_token_ids: int | None = None) -> DflashSetup:
    opened = open_dflash(write_dflash(folder, spec))
    limit = spec.vocab_size if num_token_ids is None else num_token_ids
    return DflashSetup(opened.config, opened.objects, opened.token_ids, limit)


def buffers_of(executor: CudaExecutor) -> DflashBuffers:
    rounds = executor.workspace.rounds
    assert rounds is not None
    assert rounds.dflash is not None
    return rounds.dflash


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("mixers", "moe", "kv_dtype"),
    [("GGGA", None, "bf16"), ("AA", MOE, "fp8"), ("GGA", None, "int8")],
    ids=["dense", "moe", "int8"],
)
async def test_every_launch_of_a_round_meets_its_contract(
    tmp_path: Path, name: str, mixers: str, moe: Any, kv_dtype: str
) -> None:
    cuda = FakeCuda()
    config = small_config(mixers, moe=moe)
    spec = replace(
        SPECS[name], hidden_size=config.hidden_size, vocab_size=config.vocab_size, tap_layers=(0, 1)
    )
    if spec.token_ids is not None:
        spec = replace(spec, token_ids=tuple(range(2, 100, 5)))
    spec = replace(spec, mask_token_id=100, num_target_layers=len(mixers))
    most = spec.block_size - 1
    options = dataclasses.replace(
        OPTIONS, spec="dflash", draft_tokens=most, kv_dtype=kv_dtype, memory_budget=128 << 20
    )
    setup = setup_of(tmp_path, spec)
    executor = build(cuda, config, options, setup).executor
    allocations, pinned = dict(cuda.sizes), len(cuda.pinned)
    play(cuda, executor, accepted=[1, 0, 0])
    targets = [driver.sequence(index) for index in range(3)]
    for target, size in zip(targets, (5, 17, 60), strict=True):
        await executor.prefill(target.row([1] * size, samples=True))
        target.advance([1] * size)
    rows = [
        dataclasses.replace(driver.draft_row(target, 7, [3] * size), num_proposed=count)
        for target, size, count in zip(targets, (3, 0, 1), (most, 1, 0), strict=True)
    ]
    for chosen in (rows, rows[:1], [dataclasses.replace(row, num_proposed=0) for row in rows]):
        asked = tuple(chosen)
        outputs = await executor.verify(asked)
        assert [len(output.tokens) for output in outputs] == [2, 1, 1][: len(chosen)]
        await executor.rewind(asked, [1] * len(asked))
    assert executor.has_draft_model
    assert cuda.sizes == allocations, "running allocates nothing"
    assert len(cuda.pinned) == pinned


async def test_a_round_without_guesses_replays_no_block(tmp_path: Path) -> None:
    cuda = FakeCuda()
    executor = build_small(cuda, tmp_path).executor
    target = driver.sequence()
    play(cuda, executor, accepted=[0])
    await executor.prefill(target.row([1] * 5, samples=True))
    target.advance([1] * 5)
    for count, expected in ((0, 0), (1, 1), (5, 1)):
        cuda.queued.clear()
        row = dataclasses.replace(target.row([7], samples=True), num_proposed=count)
        await executor.verify((row,))
        assert families_of(cuda)["dflash_block"] == expected


def families_of(cuda: FakeCuda) -> Counter[str]:
    """How often each entry was launched since the queue was cleared."""
    return Counter(launch.entry for launch in cuda.launches())


def build_small(cuda: FakeCuda, folder: Path, **options: Any) -> Any:
    config = small_config()
    spec = replace(
        FIRST,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        mask_token_id=100,
        tap_layers=(0, 2),
    )
    chosen = dataclasses.replace(OPTIONS, spec="dflash", draft_tokens=5, **options)
    return build(cuda, config, chosen, setup_of(folder, spec))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
async def test_taps_are_the_streams_behind_their_layers(tmp_path: Path, num_tokens: int) -> None:
    """One copy a tapped layer to its columns, before the next layer changes the stream."""
    cuda = FakeCuda()
    executor = build_small(cuda, tmp_path).executor
    play(cuda, executor, accepted=[0])
    taps, hidden = buffers_of(executor).taps, executor.workspace.buffers.hidden
    cuda.queued.clear()
    await executor.prefill(driver.sequence().row([1] * num_tokens, samples=True))
    launches = cuda.launches()
    places = [place for place, launch in enumerate(launches) if launch.entry == "copy_rows"]
    targets = [int(launches[place].arguments["target"]) for place in places]
    assert targets == [taps.address, taps.address + 2 * small_config().hidden_size]
    assert {int(launches[place].arguments["source"]) for place in places} == {hidden.address}
    mixers = [place for place, launch in enumerate(launches) if launch.family == MIXERS[num_tokens]]
    before = [sum(place < tap for place in mixers) for tap in places]
    assert 0 < 3 * before[0] == before[1], "behind the first and the third GDN layer"


def test_weights_of_a_draft_follow_the_target_in_width(tmp_path: Path) -> None:
    config = small_config()
    spec = replace(SECOND, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    spec = replace(spec, mask_token_id=100)
    setup = setup_of(tmp_path, spec)
    for name, expected in (
        ("bf16", WeightFormat.BF16),
        ("fp8", WeightFormat.FP8_ROW),
        ("nvfp4", WeightFormat.FP8_ROW),
    ):
        plan = plan_weights(config, WEIGHT_FORMATS[name])
        both = with_dflash(plan, setup)
        added = {matrix.name: matrix.layout.format for matrix in both.matrices}
        assert {added[f"draft.{part}"] for part in ("fc", "layers.1.mlp.gate_up")} == {expected}
        wide = ("selector.hidden", "layers.0.attention_conv.kernel")
        assert {added[f"draft.{part}"] for part in wide} == {WeightFormat.BF16}
        names = {*added, *(vector.name for vector in both.vectors)}
        assert {f"draft.{item.name}" for item in setup.objects} == {
            name for name in names if name.startswith("draft.")
        }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 16}, "attention heads of 16"),
        ({"num_heads": 34, "num_kv_heads": 2}, "34 query heads of 2"),
        ({"intermediate_size": 84}, "not multiples of 8"),
        ({"is_second": True, "selector_rank": 12}, "a selector of rank 12"),
        ({"is_second": True, "selector_top_k": 21, "selector_rank": 16}, "21 candidates"),
    ],
)
def test_drafts_without_kernels_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    setup = setup_of(tmp_path, replace(FIRST, **changes))
    reason = unsupported_reason(setup.config)
    assert reason is not None
    assert words in reason
    with pytest.raises(OptionError, match=f"--draft-model: .*{words}"):
        build(FakeCuda(), small_config(), dataclasses.replace(OPTIONS, spec="dflash"), setup)


@contextmanager
def device(folder: Path, spec: DflashSpec, **options: Any) -> Iterator[CudaExecutor]:
    chosen = replace_options(folder, spec, **options)
    with cuda_executor(target_model(), chosen) as opened:
        yield opened


def replace_options(folder: Path, spec: DflashSpec, **options: Any) -> EngineOptions:
    return dataclasses.replace(
        SMALL_OPTIONS,
        spec="dflash",
        draft_model=str(write_dflash(folder, spec)),
        draft_tokens=spec.block_size - 1,
        **options,
    )


def target_model() -> ModelSource:
    return open_model(golden_model("qwen3_5-dense"))


def reference_of(spec: DflashSpec) -> DflashReference:
    weights = {item.name: array for item, array in target_model().read_float32()}
    head = weights.get("lm_head", weights["embed_tokens"])
    return DflashReference(
        spec, weights["embed_tokens"].astype(np.float64), head.astype(np.float64)
    )


def taps_of(executor: CudaExecutor, count: int) -> Float64Array:
    """Of the first columns of the newest unit."""
    codes = read(executor, buffers_of(executor).taps.rows(0, count))
    return bf16_to_float(codes).astype(np.float64)


def wanted(
    reference: DflashReference, taps: Float64Array, anchor: int, count: int, params: SamplingParams
) -> list[int]:
    """The guesses of the definition, drawn as `params` say."""
    spec = reference.spec
    logits = reference.logits(taps, anchor, count).astype(np.float32)
    token_ids = np.arange(logits.shape[1]) if spec.token_ids is None else np.array(spec.token_ids)
    if not spec.is_second:
        return [
            sampling.among(row, token_ids, params, taps.shape[0] + place)
            for place, row in enumerate(logits, start=1)
        ]
    books = [
        reference.values[f"candidate_selector.{name}_codebook"].astype(np.float32)
        for name in ("predecessor", "successor")
    ]
    projection = reference.values["candidate_selector.hidden_projection.weight"]
    gates: Float32Array = (reference.hidden(taps, anchor, count)[1:] @ projection.T).astype(
        np.float32
    )
    codebooks = Codebooks(books[0], books[1], spec.selector_top_k)
    return list(
        dflash_selector.reference(
            logits, token_ids, gates, codebooks, anchor, params, taps.shape[0]
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SPECS)
async def test_guesses_are_those_of_the_definition(
    tmp_path: Path, name: str, params: SamplingParams
) -> None:
    """From the taps of the device, behind a prompt in chunks of both regimes and in rounds of
    which some columns are wrong."""
    spec, rng = SPECS[name], random.Random(name)
    reference = reference_of(spec)
    errors, same, total = [], 0, 0
    with device(tmp_path, spec) as executor:
        target = driver.sequence(1, params)
        prompt = [rng.randrange(500) for _ in range(100)]
        taps, output = await absorb(executor, target, prompt, (64, 7, 29))
        newest = driver.taken(output).token_id
        for _ in range(12):
            draft = [rng.randrange(500) for _ in range(rng.randrange(4))]
            count = rng.randint(1, spec.block_size - 1)
            row = dataclasses.replace(driver.draft_row(target, newest, draft), num_proposed=count)
            (output,) = await executor.verify((row,))
            num_right = len(output.tokens)
            taps = np.concatenate((taps, taps_of(executor, num_right)))
            target.advance(row.token_ids[:num_right].tolist())
            newest = driver.taken(output).token_id
            errors.append(hidden_error(executor, reference, taps, newest, count))
            want = wanted(reference, taps, newest, count, params)
            assert len(output.proposal) == count
            total += count
            same += sum(ours == theirs for ours, theirs in zip(output.proposal, want, strict=True))
    print(f"{name}: {same} of {total} guesses, error {max(errors):.4f}")
    assert max(errors) < 0.03
    assert same >= 0.85 * total


async def absorb(
    executor: CudaExecutor, target: DrivenSequence, prompt: Sequence[int], chunks: Sequence[int]
) -> tuple[Float64Array, RowOutput]:
    """The taps of a prompt, chunk by chunk."""
    taps, done, output = [], 0, RowOutput(None)
    for size in chunks:
        part = list(prompt[done : done + size])
        done += size
        output = await executor.prefill(target.row(part, samples=done == len(prompt)))
        target.advance(part)
        taps.append(taps_of(executor, size))
    return np.concatenate(taps), output


def hidden_error(
    executor: CudaExecutor, reference: DflashReference, taps: Float64Array, anchor: int, count: int
) -> float:
    """Of what stands behind the final norm, relative to its size."""
    normed = buffers_of(executor).normed.rows(0, 1 + count)
    ours = bf16_to_float(read(executor, normed)).astype(np.float64)
    theirs = reference.hidden(taps, anchor, count)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["long", "second"])
async def test_rounds_leave_the_bits_and_guesses_of_steps(tmp_path: Path, name: str) -> None:
    with device(tmp_path, SPECS[name]) as executor:
        await check_rounds_against_steps(executor, SPECS[name].block_size - 1)


@pytest.mark.gpu
async def test_ids_that_are_no_tokens_are_never_guessed(tmp_path: Path) -> None:
    options = replace_options(tmp_path, FIRST)
    draft = open_dflash_draft(target_model(), options)
    assert draft is not None
    few = dataclasses.replace(draft, num_token_ids=3)
    with cuda_executor(target_model(), options, few) as executor:
        target, newest = await start(executor, 0, [5, 6, 7], SAMPLED)
        guessed = set[int]()
        for _ in range(6):
            row = dataclasses.replace(target.row([newest], samples=True), num_proposed=5)
            (output,) = await executor.verify((row,))
            target.advance([newest])
            newest = driver.taken(output).token_id
            guessed |= set(output.proposal)
        assert guessed
        assert max(guessed) < 3


@pytest.mark.gpu
async def test_guesses_end_where_pages_do(tmp_path: Path) -> None:
    with device(tmp_path, FIRST) as executor:
        target, newest = await start(executor, 0, [9] * 60, SAMPLED)
        row = dataclasses.replace(target.row([newest], samples=True), num_proposed=5)
        (output,) = await executor.verify((row,))
        assert row.page_table.size == 1
        assert len(output.proposal) == 2


@pytest.mark.gpu
async def test_sequences_with_pictures_get_no_guesses(tmp_path: Path) -> None:
    with device(tmp_path, FIRST) as executor:
        target, newest = await start(executor, 0, [9] * 20, SAMPLED)
        row = dataclasses.replace(
            target.row([newest], samples=True),
            num_proposed=3,
            positions=np.array([[30], [31], [32]], np.int32),
        )
        (output,) = await executor.verify((row,))
        assert output.proposal == ()


def test_widths_of_long_drafts_stay_few() -> None:
    assert widths(15) == (1, 2, 3, 4, 5, 6, 8, 11, 16)
    assert widths(9) == (1, 2, 3, 4, 5, 6, 8, 10)


@pytest.mark.gpu
async def test_guesses_are_the_same_behind_a_way_through_the_host(tmp_path: Path) -> None:
    """The draft model's keys go with the pages."""
    rng = random.Random(6)
    with device(tmp_path, FIRST) as executor:
        prompt = [rng.randrange(500) for _ in range(130)]
        target, newest = await start(executor, 0, prompt, SAMPLED)
        pages = tuple((int(page), 2 * i + 1) for i, page in enumerate(target.pages[:3]))
        num_blocks = -(-executor.slot_bytes // executor.page_bytes)
        blocks = tuple(range(20, 20 + num_blocks))
        await executor.save(Move(pages, target.slot, blocks))
        moved = driver.sequence(5, SAMPLED)
        moved.tokens, moved.slot = list(target.tokens), 11
        places = tuple((int(moved.pages[i]), block) for i, (_, block) in enumerate(pages))
        await executor.load(Move(places, moved.slot, blocks))
        rows = [
            dataclasses.replace(each.row([newest], samples=True), num_proposed=5)
            for each in (target, moved)
        ]
        ours, theirs = await executor.verify(tuple(rows))
        assert len(ours.proposal) == 5
        assert ours == theirs
