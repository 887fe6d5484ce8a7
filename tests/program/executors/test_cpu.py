"""CpuExecutor through its protocol: batch independence, memory rules, failures of single rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ninfer.contract.arrays import Float32Array
from ninfer.contract.cache import CHUNK_GRANULE
from ninfer.contract.errors import DeviceError, InvariantError
from ninfer.contract.sampling import GeneratedToken, SamplingParams
from ninfer.contract.units import PAGE_TOKENS, ROOT_SLOT, Move, RowOutput
from ninfer.convert.source import open_model
from ninfer.program.executors.cpu import PASS_TOKENS, CpuExecutor
from tests.helpers import executor_driver as driver
from tests.helpers.checkpoints import CheckpointSpec, write_checkpoint
from tests.helpers.tolerance import GOLDEN, assert_close

GOLDENS = Path(__file__).parents[2] / "golden"
CASES = ("qwen3_5-dense", "qwen3_5-dense-tied-realheads", "qwen3_5-moe", "qwen3-dense", "qwen3-moe")
STEPS = 56
WITH_LOGPROBS = SamplingParams(top_logprobs=20)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=77, top_logprobs=20)


@pytest.fixture(scope="module", params=CASES)
def executor(request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    built = driver.build_executor(open_model(GOLDENS / request.param / "model"))
    yield built
    built.close()


@pytest.fixture(scope="module")
def hybrid() -> Iterator[CpuExecutor]:
    built = driver.build_executor(open_model(GOLDENS / "qwen3_5-dense" / "model"))
    yield built
    built.close()


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of different lengths around the page border."""
    rng = np.random.default_rng(5)
    lengths = (1, 3, 63, 64, 65, 17, 130, 40)[:count]
    return [rng.integers(0, 300, length).tolist() for length in lengths]


async def opened(
    executor: CpuExecutor, index: int, prompt: Sequence[int], params: SamplingParams
) -> tuple[driver.DrivenSequence, GeneratedToken]:
    target = driver.sequence(index, params, rng=np.random.default_rng(index))
    output = await driver.prefill(executor, target, prompt, (1000,))
    return target, driver.taken(output)


async def alone(
    executor: CpuExecutor, index: int, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[GeneratedToken], Float32Array]:
    """Tokens with their 21 log probabilities, and the final recurrent states."""
    target, token = await opened(executor, index, prompt, params)
    tokens = [token]
    for _ in range(STEPS):
        tokens += await driver.decode(executor, [target], [tokens[-1].token_id])
    return tokens, executor.memory.states[target.slot].copy()


@pytest.mark.parametrize("params", [WITH_LOGPROBS, SAMPLED], ids=["greedy", "sampled"])
async def test_decode_is_bit_equal_in_any_batch(
    executor: CpuExecutor, params: SamplingParams
) -> None:
    prompts = prompts_of(8)
    want = [await alone(executor, index, prompt, params) for index, prompt in enumerate(prompts)]
    targets, tokens = [], []
    for index, prompt in enumerate(prompts):
        target, token = await opened(executor, index, prompt, params)
        targets.append(target)
        tokens.append([token])
    rng = np.random.default_rng(9)
    while pending := [index for index in range(8) if len(tokens[index]) <= STEPS]:
        size = int(rng.integers(1, len(pending) + 1))
        batch = rng.permutation(pending)[:size].tolist()
        newest = await driver.decode(
            executor, [targets[i] for i in batch], [tokens[i][-1].token_id for i in batch]
        )
        for index, token in zip(batch, newest, strict=True):
            tokens[index].append(token)
    for index in range(8):
        expected, state = want[index]
        assert tokens[index] == expected
        assert np.array_equal(executor.memory.states[targets[index].slot], state)


async def test_batches_above_one_tile_change_no_bit(executor: CpuExecutor) -> None:
    # 8 sequences, each in the batch once and again as a copy that reads the same memory and writes
    # elsewhere: 16 rows, whose second half must repeat the first.
    targets, inputs = [], []
    for index, prompt in enumerate(prompts_of(8)):
        target, token = await opened(executor, index, prompt[:60], WITH_LOGPROBS)
        targets.append(target)
        inputs.append(token.token_id)
    rows = [
        target.row([token], samples=True) for target, token in zip(targets, inputs, strict=True)
    ]
    single = [(await executor.decode((row,)))[0] for row in rows]
    free = [slot for slot in range(1, 17) if slot not in {t.slot for t in targets}]
    assert len(free) == 8
    copies = [replace(row, write_slot=slot) for row, slot in zip(rows, free, strict=True)]
    rotated = rows[5:] + rows[:5]
    assert list(await executor.decode(tuple(rotated))) == single[5:] + single[:5]
    assert list(await executor.decode(tuple(copies))) == single


async def test_page_order_changes_no_bit(hybrid: CpuExecutor) -> None:
    prompt = prompts_of(8)[6]
    straight = driver.sequence(0, WITH_LOGPROBS)
    scattered = driver.sequence(1, WITH_LOGPROBS)
    scattered.pages = scattered.pages[::-1].copy()
    outputs = [
        driver.taken(await driver.prefill(hybrid, target, prompt, (100, 30)))
        for target in (straight, scattered)
    ]
    for _ in range(70):
        assert outputs[0] == outputs[1]
        token = outputs[0].token_id
        outputs = [(await driver.decode(hybrid, [t], [token]))[0] for t in (straight, scattered)]


async def test_long_units_take_several_passes(hybrid: CpuExecutor) -> None:
    prompt = np.random.default_rng(1).integers(0, 500, PASS_TOKENS + 150).tolist()
    whole = await driver.score(hybrid, driver.sequence(0), prompt, (1000,))
    parts = await driver.score(hybrid, driver.sequence(1), prompt, (64,))
    assert_close(whole, parts, GOLDEN)
    first = driver.taken(await driver.prefill(hybrid, driver.sequence(2), prompt, (1000,)))
    assert first.token_id == int(parts[-1].argmax())


@pytest.mark.parametrize("start", [0, 37])
async def test_cuts_at_multiples_of_the_granule_change_no_bit(
    executor: CpuExecutor, start: int
) -> None:
    """From the empty state, and from a frontier that is no multiple itself."""
    prompt = np.random.default_rng(4).integers(0, 300, 3 * CHUNK_GRANULE + 45).tolist()
    granule = CHUNK_GRANULE
    first = (start,) if start else ()
    cuts: list[tuple[int, ...]] = [
        (1000,),
        (granule - start, 1000),
        (2 * granule - start, 1000),
        (granule - start, granule),
    ]
    want: tuple[Float32Array, Float32Array] | None = None
    for index, chunks in enumerate(cuts):
        target = driver.sequence(index, WITH_LOGPROBS, rng=np.random.default_rng(index))
        logits = await driver.score(executor, target, prompt, (*first, *chunks))
        state = executor.memory.states[target.slot].copy()
        if want is None:
            want = logits, state
        assert np.array_equal(logits, want[0])
        assert np.array_equal(state, want[1])


@pytest.mark.parametrize("kind", ["decode", "prefill", "score"])
async def test_a_shared_page_is_copied_before_it_is_read(executor: CpuExecutor, kind: str) -> None:
    prompt = prompts_of(8)[6][:100]
    target, token = await opened(executor, 0, prompt, WITH_LOGPROBS)
    original = target.row([token.token_id], samples=True)
    tail = int(original.page_table[1])
    spare = 8 * driver.PAGES_PER_SEQUENCE - 1
    table = original.page_table.copy()
    table[1] = spare
    executor.memory.k_pages[:, spare] = np.nan
    executor.memory.v_pages[:, spare] = np.nan
    before = executor.memory.k_pages[:, tail].copy()
    copied = replace(original, page_table=table, copies=((tail, spare),), write_slot=16)
    if kind == "score":
        got = await executor.score(copied)
        assert np.array_equal(executor.memory.k_pages[:, tail], before)
        assert np.array_equal(got, await executor.score(original))
        return
    run = executor.prefill if kind == "prefill" else lambda row: executor.decode((row,))
    got_output = await run(copied)
    assert np.array_equal(executor.memory.k_pages[:, tail], before)
    assert got_output == await run(original)


async def test_what_was_saved_and_loaded_elsewhere_goes_on_bit_for_bit(
    executor: CpuExecutor,
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, top_logprobs=20)
    target, token = await opened(executor, 0, prompts_of(8)[6], params)
    count = -(-executor.slot_bytes // executor.page_bytes)
    pages = tuple((int(page), 2 * i + 1) for i, page in enumerate(target.pages[:3]))
    blocks = tuple(range(20, 20 + 3 * count, 3))
    slot = None if count == 0 else target.slot
    saved = executor.host_blocks.copy()
    await executor.save(Move(pages, slot, blocks))
    used = {block for _, block in pages} | set(blocks)
    others = [block for block in range(len(saved)) if block not in used]
    assert np.array_equal(executor.host_blocks[others], saved[others])
    moved = driver.sequence(5, params)
    moved.tokens, moved.slot = list(target.tokens), 11
    loaded = tuple((int(moved.pages[i]), block) for i, (_, block) in enumerate(pages))
    memory = executor.memory
    states = memory.states.copy()
    await executor.load(Move(loaded, None if count == 0 else moved.slot, blocks))
    rest = [number for number in range(len(states)) if number != moved.slot]
    assert np.array_equal(memory.states[rest], states[rest])
    tokens = [token, token]
    for _ in range(20):
        inputs = [each.token_id for each in tokens]
        tokens = await driver.decode(executor, [target, moved], inputs)
        assert tokens[0] == tokens[1]


async def test_a_move_runs_beside_a_unit(hybrid: CpuExecutor) -> None:
    prompt = np.random.default_rng(1).integers(0, 500, 500).tolist()
    unit = asyncio.ensure_future(driver.prefill(hybrid, driver.sequence(0), prompt, (500,)))
    await asyncio.sleep(0)
    count = -(-hybrid.slot_bytes // hybrid.page_bytes)
    await hybrid.save(Move(((60, 0),), 9, tuple(range(1, 1 + count))))
    assert not unit.done()
    await unit


async def test_a_move_that_fails_is_a_device_error(hybrid: CpuExecutor) -> None:
    with pytest.raises(DeviceError, match="cpu executor: save failed"):
        await hybrid.save(Move(((0, 10_000),)))


async def test_explicit_positions_equal_to_the_ordinals_change_nothing(
    hybrid: CpuExecutor,
) -> None:
    prompt = prompts_of(8)[4]
    plain = driver.sequence(0)
    positions = np.broadcast_to(np.arange(len(prompt), dtype=np.int32), (3, len(prompt)))
    explicit = driver.sequence(1, positions=positions)
    want = await driver.score(hybrid, plain, prompt, (20,))
    assert np.array_equal(await driver.score(hybrid, explicit, prompt, (20,)), want)


async def test_rotary_positions_are_used_on_all_three_axes(hybrid: CpuExecutor) -> None:
    prompt = prompts_of(8)[5]
    base = np.broadcast_to(np.arange(len(prompt), dtype=np.int32), (3, len(prompt)))
    want = await driver.score(hybrid, driver.sequence(0, positions=base), prompt, (1000,))
    for axis in range(3):
        moved = base.copy()
        moved[axis, 5:] += 9
        got = await driver.score(hybrid, driver.sequence(1, positions=moved), prompt, (1000,))
        assert np.array_equal(got[:5], want[:5])
        assert np.abs(got[5:] - want[5:]).max() > 1e-3


async def test_a_unit_leaves_what_it_read_and_the_root_alone(hybrid: CpuExecutor) -> None:
    target, token = await opened(hybrid, 3, prompts_of(8)[2], WITH_LOGPROBS)
    memory = hybrid.memory
    before = memory.states.copy(), memory.windows.copy(), memory.k_pages.copy()
    row = target.row([token.token_id], samples=True)
    await hybrid.decode((row,))
    others = [slot for slot in range(memory.states.shape[0]) if slot != row.write_slot]
    assert np.array_equal(memory.states[others], before[0][others])
    assert np.array_equal(memory.windows[others], before[1][others])
    assert not memory.states[ROOT_SLOT].any()
    changed = np.argwhere((memory.k_pages != before[2]).any(axis=(3, 4)))
    page = int(row.page_table[row.start // PAGE_TOKENS])
    assert {(p, t) for _, p, t in changed.tolist()} == {(page, row.start % PAGE_TOKENS)}


async def test_the_same_unit_twice_gives_the_same_bits(hybrid: CpuExecutor) -> None:
    target, token = await opened(hybrid, 3, prompts_of(8)[4], WITH_LOGPROBS)
    row = target.row([token.token_id], samples=True)
    first = await hybrid.decode((row,))
    state = hybrid.memory.states[row.write_slot].copy()
    assert await hybrid.decode((row,)) == first
    assert np.array_equal(hybrid.memory.states[row.write_slot], state)


async def test_a_row_that_asks_for_no_token_gets_none(hybrid: CpuExecutor) -> None:
    row = driver.sequence().row([1, 2, 3], samples=False)
    assert await hybrid.prefill(row) == RowOutput(None)


async def test_non_finite_logits_fail_their_row_only() -> None:
    source = open_model(GOLDENS / "qwen3_5-dense" / "model")
    weights = {item.name: array.copy() for item, array in source.read_float32()}
    weights["embed_tokens"][7] = np.nan
    executor = CpuExecutor(source.config, weights, driver.default_capacity(), num_threads=1)
    sound = driver.build_executor(source)
    try:
        await check_poisoned_row(executor, sound)
    finally:
        executor.close()
        sound.close()


async def check_poisoned_row(executor: CpuExecutor, sound: CpuExecutor) -> None:
    rows = [
        driver.sequence(i, WITH_LOGPROBS).row([t], samples=True) for i, t in enumerate((1, 7, 2))
    ]
    for row in rows:
        output = await executor.prefill(row)
        assert output.is_finite == (row.token_ids[0] != 7)
    targets = [(await opened(sound, i, [5, 6], WITH_LOGPROBS))[0] for i in range(3)]
    want = await sound.decode(
        tuple(t.row([k], samples=True) for t, k in zip(targets, (1, 7, 2), strict=True))
    )
    targets = [(await opened(executor, i, [5, 6], WITH_LOGPROBS))[0] for i in range(3)]
    got = await executor.decode(
        tuple(t.row([k], samples=True) for t, k in zip(targets, (1, 7, 2), strict=True))
    )
    assert got[1] == RowOutput(None, is_finite=False)
    assert (got[0], got[2]) == (want[0], want[2])


async def test_numbers_that_overflow_are_no_failure_of_the_device() -> None:
    # Warnings are errors here: one that left the thread would arrive as a DeviceError.
    source = open_model(GOLDENS / "qwen3_5-dense" / "model")
    weights = {item.name: array.copy() for item, array in source.read_float32()}
    weights["embed_tokens"][7, ::2] = 3e38
    weights["norm"][:] = np.inf
    executor = CpuExecutor(source.config, weights, driver.default_capacity(), num_threads=1)
    try:
        output = await executor.prefill(driver.sequence().row([7, 7], samples=True))
    finally:
        executor.close()
    assert output == RowOutput(None, is_finite=False)


async def test_unexpected_failures_become_device_errors(hybrid: CpuExecutor) -> None:
    good = driver.sequence().row([1, 2], samples=True)
    bad = [
        (replace(good, token_ids=np.array([1, 9999], np.int32)), "token_ids"),
        (replace(good, write_slot=ROOT_SLOT), "StateImage slot 0"),
        (replace(good, read_slot=good.write_slot), "StateImage slot"),
        (replace(good, write_slot=99), "write_slots"),
        (replace(good, page_table=np.array([], np.int32)), "do not fit 0 pages"),
        (replace(good, page_table=np.array([64], np.int32)), "slot_mapping"),
        (replace(good, token_ids=np.array([], np.int32)), "0 inputs"),
    ]
    for row, text in bad:
        with pytest.raises(DeviceError, match=f"cpu executor: prefill failed: .*{text}"):
            await hybrid.prefill(row)
    with pytest.raises(DeviceError, match="two rows write one StateImage"):
        await hybrid.decode((driver.sequence(0).row([1], samples=True),) * 2)
    assert (await hybrid.prefill(good)).token is not None


async def test_the_loop_runs_while_a_unit_runs(hybrid: CpuExecutor) -> None:
    prompt = np.random.default_rng(1).integers(0, 500, 500).tolist()
    task = asyncio.ensure_future(driver.prefill(hybrid, driver.sequence(0), prompt, (500,)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    assert driver.taken(task.result()).token_id >= 0


async def test_close_is_final_and_idempotent() -> None:
    executor = driver.build_executor(open_model(GOLDENS / "qwen3-dense" / "model"))
    assert executor.name == "cpu"
    executor.close()
    executor.close()
    with pytest.raises(DeviceError, match="after close"):
        await executor.prefill(driver.sequence().row([1], samples=True))


def test_weights_must_match_the_configuration() -> None:
    source = open_model(GOLDENS / "qwen3_5-dense" / "model")
    weights = {item.name: array for item, array in source.read_float32()}
    missing = {name: array for name, array in weights.items() if name != "layers.1.gdn.conv"}
    with pytest.raises(InvariantError, match=r"layers\.1\.gdn\.conv is missing"):
        CpuExecutor(source.config, missing, driver.default_capacity())
    weights["norm"] = weights["norm"][:-1]
    with pytest.raises(InvariantError, match=r"weight norm is float32 \(95,\)"):
        CpuExecutor(source.config, weights, driver.default_capacity(), num_threads=1)


SPECS = {
    "value heads 1:1, width 2, keys wider": CheckpointSpec(
        gdn_key_heads=2, gdn_value_heads=2, gdn_key_dim=24, gdn_value_dim=8, conv_width=2
    ),
    "value heads 4:1, width 5, values wider": CheckpointSpec(
        gdn_key_heads=1, gdn_value_heads=4, gdn_key_dim=8, gdn_value_dim=40, conv_width=5
    ),
    "GDN only": CheckpointSpec(layer_types=("linear_attention",) * 2, num_layers=2),
    "attention only": CheckpointSpec(layer_types=("full_attention",) * 2, num_layers=2),
    "head_dim 256, one KV head": CheckpointSpec(head_dim=256, num_heads=3, num_kv_heads=1),
    "rotary over the whole head": CheckpointSpec(family="qwen3", head_dim=128, is_tied=True),
    "3 experts, all chosen": CheckpointSpec(
        family="qwen3_5_moe", num_experts=3, experts_per_token=3
    ),
    "router not renormalised": CheckpointSpec(
        family="qwen3_moe", norm_topk_prob=False, num_experts=5, dense_layers=(1,)
    ),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
async def test_other_shapes_do_not_depend_on_chunks_or_mates(
    spec: CheckpointSpec, tmp_path: Path
) -> None:
    executor = driver.build_executor(open_model(write_checkpoint(tmp_path / "m", spec)))
    prompt = np.random.default_rng(3).integers(0, spec.vocab_size - 20, 130).tolist()
    whole = await driver.score(executor, driver.sequence(0), prompt, (1000,))
    for index, chunks in enumerate(((1,), (64,), (65,), (9, 50)), start=1):
        parts = await driver.score(executor, driver.sequence(index), prompt, chunks)
        assert_close(parts, whole, GOLDEN)
    targets, tokens = [], []
    for index in range(5):
        target, token = await opened(executor, index, prompt[: 20 + index], WITH_LOGPROBS)
        targets.append(target)
        tokens.append(token.token_id)
    rows = tuple(t.row([k], samples=True) for t, k in zip(targets, tokens, strict=True))
    together = await executor.decode(rows)
    assert [(await executor.decode((row,)))[0] for row in rows] == list(together)
    for index, output in enumerate(together):
        inputs = [*targets[index].tokens, tokens[index]]
        logits = await driver.score(executor, driver.sequence(7), inputs, (1000,))
        got = driver.taken(output).logprobs
        assert got is not None
        assert [token for token, _ in got.top[:1]] == [int(logits[-1].argmax())]
        shifted = logits[-1].astype(np.float64) - logits[-1].max()
        want = shifted.max() - np.log(np.exp(shifted).sum())
        assert abs(got.top[0][1] - want) < 1e-3
    executor.close()
