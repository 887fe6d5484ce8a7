"""Attention over pages on the device: decode and prefill against float64, and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.ops import paged_attention_decode, paged_attention_prefill
from ninfer.ops.float_codecs import HalfArray, bf16_to_float
from ninfer.ops.kv_pages import HEAD_DIMS, view_pages
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import Fenced
from tests.helpers.kv_cache import (
    FORMATS,
    KvCache,
    attend,
    filled_cache,
    projection,
    random_bf16,
    stored,
)
from tests.helpers.paged_decode import check, last_ordinals, run_decode, upload
from tests.helpers.tolerance import BF16_ATTENTION, assert_close

pytestmark = pytest.mark.gpu

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 127, 128, 129]
LONG = [2047, 2048, 2049, 2304, 2305, 4000]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 1), (8, 2), (16, 1), (18, 2)])
def test_decode_of_rows_of_all_lengths(
    device: Device, heads: int, kv_heads: int, head_dim: int, kv_format: str
) -> None:
    cache = filled_cache(kv_format, LENGTHS, kv_heads, head_dim, max_pages=4)
    q = random_bf16((len(LENGTHS), heads, head_dim), 7)
    gate = random_bf16(q.shape, 8, 2.0)
    got = run_decode(device, cache, q, last_ordinals(LENGTHS), gate=gate)
    want = [
        attend(cache, row, q[row : row + 1], length - 1, gate=gate[row : row + 1])
        for row, length in enumerate(LENGTHS)
    ]
    check(got, np.concatenate(want))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("length", LONG)
def test_decode_across_fine_and_coarse_units(device: Device, length: int, kv_format: str) -> None:
    cache = filled_cache(kv_format, [length], 2, 128, max_pages=70)
    q = random_bf16((1, 12, 128), 9)
    got = run_decode(device, cache, q, last_ordinals([length]))
    check(got, attend(cache, 0, q, length - 1))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize("columns", [2, 5, 16])
@pytest.mark.parametrize("length", [16, 64, 70, 200, 2050])
def test_decode_of_several_columns_is_causal(
    device: Device, length: int, columns: int, head_dim: int, kv_format: str
) -> None:
    cache = filled_cache(kv_format, [length], 1, head_dim, max_pages=40)
    q = random_bf16((columns, 6, head_dim), 11)
    got = run_decode(device, cache, q, last_ordinals([length], columns))
    check(got, attend(cache, 0, q, length - columns))


@pytest.mark.parametrize(("columns", "heads"), [(17, 6), (32, 16)])
def test_decode_of_many_columns(device: Device, columns: int, heads: int) -> None:
    lengths = [columns, 70, 2100]
    cache = filled_cache("bf16", lengths, 1, 128, max_pages=34)
    q = random_bf16((3 * columns, heads, 128), 12)
    ordinals = last_ordinals(lengths, columns)
    got = run_decode(device, cache, q, ordinals)
    for row, length in enumerate(lengths):
        part = slice(row * columns, (row + 1) * columns)
        check(got[part], attend(cache, row, q[part], length - columns))
    few = run_decode(device, cache, q[columns : columns + 3], [ordinals[1][:3]], rows=[1])
    assert (few == got[columns : columns + 3]).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_bits_depend_on_the_column_alone(device: Device, kv_format: str) -> None:
    lengths = [2300, 40, 333]
    cache = filled_cache(kv_format, lengths, 2, 256, max_pages=40)
    q = random_bf16((48, 8, 256), 13)
    ordinals = last_ordinals(lengths, 16)
    whole = run_decode(device, cache, q, ordinals)
    assert (run_decode(device, cache, q, ordinals, is_chained=True) == whole).all()
    for row in range(3):
        for first, last in ((0, 1), (15, 16), (2, 5), (7, 15)):
            part = slice(16 * row + first, 16 * row + last)
            alone = run_decode(device, cache, q[part], [ordinals[row][first:last]], rows=[row])
            assert (alone == whole[part]).all()
    mates = [ordinals[row][9:10] for row in (2, 0, 1)]
    shuffled = run_decode(device, cache, q[[41, 9, 25]], mates, rows=[2, 0, 1])
    assert (shuffled == whole[[41, 9, 25]]).all()


def test_decode_bits_do_not_depend_on_tiles_and_stages(device: Device) -> None:
    cache = filled_cache("bf16", [2600], 1, 64, max_pages=64)
    q = random_bf16((4, 5, 64), 17)
    ordinals = last_ordinals([2600], 4)
    whole = run_decode(device, cache, q, ordinals)
    pages = view_pages("test", upload(device, cache))
    for tile in (8, 16, 32):
        for stages in (2, 3, 8):
            shape = paged_attention_decode.decode_shape(pages, tile, stages, rows=1)
            assert (run_decode(device, cache, q, ordinals, shape=shape) == whole).all()


def test_decode_of_padding_is_zero(device: Device) -> None:
    cache = filled_cache("bf16", [100, 70, 1], 1, 128, max_pages=2)
    q = random_bf16((6, 4, 128), 19)
    ordinals = [np.array(item, np.int32) for item in ([98, 99, -1], [], [-1, -1, -1])]
    got = run_decode(device, cache, q, ordinals, columns_per_row=5)
    assert (got[2:] == 0).all()
    check(got[:2], attend(cache, 0, q[:2], 98))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_of_large_scores(device: Device, kv_format: str) -> None:
    cache = filled_cache(kv_format, [300], 1, 256, magnitude=200.0)
    q = random_bf16((1, 4, 256), 23, 30.0)
    got = run_decode(device, cache, q, last_ordinals([300]))
    assert_close(bf16_to_float(got), attend(cache, 0, q, 299), BF16_ATTENTION)


def run_prefill(
    device: Device,
    cache: KvCache,
    q: HalfArray,
    ordinals: NDArray[np.int32],
    *,
    gate: HalfArray | None = None,
    is_chained: bool = False,
) -> HalfArray:
    cp = device.cp
    y = Fenced(cp, (q.shape[0], q.shape[1] * q.shape[2]), "uint16")
    queries = cp.asarray(stored(q))
    paged_attention_prefill.launch(
        device.kernels,
        queries,
        upload(device, cache),
        y.array,
        page_table=cp.asarray(cache.page_tables[0]),
        ordinals=cp.asarray(ordinals),
        scale=cache.scale,
        gate=None if gate is None else cp.asarray(projection(gate, cache.pages.shape[2])),
        stream=device.stream.ptr,
        is_chained=is_chained,
    )
    device.stream.synchronize()
    assert (cp.asnumpy(queries) == stored(q)).all()
    result: HalfArray = y.read()
    return result


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 1), (8, 2)])
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 1), (0, 31), (0, 130), (1, 63), (64, 65), (100, 33)]
)
def test_prefill_matches_float64(
    device: Device,
    start: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv_format: str,
) -> None:
    length = start + tokens
    cache = filled_cache(kv_format, [length], kv_heads, head_dim, max_pages=5)
    q = random_bf16((tokens, heads, head_dim), 29)
    gate = random_bf16(q.shape, 31, 2.0)
    ordinals = np.arange(start, length, dtype=np.int32)
    got = run_prefill(device, cache, q, ordinals, gate=gate)
    check(got, attend(cache, 0, q, start, gate=gate, rounds_codes=True))
    assert (run_prefill(device, cache, q, ordinals, gate=gate, is_chained=True) == got).all()


def test_prefill_without_gate_and_with_padding(device: Device) -> None:
    cache = filled_cache("bf16", [150], 2, 128, max_pages=3)
    q = random_bf16((90, 4, 128), 37)
    ordinals = np.arange(70, 160, dtype=np.int32)
    ordinals[80:] = -1
    got = run_prefill(device, cache, q, ordinals)
    check(got[:80], attend(cache, 0, q[:80], 70))
    assert (got[80:] == 0).all()


def test_prefill_of_large_scores_and_many_pages(device: Device) -> None:
    cache = filled_cache("bf16", [1000], 1, 256, magnitude=30.0)
    q = random_bf16((200, 4, 256), 41, 10.0)
    got = run_prefill(device, cache, q, np.arange(800, 1000, dtype=np.int32))
    assert_close(bf16_to_float(got), attend(cache, 0, q, 800), BF16_ATTENTION)


def test_a_captured_decode_follows_its_inputs(device: Device) -> None:
    cp = device.cp
    lengths = [90, 300]
    cache = filled_cache("bf16", lengths, 2, 128, max_pages=8)
    q = random_bf16((2, 8, 128), 43)
    pages, queries = upload(device, cache), cp.asarray(q)
    tables, starts = cp.asarray(cache.page_tables), cp.asarray(np.array([0, 1, 2], np.int32))
    ordinals, y = cp.zeros(2, cp.int32), cp.zeros((2, 1024), cp.uint16)
    size = paged_attention_decode.workspace_size(2, 8, 128, 8)
    workspace = cp.zeros(size, cp.float32)

    def enqueue() -> None:
        paged_attention_decode.launch(
            device.kernels, queries, pages, y, page_tables=tables, row_starts=starts,
            ordinals=ordinals, workspace=workspace, scale=cache.scale, columns_per_row=1,
            stream=device.stream.ptr, is_chained=True,
        )  # fmt: skip

    enqueue()
    device.stream.synchronize()
    device.stream.begin_capture()
    enqueue()
    enqueue()
    graph = device.stream.end_capture()
    for step in ([89, 299], [0, 63], [64, 128]):
        ordinals[...] = cp.asarray(np.array(step, np.int32))
        y[...] = 0x7FC1
        graph.launch(device.stream)
        device.stream.synchronize()
        want = [attend(cache, row, q[row : row + 1], step[row]) for row in (0, 1)]
        check(cp.asnumpy(y), np.concatenate(want))
