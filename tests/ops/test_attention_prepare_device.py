"""attention_prepare on the device: norms and rotation in float64, coding and places bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ninfer.contract.arrays import FloatArray
from ninfer.contract.model import RopeConfig
from ninfer.ops import attention_prepare, kv_pages, rotary
from ninfer.ops.attention_prepare import HeadNorms, RotaryTables
from ninfer.ops.float_codecs import HalfArray, bf16_to_float, float_to_bf16
from tests.helpers.device import Device, open_device
from tests.helpers.fenced import POISON, Fenced
from tests.helpers.kv_cache import (
    FORMATS,
    KvCache,
    PagesOnDevice,
    empty_cache,
    random_bf16,
    stored,
    wide,
)
from tests.helpers.tolerance import ROTATED_BF16, assert_close

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, PAGES, EPS = 6, 2, 3, 1e-6
ROTATED_DIMS = [(32, 32), (32, 12), (64, 64), (128, 128), (256, 64), (256, 36)]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    opened = open_device(tmp_path_factory.mktemp("kernels"))
    with opened.stream:
        yield opened


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Columns at distinct places of two rows, the rotary positions unlike the ordinals."""

    qkv: HalfArray
    q_norm: HalfArray
    k_norm: HalfArray
    rope: RopeConfig
    offset: float
    positions: NDArray[np.int32]
    ordinals: NDArray[np.int32]
    column_rows: NDArray[np.int32]

    @property
    def head_dim(self) -> int:
        return self.q_norm.size

    def heads(self, part: str) -> HalfArray:
        """q, k or v [T, heads, D]."""
        dim, width = self.head_dim, self.qkv.shape[1]
        per_head = (width // dim - 2 * KV_HEADS) // HEADS
        first = per_head * HEADS * dim
        if part == "q":
            return self.qkv[:, :first].reshape(-1, HEADS, per_head, dim)[:, :, 0]
        start = first if part == "k" else first + KV_HEADS * dim
        return self.qkv[:, start : start + KV_HEADS * dim].reshape(-1, KV_HEADS, dim)

    @property
    def keys_and_values(self) -> HalfArray:
        return self.qkv[:, -2 * KV_HEADS * self.head_dim :]

    def columns(self, first: int, last: int) -> Case:
        part = slice(first, last)
        return replace(
            self,
            qkv=self.qkv[part],
            positions=self.positions[:, part],
            ordinals=self.ordinals[part],
            column_rows=self.column_rows[part],
        )


def make_case(
    tokens: int,
    head_dim: int,
    *,
    rotary_dim: int | None = None,
    has_gate: bool = True,
    offset: float = 1.0,
    magnitude: float = 1.0,
) -> Case:
    rng = np.random.default_rng([tokens, head_dim])
    width = ((2 if has_gate else 1) * HEADS + 2 * KV_HEADS) * head_dim
    half = (rotary_dim or head_dim // 4) // 2
    rope = RopeConfig(1e6, 2 * half, mrope_section=(half - 2 * (half // 3), half // 3, half // 3))
    places = rng.permutation(2 * PAGES * 64)[:tokens]
    return Case(
        random_bf16((tokens, width), 1, magnitude),
        random_bf16((head_dim,), 2, 0.5),
        random_bf16((head_dim,), 3, 0.5),
        rope,
        offset,
        rng.integers(0, 262144, (3, tokens), np.int32),
        (places // 2).astype(np.int32),
        (places % 2).astype(np.int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    q: HalfArray
    pages: NDArray[Any]
    scales: NDArray[Any] | None


def run(
    device: Device,
    case: Case,
    cache: KvCache,
    *,
    has_queries: bool = True,
    value_scale: float = 1.0,
    is_chained: bool = False,
) -> Outcome:
    cp = device.cp
    width = kv_pages.stored_dim(case.head_dim)
    q = Fenced(cp, (case.qkv.shape[0], HEADS, width), "uint16")
    pages = Fenced(cp, cache.pages.shape, cache.pages.dtype.name)
    pages.array[...] = cp.asarray(cache.pages)
    scales = None
    if cache.scales is not None:
        scales = Fenced(cp, cache.scales.shape, cache.scales.dtype.name)
        scales.array[...] = cp.asarray(cache.scales)
    constants = rotary.frequencies(case.rope)
    source = case.qkv if has_queries else np.ascontiguousarray(case.keys_and_values)
    qkv = cp.asarray(source)
    attention_prepare.launch(
        device.kernels,
        qkv,
        q.array if has_queries else None,
        PagesOnDevice(pages.array, None if scales is None else scales.array),
        norms=HeadNorms(cp.asarray(case.q_norm), cp.asarray(case.k_norm), EPS, case.offset),
        rotary_tables=RotaryTables(
            cp.asarray(constants.inverse), cp.asarray(constants.axes), constants.scale
        ),
        rope_positions=cp.asarray(np.ascontiguousarray(case.positions)),
        ordinals=cp.asarray(case.ordinals),
        column_rows=cp.asarray(case.column_rows),
        page_tables=cp.asarray(cache.page_tables),
        stream=device.stream.ptr,
        value_scale=value_scale,
        is_chained=is_chained,
    )
    device.stream.synchronize()
    assert (cp.asnumpy(qkv) == source).all()
    return Outcome(q.read(), pages.read(), None if scales is None else scales.read())


def expected(case: Case, part: str) -> FloatArray:
    """Normed and rotated in float64; angles are float32 by contract."""
    cos, sin = rotary.angles(case.positions, rotary.frequencies(case.rope))
    weight = case.q_norm if part == "q" else case.k_norm
    return attention_prepare.reference(
        wide(case.heads(part)), wide(weight), cos.astype(np.float64), sin.astype(np.float64),
        eps=EPS, offset=case.offset,
    )  # fmt: skip


def new_cache(kv_format: str, head_dim: int) -> KvCache:
    return empty_cache(kv_format, 2, PAGES, KV_HEADS, head_dim, seed=5)


def written(case: Case, cache: KvCache) -> tuple[NDArray[Any], NDArray[Any]]:
    """Page and offset of each column."""
    pages = cache.page_tables[case.column_rows, case.ordinals // 64]
    return pages, case.ordinals % 64


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), ROTATED_DIMS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_queries_and_keys_match_float64(
    device: Device, tokens: int, head_dim: int, rotary_dim: int, has_gate: bool
) -> None:
    case = make_case(tokens, head_dim, rotary_dim=rotary_dim, has_gate=has_gate)
    cache = new_cache("bf16", head_dim)
    got = run(device, case, cache)
    page, offset = written(case, cache)
    keys, values = (got.pages[page, part, :, offset] for part in (0, 1))
    assert_close(bf16_to_float(got.q[..., :head_dim]), expected(case, "q"), ROTATED_BF16)
    assert_close(bf16_to_float(keys[..., :head_dim]), expected(case, "k"), ROTATED_BF16)
    assert (values == stored(case.heads("v"))).all()
    for heads in (got.q, keys):
        assert (heads[..., head_dim:] == 0).all()


@pytest.mark.parametrize("head_dim", kv_pages.HEAD_DIMS)
def test_nothing_but_the_columns_places_is_written(device: Device, head_dim: int) -> None:
    case, cache = make_case(20, head_dim), new_cache("bf16", head_dim)
    got = run(device, case, cache)
    page, offset = written(case, cache)
    got.pages[page, :, :, offset] = 0x7FC1
    assert (got.pages == 0x7FC1).all()


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
@pytest.mark.parametrize("head_dim", kv_pages.HEAD_DIMS)
@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_eight_bit_pages_code_what_bf16_pages_hold(
    device: Device, kv_format: str, head_dim: int, magnitude: float
) -> None:
    case = make_case(40, head_dim, magnitude=magnitude)
    case.heads("v")[3] = 0
    plain, cache = new_cache("bf16", head_dim), new_cache(kv_format, head_dim)
    exact, got = run(device, case, plain), run(device, case, cache)
    assert (got.q == exact.q).all()
    page, offset = written(case, cache)
    assert got.scales is not None
    for part in (0, 1):
        codes, scales = kv_pages.encode(
            bf16_to_float(exact.pages[page, part, :, offset]), kv_format
        )
        assert (got.scales[page, part, :, offset] == scales).all()
        assert (got.pages[page, part, :, offset] == codes).all()
    got.pages[page, :, :, offset] = cache.pages[0, 0, 0, 0, 0]
    assert (got.pages == cache.pages).all()


def same_pages(got: Outcome, want: Outcome) -> bool:
    """Bit for bit, with their scales."""
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in ((got.pages, want.pages), (got.scales, want.scales))
        if a is not None
    )


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", kv_pages.HEAD_DIMS)
def test_keys_and_values_need_no_queries(device: Device, head_dim: int, kv_format: str) -> None:
    case, cache = make_case(21, head_dim, has_gate=False), new_cache(kv_format, head_dim)
    case.ordinals[[2, 20]] = -1
    want = run(device, case, cache, value_scale=1.5)
    for is_chained in (False, True):
        got = run(device, case, cache, has_queries=False, value_scale=1.5, is_chained=is_chained)
        assert same_pages(got, want)
        assert (got.q == want.q.dtype.type(POISON << 8 | POISON)).all()


@pytest.mark.parametrize("value_scale", [0.3, -4.0, 0.0])
@pytest.mark.parametrize("head_dim", kv_pages.HEAD_DIMS)
def test_values_are_scaled_before_they_are_rounded(
    device: Device, head_dim: int, value_scale: float
) -> None:
    case = make_case(40, head_dim)
    plain = run(device, case, new_cache("bf16", head_dim))
    exact = run(device, case, new_cache("bf16", head_dim), value_scale=value_scale)
    page, offset = written(case, new_cache("bf16", head_dim))
    scaled = bf16_to_float(stored(case.heads("v"))) * np.float32(value_scale)
    assert (exact.pages[page, 1, :, offset] == float_to_bf16(scaled)).all()
    assert (exact.pages[page, 0, :, offset] == plain.pages[page, 0, :, offset]).all()
    assert (exact.q == plain.q).all()
    for kv_format in ("fp8", "int8"):
        got = run(device, case, new_cache(kv_format, head_dim), value_scale=value_scale)
        assert got.scales is not None
        for part in (0, 1):
            codes, scales = kv_pages.encode(
                bf16_to_float(exact.pages[page, part, :, offset]), kv_format
            )
            assert (got.scales[page, part, :, offset] == scales).all()
            assert (got.pages[page, part, :, offset] == codes).all()


def test_values_that_bf16_rounds_to_the_largest_code_saturate(device: Device) -> None:
    case = make_case(4, 64, has_gate=False)
    case.heads("v")[...] = 0x7F7F
    cache = new_cache("int8", 64)
    got = run(device, case, cache)
    page, offset = written(case, cache)
    assert got.scales is not None
    assert np.isfinite(got.scales[page, 1, :, offset]).all()
    assert (got.pages[page, 1, :, offset] == 127).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_columns_do_not_depend_on_one_another(device: Device, kv_format: str) -> None:
    case, cache = make_case(16, 256), new_cache(kv_format, 256)
    whole = run(device, case, cache)
    for first, last in ((0, 1), (3, 7), (15, 16)):
        part = run(device, case.columns(first, last), cache, is_chained=True)
        assert (part.q == whole.q[first:last]).all()
        page, offset = written(case.columns(first, last), cache)
        assert (part.pages[page, :, :, offset] == whole.pages[page, :, :, offset]).all()


def test_padding_gets_zero_queries_and_no_place(device: Device) -> None:
    case = make_case(5, 128)
    case.ordinals[[1, 4]] = -1
    case.column_rows[1] = 1 << 20
    cache = new_cache("bf16", 128)
    got = run(device, case, cache)
    assert (got.q[[1, 4]] == 0).all()
    keep = [0, 2, 3]
    assert_close(bf16_to_float(got.q[keep]), expected(case, "q")[keep], ROTATED_BF16)
    assert (got.pages != 0x7FC1).any((-1, -2)).sum() <= 2 * KV_HEADS * len(keep)
