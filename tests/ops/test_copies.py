"""copies: descriptors and their checks; ranges of every length on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import OpContractError
from ninfer.ops import copies
from tests.helpers.device import Device, open_device
from tests.helpers.recorded_launches import RecordingLibrary, ShapeOnly, struct_bytes


def overlaps(ranges: list[tuple[int | None, int, int]]) -> bool:
    """Whether any byte is written twice, or both written and read."""
    written: set[int] = set()
    read: set[int] = set()
    for source, target, size in ranges:
        for at in range(target, target + size, 16):
            if at in written:
                return True
            written.add(at)
        if source is not None:
            read.update(range(source, source + size, 16))
    return bool(written & read)


places = st.integers(1, 40).map(lambda n: n * 16)


@given(
    st.lists(
        st.tuples(st.none() | places, places, st.integers(0, 5).map(lambda n: n * 16)), max_size=6
    )
)
def test_overlapping_targets_are_refused(ranges: list[tuple[int | None, int, int]]) -> None:
    if overlaps(ranges):
        with pytest.raises(OpContractError, match="overlaps"):
            copies.describe(ranges)
    else:
        assert copies.describe(ranges)["bytes"].tolist() == [size for _, _, size in ranges]


@pytest.mark.parametrize("item", [(8, 64, 16), (None, 72, 16), (16, 64, 8), (16, 0, 16)])
def test_ranges_off_sixteen_bytes_are_refused(item: tuple[int | None, int, int]) -> None:
    with pytest.raises(OpContractError, match="range 0"):
        copies.describe([item])


def test_long_ranges_are_shared_and_many_are_not() -> None:
    kernels = RecordingLibrary()
    for count, size in ((1, 151 << 20), (64, 65536), (3000, 1 << 20)):
        ranges = ShapeOnly((count * copies.RANGE.itemsize,), "uint8")
        copies.launch(kernels.library, ranges, count, size, stream=0)
    assert [launch.grid for launch in kernels.launches] == [(1056, 1, 1), (1, 64, 1), (1, 3000, 1)]
    assert copies.RANGE.itemsize == struct_bytes("copies", "CopyRange")
    assert kernels.launches[0].arguments.dtype.itemsize == struct_bytes("copies", "CopyParams")


@pytest.mark.parametrize(
    ("count", "size", "max_blocks", "grid"),
    [
        (3000, 1 << 20, 16, (1, 16, 1)),
        (3, 1 << 20, 16, (5, 3, 1)),
        (1, 1 << 17, 16, (2, 1, 1)),
        (5, 16, 1, (1, 1, 1)),
    ],
)
def test_a_bounded_launch_leaves_room_for_others(
    count: int, size: int, max_blocks: int, grid: tuple[int, int, int]
) -> None:
    kernels = RecordingLibrary()
    ranges = ShapeOnly((count * copies.RANGE.itemsize,), "uint8")
    copies.launch(kernels.library, ranges, count, size, stream=0, max_blocks=max_blocks)
    assert kernels.launches[0].grid == grid
    assert kernels.launches[0].arguments["num_ranges"] == count


def test_a_descriptor_array_of_another_size_is_refused() -> None:
    with pytest.raises(OpContractError, match="ranges"):
        copies.launch(RecordingLibrary().library, ShapeOnly((24,), "uint8"), 2, 16, stream=0)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@pytest.mark.gpu
@pytest.mark.parametrize("max_blocks", [None, 1, 3, 16])
def test_the_device_copies_and_zeroes_ranges_of_all_lengths(
    device: Device, max_blocks: int | None
) -> None:
    cp = device.cp
    sizes = [0, 16, 32, 4080, 4096, 16384, 16400, 65536, 1 << 20, (3 << 20) + 16]
    total = sum(size + 64 for size in sizes)
    source = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    given_source = cp.asarray(source)
    target = cp.full(total, 0xA5, cp.uint8)
    want = np.full(total, 0xA5, np.uint8)
    ranges: list[tuple[int | None, int, int]] = []
    at = 32
    for index, size in enumerate(sizes):
        is_zero = index % 3 == 2
        ranges.append((None if is_zero else given_source.data.ptr + at, target.data.ptr + at, size))
        want[at : at + size] = 0 if is_zero else source[at : at + size]
        at += size + 64 if index + 1 < len(sizes) else size
    described = cp.asarray(copies.describe(ranges).view(np.uint8))
    copies.launch(
        device.kernels,
        described,
        len(ranges),
        max(sizes),
        stream=device.stream.ptr,
        max_blocks=max_blocks,
    )
    device.stream.synchronize()
    assert (cp.asnumpy(target) == want).all()
    assert (cp.asnumpy(given_source) == source).all()
