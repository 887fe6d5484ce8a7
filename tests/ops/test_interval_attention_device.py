"""Decode of columns that see an interval of keys each: against float64, and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.units import PAGE_TOKENS
from ninfer.ops import paged_attention_decode
from ninfer.ops.activations import sigmoid
from ninfer.ops.float_codecs import HalfArray
from ninfer.ops.kv_pages import view_pages
from tests.helpers.device import Device, open_device
from tests.helpers.kv_cache import FORMATS, KvCache, filled_cache, random_bf16, wide
from tests.helpers.paged_decode import check, last_ordinals, run_decode, upload

pytestmark = pytest.mark.gpu

STARTS = [0, 3, 60, 150, 2040, 2700]
WINDOWS = [1, 5, 64, 100, 2048]
COLUMNS = 17
Intervals = Sequence[NDArray[np.int32]]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


def window_of(
    start: int, columns: int, window: int, *, is_causal: bool
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """firsts (some negative) and last keys of a block that stands at ordinals from `start`."""
    places = np.arange(start, start + columns, dtype=np.int32)
    last = places if is_causal else np.minimum(places + window - 1, start + columns - 1)
    return places - (window - 1), last.astype(np.int32)


def expected(
    cache: KvCache,
    row: int,
    q: HalfArray,
    firsts: NDArray[np.int32],
    ordinals: NDArray[np.int32],
) -> NDArray[np.float64]:
    """y [T, H * D] in float64."""
    y = paged_attention_decode.reference(
        wide(q), cache.keys[row], cache.values[row], firsts=firsts, ordinals=ordinals,
        scale=cache.scale,
    )  # fmt: skip
    return y.reshape(q.shape[0], -1).astype(np.float64)


def poisoned(cache: KvCache, firsts: Intervals) -> KvCache:
    """A copy whose places before the least first of each row hold no numbers."""
    copy = deepcopy(cache)
    for row, row_firsts in enumerate(firsts):
        ordinals = np.arange(max(0, int(row_firsts.min())))
        pages, places = copy.page_tables[row, ordinals // PAGE_TOKENS], ordinals % PAGE_TOKENS
        copy.pages[pages, :, :, places] = {"bf16": 0x7FC1, "fp8": 0x7F, "int8": -128}[
            copy.kv_format
        ]
        if copy.scales is not None:
            copy.scales[pages, :, :, places] = np.nan
    return copy


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_see_their_windows_and_nothing_else(
    device: Device, head_dim: int, kv_format: str
) -> None:
    cache = filled_cache(kv_format, [start + COLUMNS for start in STARTS], 1, head_dim)
    q = random_bf16((COLUMNS * len(STARTS), 6, head_dim), 51)
    for window in WINDOWS:
        for is_causal in (False, True):
            pairs = [window_of(start, COLUMNS, window, is_causal=is_causal) for start in STARTS]
            firsts, ordinals = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            got = run_decode(device, poisoned(cache, firsts), q, ordinals, firsts=firsts)
            for row in range(len(STARTS)):
                part = slice(row * COLUMNS, (row + 1) * COLUMNS)
                check(got[part], expected(cache, row, q[part], firsts[row], ordinals[row]))


@pytest.mark.parametrize("head_dim", [32, 256])
def test_random_intervals_of_gated_heads(device: Device, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    lengths = [1, 40, 700, 2900]
    cache = filled_cache("bf16", lengths, 2, head_dim)
    counts = [1, 32, 9, 20]
    q = random_bf16((sum(counts), 8, head_dim), 53)
    gate = random_bf16(q.shape, 54, 2.0)
    pairs = [
        np.sort(rng.integers(0, length, (2, count), np.int32), axis=0)
        for length, count in zip(lengths, counts, strict=True)
    ]
    firsts, ordinals = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    got = run_decode(device, cache, q, ordinals, firsts=firsts, gate=gate)
    ends = np.cumsum([0, *counts])
    for row in range(len(lengths)):
        part = slice(ends[row], ends[row + 1])
        want = expected(cache, row, q[part], firsts[row], ordinals[row])
        check(got[part], want * sigmoid(wide(gate[part])).reshape(want.shape))


def test_a_window_far_into_a_context_needs_no_page_before_it(device: Device) -> None:
    cache = filled_cache("bf16", [2300], 1, 128)
    far = 1563
    spare = np.setdiff1d(np.arange(cache.pages.shape[0]), cache.page_tables)[:1]
    moved = deepcopy(cache)
    moved.page_tables = np.concatenate((np.tile(spare, far), cache.page_tables[0]), dtype=np.int32)[
        None
    ]
    firsts, ordinals = window_of(2300 - COLUMNS, COLUMNS, 2048, is_causal=False)
    offset = np.int32(far * PAGE_TOKENS)
    q = random_bf16((COLUMNS, 8, 128), 57)
    near = poisoned(moved, [firsts + offset])
    got = run_decode(device, near, q, [ordinals + offset], firsts=[firsts + offset])
    check(got, expected(cache, 0, q, firsts, ordinals))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_bits_from_key_0_are_those_without_intervals(
    device: Device, head_dim: int, kv_format: str
) -> None:
    lengths = [20, 333, 2900]
    cache = filled_cache(kv_format, lengths, 2, head_dim)
    q = random_bf16((COLUMNS * 3, 12, head_dim), 59)
    gate = random_bf16(q.shape, 60, 2.0)
    ordinals = last_ordinals(lengths, COLUMNS)
    zeros = [np.zeros(COLUMNS, np.int32)] * 3
    plain = run_decode(device, cache, q, ordinals, gate=gate)
    assert (run_decode(device, cache, q, ordinals, firsts=zeros, gate=gate) == plain).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_bits_depend_on_the_column_alone(device: Device, kv_format: str) -> None:
    lengths = [2900, 40, 333]
    cache = filled_cache(kv_format, lengths, 2, 128)
    q = random_bf16((3 * COLUMNS, 8, 128), 61)
    pairs = [
        window_of(length - COLUMNS, COLUMNS, window, is_causal=False)
        for length, window in zip(lengths, (600, 7, 100), strict=True)
    ]
    firsts, ordinals = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    firsts[0][3] = 0
    firsts[2][[0, 5]] = 320
    whole = run_decode(device, cache, q, ordinals, firsts=firsts)
    for row in range(3):
        for first, last in ((0, 1), (16, 17), (2, 5), (4, 16)):
            part = slice(COLUMNS * row + first, COLUMNS * row + last)
            alone = run_decode(
                device, cache, q[part], [ordinals[row][first:last]],
                firsts=[firsts[row][first:last]], rows=[row],
            )  # fmt: skip
            assert (alone == whole[part]).all()
    rows, places = [2, 0, 1], [2 * COLUMNS + 9, 9, COLUMNS + 9]
    shuffled = run_decode(
        device, cache, q[places], [ordinals[row][9:10] for row in rows],
        firsts=[firsts[row][9:10] for row in rows], rows=rows,
    )  # fmt: skip
    assert (shuffled == whole[places]).all()


def test_bits_do_not_depend_on_tiles_and_stages(device: Device) -> None:
    cache = filled_cache("bf16", [2900], 1, 64)
    q = random_bf16((COLUMNS, 5, 64), 67)
    firsts, ordinals = window_of(2900 - COLUMNS, COLUMNS, 500, is_causal=False)
    whole = run_decode(device, cache, q, [ordinals], firsts=[firsts])
    pages = view_pages("test", upload(device, cache))
    for tile in (8, 16, 32):
        for stages in (2, 3, 8):
            shape = paged_attention_decode.decode_shape(pages, tile, stages, rows=1)
            got = run_decode(device, cache, q, [ordinals], firsts=[firsts], shape=shape)
            assert (got == whole).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_columns_that_see_no_key_are_zero_and_change_nothing(
    device: Device, kv_format: str
) -> None:
    cache = filled_cache(kv_format, [300, 70, 64], 1, 64)
    q = random_bf16((9, 4, 64), 71)
    ordinals = [np.array(item, np.int32) for item in ([299, 298, -1, 500], [-1, 5], [63, -1, 10])]
    firsts = [np.array(item, np.int32) for item in ([290, 295, 0, 501], [-7, 6], [63, 0, -3])]
    hull = [np.array([first], np.int32) for first in (290, 70, 0)]
    got = run_decode(device, poisoned(cache, hull), q, ordinals, firsts=firsts)
    seen = [0, 1, 6, 8]
    assert (np.delete(got, seen, axis=0) == 0).all()
    check(got[[0, 1]], expected(cache, 0, q[[0, 1]], firsts[0][:2], ordinals[0][:2]))
    check(got[[6, 8]], expected(cache, 2, q[[6, 8]], firsts[2][[0, 2]], ordinals[2][[0, 2]]))
    alone = run_decode(device, cache, q[:2], [ordinals[0][:2]], firsts=[firsts[0][:2]], rows=[0])
    assert (alone == got[:2]).all()
    blind = [np.full(3, -1, np.int32)] * 3
    assert (run_decode(device, cache, q, blind, firsts=blind) == 0).all()


def test_a_captured_launch_follows_its_intervals(device: Device) -> None:
    cp = device.cp
    cache = filled_cache("bf16", [200, 2600], 2, 128)
    q = random_bf16((4, 8, 128), 73)
    pages, queries = upload(device, cache), cp.asarray(q)
    tables, starts = cp.asarray(cache.page_tables), cp.asarray(np.array([0, 2, 4], np.int32))
    firsts, ordinals = cp.zeros(4, cp.int32), cp.zeros(4, cp.int32)
    y = cp.zeros((4, 1024), cp.uint16)
    size = paged_attention_decode.workspace_size(4, 8, 128, tables.shape[1])
    workspace = cp.zeros(size, cp.float32)

    def enqueue() -> None:
        paged_attention_decode.launch(
            device.kernels, queries, pages, y, page_tables=tables, row_starts=starts,
            ordinals=ordinals, firsts=firsts, workspace=workspace, scale=cache.scale,
            columns_per_row=2, stream=device.stream.ptr,
        )  # fmt: skip

    enqueue()
    device.stream.synchronize()
    device.stream.begin_capture()
    enqueue()
    enqueue()
    graph = device.stream.end_capture()
    for lows, highs in (
        ([190, 191, 2500, 0], [199, 198, 2599, 2599]),
        ([0, 100, 2047, 2048], [0, 163, 2048, 2560]),
    ):
        firsts[...] = cp.asarray(np.array(lows, np.int32))
        ordinals[...] = cp.asarray(np.array(highs, np.int32))
        y[...] = 0x7FC1
        graph.launch(device.stream)
        device.stream.synchronize()
        want = [
            expected(cache, row, q[part], np.array(lows[part]), np.array(highs[part]))
            for row, part in enumerate((slice(0, 2), slice(2, 4)))
        ]
        check(cp.asnumpy(y), np.concatenate(want))
