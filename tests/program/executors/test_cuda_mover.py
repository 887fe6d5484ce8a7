"""CudaMover over a driver without a device: what lies where after copies, saves and loads."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from ninfer.contract.arrays import ByteArray
from ninfer.contract.errors import DeviceError, InvariantError, OptionError
from ninfer.contract.units import Move
from ninfer.ops import copies
from ninfer.options import EngineOptions
from ninfer.program.executors.cuda import CudaExecutor
from ninfer.program.executors.cuda_mover import MOVE_BLOCKS, MOVE_RANGES
from ninfer.program.executors.cuda_tensor import DeviceTensor
from tests.helpers import executor_driver as driver
from tests.helpers.fake_cuda import FakeCuda
from tests.program.executors.test_cuda import OPTIONS, build, small_config

PAGES, BLOCKS = (5, 2, 7), (3, 1, 6)
SLOT, OTHER_SLOT = 4, 6


def executor_on(
    cuda: FakeCuda, mixers: str = "GGGA", options: EngineOptions = OPTIONS
) -> CudaExecutor:
    return build(cuda, small_config(mixers), options).executor


def scramble(cuda: FakeCuda, executor: CudaExecutor) -> None:
    """Distinct bytes in all pages, slots and blocks."""
    rng = np.random.default_rng(2)
    for tensor in tensors_of(executor):
        data = cuda.memory(tensor.address, tensor.num_bytes)
        data[:] = rng.integers(0, 256, data.size, dtype=np.uint8)
    executor.host_blocks[:] = rng.integers(0, 256, executor.host_blocks.shape, dtype=np.uint8)


def page_tensors(executor: CudaExecutor) -> list[DeviceTensor]:
    layers = executor.workspace.memory.kv
    return [t for layer in layers for t in (layer.pages, layer.scales) if t is not None]


def state_tensors(executor: CudaExecutor) -> list[DeviceTensor]:
    memory = executor.workspace.memory
    return [tensor for tensor in (memory.conv, memory.recurrent) if tensor is not None]


def tensors_of(executor: CudaExecutor) -> list[DeviceTensor]:
    return page_tensors(executor) + state_tensors(executor)


def entry(cuda: FakeCuda, tensors: list[DeviceTensor], number: int) -> ByteArray:
    """All bytes of one page or slot, in order."""
    parts = [tensor.index(number) for tensor in tensors]
    return np.concatenate([cuda.memory(part.address, part.num_bytes) for part in parts])


def move_of(executor: CudaExecutor, pages: tuple[int, ...] = PAGES, slot: int = SLOT) -> Move:
    if executor.slot_bytes == 0:
        return Move(tuple(zip(pages, BLOCKS, strict=True)))
    count = -(-executor.slot_bytes // executor.page_bytes)
    state_blocks = tuple(range(20, 20 - 2 * count, -2))
    return Move(tuple(zip(pages, BLOCKS, strict=True)), slot, state_blocks)


@pytest.mark.parametrize("mixers", ["GGGA", "AA"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "int8"])
async def test_what_was_saved_is_loaded_elsewhere_and_nothing_else_changes(
    mixers: str, kv_dtype: str
) -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda, mixers, dataclasses.replace(OPTIONS, kv_dtype=kv_dtype))
    scramble(cuda, executor)
    pages, states = page_tensors(executor), state_tensors(executor)
    assert executor.page_bytes == sum(entry(cuda, [tensor], 0).size for tensor in pages)
    saved, move = executor.host_blocks.copy(), move_of(executor)
    await executor.save(move)
    for page, block in move.pages:
        assert np.array_equal(executor.host_blocks[block], entry(cuda, pages, page))
    if states:
        whole = executor.host_blocks[list(move.state_blocks)].reshape(-1)
        assert np.array_equal(whole[: executor.slot_bytes], entry(cuda, states, SLOT))
    untouched = [n for n in range(len(saved)) if n not in (*BLOCKS, *move.state_blocks)]
    assert np.array_equal(executor.host_blocks[untouched], saved[untouched])
    before = [cuda.memory(t.address, t.num_bytes).copy() for t in tensors_of(executor)]
    await executor.load(move_of(executor, (8, 0, 1), OTHER_SLOT))
    for source, target in zip(PAGES, (8, 0, 1), strict=True):
        assert np.array_equal(entry(cuda, pages, source), entry(cuda, pages, target))
    if states:
        assert np.array_equal(entry(cuda, states, SLOT), entry(cuda, states, OTHER_SLOT))
    for tensor, old in zip(tensors_of(executor), before, strict=True):
        now = cuda.memory(tensor.address, tensor.num_bytes).reshape(tensor.shape[0], -1)
        changed = (now != old.reshape(now.shape)).any(axis=1).nonzero()[0].tolist()
        assert changed == ([0, 1, 8] if tensor in pages else [OTHER_SLOT])


async def test_moves_take_few_thread_blocks_on_a_stream_of_their_own() -> None:
    cuda = FakeCuda(polls=5)
    executor = executor_on(cuda)
    before = len(cuda.launches())
    await executor.save(move_of(executor))
    (launch,) = cuda.launches()[before:]
    assert launch.stream == cuda.copy_stream != cuda.stream
    assert launch.grid[0] * launch.grid[1] <= MOVE_BLOCKS
    assert launch.grid[1] > 1


async def test_a_long_move_goes_in_several_launches() -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda, "A" * 40, dataclasses.replace(OPTIONS, host_cache_bytes=200 << 20))
    scramble(cuda, executor)
    count = MOVE_RANGES // 40 + 7
    move = Move(tuple((page, page + 3) for page in range(count)))
    before = len(cuda.launches())
    await executor.save(move)
    assert len(cuda.launches()) - before == 2
    tensors = page_tensors(executor)
    for page, block in move.pages:
        assert np.array_equal(executor.host_blocks[block], entry(cuda, tensors, page))


async def test_the_loop_turns_while_a_move_waits() -> None:
    cuda = FakeCuda(polls=4)
    executor = executor_on(cuda)
    task = asyncio.create_task(executor.save(move_of(executor)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 4


@pytest.mark.parametrize("kind", ["decode", "prefill", "score"])
async def test_a_shared_page_is_copied_before_the_unit(kind: str) -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda)
    scramble(cuda, executor)
    tensors = page_tensors(executor)
    targets = [driver.sequence(index) for index in range(2)]
    for target in targets:
        target.tokens, target.slot = [0] * 10, 1 + 2 * target.index
    rows = tuple(
        dataclasses.replace(target.row([5], samples=True), copies=((30 + i, 8 * i),))
        for i, target in enumerate(targets)
    )
    before = len(cuda.launches())
    if kind == "decode":
        await executor.decode(rows)
    elif kind == "prefill":
        await executor.prefill(rows[0])
    else:
        await executor.score(rows[0])
    launches = cuda.launches()[before:]
    assert [launch.family for launch in launches].count("copies") == 1
    assert launches[0].family == "copies"
    assert launches[0].stream == cuda.stream
    assert not launches[1].is_programmatic
    for index in range(2 if kind == "decode" else 1):
        assert np.array_equal(entry(cuda, tensors, 30 + index), entry(cuda, tensors, 8 * index))


async def test_a_unit_without_copies_launches_none() -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda)
    before = len(cuda.launches())
    await executor.decode((driver.sequence(0).row([1], samples=True),))
    assert all(launch.family != "copies" for launch in cuda.launches()[before:])


async def test_nothing_is_allocated_after_the_start() -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda)
    allocated, pinned = dict(cuda.sizes), len(cuda.pinned)
    await executor.save(move_of(executor))
    await executor.load(move_of(executor))
    await executor.decode((driver.sequence(0).row([1], samples=True),))
    assert cuda.sizes == allocated
    assert len(cuda.pinned) == pinned


async def test_a_lost_device_fails_the_move_and_all_that_follows() -> None:
    cuda = FakeCuda()
    executor = executor_on(cuda)
    cuda.fails_at = cuda.num_queued + 1
    with pytest.raises(DeviceError, match="illegal memory access"):
        await executor.save(move_of(executor))
    cuda.fails_at = None
    for move in (executor.save, executor.load):
        with pytest.raises(DeviceError, match="after a failure"):
            await move(move_of(executor))
    executor.close()
    with pytest.raises(DeviceError, match="after close"):
        await executor.save(move_of(executor))


async def test_a_cancelled_move_leaves_nothing_queued() -> None:
    cuda = FakeCuda(polls=10**9)
    executor = executor_on(cuda)
    task = asyncio.create_task(executor.save(move_of(executor)))
    await asyncio.sleep(0.005)
    assert cuda.num_synchronised_copies == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cuda.num_synchronised_copies == 1


async def test_a_state_needs_all_of_its_blocks() -> None:
    executor = executor_on(FakeCuda())
    move = dataclasses.replace(move_of(executor), state_blocks=(1,))
    with pytest.raises(InvariantError, match="StateImage in 1 host blocks"):
        await executor.save(move)


def test_too_little_lockable_memory_names_the_option() -> None:
    cuda = FakeCuda(max_pinned_bytes=1 << 20)
    with pytest.raises(OptionError, match=r"--host-cache-bytes: the system locks less memory"):
        build(cuda)
    assert cuda.is_closed


def test_the_kernel_is_loaded_before_the_first_request() -> None:
    cuda = FakeCuda()
    executor_on(cuda)
    families = [launch.family for launch in cuda.launches()]
    assert families.count("copies") == 1
    assert copies.RANGE.itemsize == 24
