"""paged_attention_decode on a device, over a cache in NumPy, its outputs poisoned and fenced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ninfer.ops import paged_attention_decode
from ninfer.ops.float_codecs import HalfArray, bf16_to_float
from ninfer.ops.kv_pages import stored_dim
from tests.helpers.device import Device
from tests.helpers.fenced import Fenced
from tests.helpers.kv_cache import KvCache, PagesOnDevice, projection, stored
from tests.helpers.tolerance import (
    BF16_ATTENTION,
    BF16_ATTENTION_L2,
    assert_close,
    assert_close_overall,
)


def upload(device: Device, cache: KvCache) -> PagesOnDevice:
    cp = device.cp
    return PagesOnDevice(
        cp.asarray(cache.pages), None if cache.scales is None else cp.asarray(cache.scales)
    )


def check(got: HalfArray, want: NDArray[np.float64]) -> None:
    assert_close(bf16_to_float(got), want, BF16_ATTENTION)
    assert_close_overall(bf16_to_float(got), want, BF16_ATTENTION_L2)


def run_decode(
    device: Device,
    cache: KvCache,
    q: HalfArray,
    ordinals: Sequence[NDArray[np.int32]],
    *,
    firsts: Sequence[NDArray[np.int32]] | None = None,
    gate: HalfArray | None = None,
    columns_per_row: int | None = None,
    rows: Sequence[int] | None = None,
    **options: Any,
) -> HalfArray:
    """y [T, H * D]; ordinals and firsts of each row's columns; rows of the cache, all by default.

    Fails where anything but y and the workspace was written.
    """
    cp = device.cp
    counts = [item.size for item in ordinals]
    tables = cache.page_tables if rows is None else cache.page_tables[list(rows)]
    y = Fenced(cp, (q.shape[0], q.shape[1] * q.shape[2]), "uint16")
    tokens, heads, head_dim = q.shape
    size = paged_attention_decode.workspace_size(
        tokens, heads, stored_dim(head_dim), tables.shape[1]
    )
    workspace = Fenced(cp, (size,), "float32")
    workspace.array[...] = np.nan
    queries = cp.asarray(stored(q))
    paged_attention_decode.launch(
        device.kernels,
        queries,
        upload(device, cache),
        y.array,
        page_tables=cp.asarray(tables),
        row_starts=cp.asarray(np.cumsum([0, *counts]).astype(np.int32)),
        ordinals=cp.asarray(np.concatenate(ordinals).astype(np.int32)),
        workspace=workspace.array,
        scale=cache.scale,
        columns_per_row=columns_per_row or max(1, *counts),
        firsts=None if firsts is None else cp.asarray(np.concatenate(firsts).astype(np.int32)),
        gate=None if gate is None else cp.asarray(projection(gate, cache.pages.shape[2])),
        stream=device.stream.ptr,
        **options,
    )
    device.stream.synchronize()
    workspace.read()
    assert (cp.asnumpy(queries) == stored(q)).all()
    result: HalfArray = y.read()
    return result


def last_ordinals(lengths: Sequence[int], columns: int = 1) -> list[NDArray[np.int32]]:
    return [np.arange(length - columns, length, dtype=np.int32) for length in lengths]
