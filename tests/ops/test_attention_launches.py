"""What the attention Ops queue, and which arguments they refuse; without a device."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import pytest

from ninfer.contract.errors import OpContractError
from ninfer.kernels.library import DeviceLimits
from ninfer.ops import attention_prepare, paged_attention_decode, paged_attention_prefill
from ninfer.ops.attention_prepare import HeadNorms, RotaryTables
from ninfer.ops.kv_pages import view_pages
from tests.helpers.recorded_launches import H200, RecordingLibrary, ShapeOnly, struct_bytes

SMALL = DeviceLimits("small", "sm_89", 128, 101376, 102400)


@dataclass(frozen=True, slots=True)
class Pages:
    pages: ShapeOnly
    scales: ShapeOnly | None = None


def make_pages(kv_format: str = "bf16", kv_heads: int = 4, head_dim: int = 256) -> Pages:
    shape = (50, 2, kv_heads, 64, head_dim)
    if kv_format == "bf16":
        return Pages(ShapeOnly(shape))
    if kv_format == "fp8":
        return Pages(ShapeOnly(shape, "uint8"), ShapeOnly(shape[:-1], "float32"))
    groups = (*shape[:-1], head_dim // 64)
    return Pages(ShapeOnly(shape, "int8"), ShapeOnly(groups, "float16"))


def launch_prepare(kernels: RecordingLibrary, **changes: Any) -> None:
    """Of 5 columns of two rows, 24 heads with gates; `changes` replace arguments."""
    arguments: dict[str, Any] = {
        "qkv": ShapeOnly((5, (2 * 24 + 8) * 256)),
        "q": ShapeOnly((5, 24, 256)),
        "kv": make_pages(),
        "norms": HeadNorms(ShapeOnly((256,)), ShapeOnly((256,)), 1e-6, 1.0),
        "rotary_tables": make_tables(32, 32),
        "rope_positions": ShapeOnly((3, 5), "int32"),
        "ordinals": ShapeOnly((5,), "int32"),
        "column_rows": ShapeOnly((5,), "int32"),
        "page_tables": ShapeOnly((2, 9), "int32"),
    }
    arguments.update(changes)
    attention_prepare.launch(kernels.library, **arguments, stream=0, is_chained=True)


def make_tables(frequencies: int, axes: int) -> RotaryTables:
    return RotaryTables(ShapeOnly((frequencies,), "float32"), ShapeOnly((axes,), "int32"), 1.0)


def test_prepare_gives_every_head_of_a_column_a_warp() -> None:
    kernels = RecordingLibrary()
    launch_prepare(kernels)
    launch = kernels.only()
    assert launch.entry == "attention_prepare_bf16_256"
    assert launch.grid[0] * launch.block[0] // 32 >= 5 * (24 + 8)
    assert (launch["has_gate"], launch["half"], launch["max_pages"]) == (1, 32, 9)
    assert launch.arguments.dtype.itemsize == struct_bytes(
        "attention_prepare", "AttentionPrepareParams"
    )
    assert launch.options["programmatic"]


def test_prepare_sees_from_the_width_that_there_are_no_gates() -> None:
    kernels = RecordingLibrary()
    launch_prepare(kernels, qkv=ShapeOnly((5, 32 * 256)))
    assert kernels.only()["has_gate"] == 0


def test_prepare_of_heads_of_32_fills_places_of_64() -> None:
    kernels = RecordingLibrary()
    norms = HeadNorms(ShapeOnly((32,)), ShapeOnly((32,)), 1e-6, 1.0)
    for width, has_gate in ((32 * 32, 0), (56 * 32, 1)):
        launch_prepare(
            kernels,
            qkv=ShapeOnly((5, width)),
            q=ShapeOnly((5, 24, 64)),
            kv=make_pages(head_dim=64),
            norms=norms,
            rotary_tables=make_tables(16, 16),
        )
        assert kernels.launches[-1].entry == "attention_prepare_bf16_32"
        assert kernels.launches[-1]["has_gate"] == has_gate


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8"])
def test_prepare_without_queries_takes_keys_and_values(kv_format: str) -> None:
    kernels = RecordingLibrary()
    launch_prepare(
        kernels, q=None, qkv=ShapeOnly((5, 8 * 256)), kv=make_pages(kv_format), value_scale=0.75
    )
    launch = kernels.only()
    assert launch.entry == f"attention_prepare_{kv_format}_256"
    assert launch.grid[0] * launch.block[0] // 32 >= 5 * 8
    assert (launch["q"], launch["heads"], launch["has_gate"], launch["tokens"]) == (0, 0, 0, 5)
    assert launch["value_scale"] == 0.75


def test_prepare_leaves_values_as_they_are() -> None:
    kernels = RecordingLibrary()
    launch_prepare(kernels)
    assert kernels.only()["value_scale"] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"qkv": ShapeOnly((5, 40 * 256))},
        {"qkv": ShapeOnly((4, 56 * 256))},
        {"qkv": ShapeOnly((5, 56 * 256), address=1032)},
        {"q": ShapeOnly((5, 24, 128))},
        {"q": ShapeOnly((5, 22, 256))},
        {"kv": make_pages(head_dim=128)},
        {"norms": HeadNorms(ShapeOnly((128,)), ShapeOnly((256,)), 1e-6, 1.0)},
        {"norms": HeadNorms(ShapeOnly((32,)), ShapeOnly((32,)), 1e-6, 1.0)},
        {"norms": HeadNorms(ShapeOnly((200,)), ShapeOnly((200,)), 1e-6, 1.0)},
        {"norms": HeadNorms(ShapeOnly((256,)), ShapeOnly((256,)), 0.0, 1.0)},
        {"rotary_tables": make_tables(129, 129)},
        {"rotary_tables": make_tables(32, 31)},
        {"rope_positions": ShapeOnly((5,), "int32")},
        {"ordinals": ShapeOnly((5,), "int64")},
        {"page_tables": ShapeOnly((9,), "int32")},
        {"value_scale": float("inf")},
        {"q": None},
        {"q": None, "qkv": ShapeOnly((5, 8 * 128))},
        {"q": None, "qkv": ShapeOnly((4, 8 * 256))},
        {"q": None, "qkv": ShapeOnly((0, 8 * 256))},
        {"qkv": ShapeOnly((5, 8 * 256))},
    ],
)
def test_prepare_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="attention_prepare"):
        launch_prepare(kernels, **change)
    assert not kernels.launches


def launch_decode(kernels: RecordingLibrary, **changes: Any) -> None:
    """Of 3 rows with a column each, 24 heads with gates; `changes` replace arguments."""
    size = paged_attention_decode.workspace_size(3, 24, 256, 2048)
    arguments: dict[str, Any] = {
        "q": ShapeOnly((3, 24, 256)),
        "kv": make_pages(),
        "y": ShapeOnly((3, 24 * 256)),
        "page_tables": ShapeOnly((3, 2048), "int32"),
        "row_starts": ShapeOnly((4,), "int32"),
        "ordinals": ShapeOnly((3,), "int32"),
        "workspace": ShapeOnly((size,), "float32"),
        "columns_per_row": 1,
        "gate": ShapeOnly((3, 56 * 256)),
    }
    arguments.update(changes)
    paged_attention_decode.launch(kernels.library, **arguments, scale=0.0625, stream=0)


def test_decode_queues_a_resident_grid_and_its_combination() -> None:
    kernels = RecordingLibrary()
    launch_decode(kernels)
    units, combine = kernels.launches
    assert units.entry == "paged_attention_decode_bf16_256_8"
    assert units.grid[0] == 2 * H200.num_multiprocessors
    assert (units["group"], units["row_blocks"], units["stages"]) == (6, 1, 3)
    assert units["scale_log2e"] == pytest.approx(0.0625 * log2(np.e))
    assert combine.entry == "paged_attention_combine_256"
    assert combine.grid == (3 * 24, 4, 1)
    assert combine["sums"] == combine["outputs"] + 3 * 24 * units["max_units"] * 256 * 4
    family = "paged_attention_decode"
    assert units.arguments.dtype.itemsize == struct_bytes(family, "PagedDecodeParams")
    assert combine.arguments.dtype.itemsize == struct_bytes(family, "PagedCombineParams")


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(("head_dim", "width"), [(32, 64), (64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize(("columns", "tile"), [(1, 8), (2, 16), (17, 32)])
def test_intervals_have_entries_of_their_own(
    columns: int, tile: int, head_dim: int, width: int, kv_format: str
) -> None:
    kernels = RecordingLibrary()
    tokens = 3 * columns
    size = paged_attention_decode.workspace_size(tokens, 24, width, 2048)
    launch_decode(
        kernels, q=ShapeOnly((tokens, 24, width)), kv=make_pages(kv_format, head_dim=width),
        y=ShapeOnly((tokens, 24 * head_dim)), gate=None, workspace=ShapeOnly((size,), "float32"),
        ordinals=ShapeOnly((tokens,), "int32"), columns_per_row=columns,
        firsts=ShapeOnly((tokens,), "int32", 1 << 21),
    )  # fmt: skip
    units, combine = kernels.launches
    family = "paged_attention_interval"
    assert (units.family, combine.family) == (family, family)
    assert units.entry == f"{family}_{kv_format}_{width}_{tile}"
    assert combine.entry == f"{family}_combine_{head_dim}"
    assert units["firsts"] == combine["firsts"] == 1 << 21
    assert units["row_blocks"] == -(-columns * 6 // tile)
    assert (units.options["programmatic"], combine.options["programmatic"]) == (False, True)
    assert units.arguments.dtype.itemsize == struct_bytes(family, "PagedDecodeParams")
    assert combine.arguments.dtype.itemsize == struct_bytes(family, "PagedCombineParams")


@pytest.mark.parametrize("is_chained", [False, True])
def test_decode_without_intervals_is_chained_as_it_is_told(is_chained: bool) -> None:
    kernels = RecordingLibrary()
    launch_decode(kernels, is_chained=is_chained)
    for launch in kernels.launches:
        assert launch.family == "paged_attention_decode"
        assert (launch["firsts"], launch.options["programmatic"]) == (0, is_chained)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8"])
def test_heads_of_32_take_the_units_of_64_and_store_32(kv_format: str) -> None:
    kernels = RecordingLibrary()
    common = {"kv": make_pages(kv_format, head_dim=64)}
    launch_decode(
        kernels, **common, q=ShapeOnly((3, 24, 64)), y=ShapeOnly((3, 24 * 32)),
        gate=ShapeOnly((3, 56 * 32)),
    )  # fmt: skip
    units, combine = kernels.launches
    assert units.entry == f"paged_attention_decode_{kv_format}_64_8"
    assert combine.entry == "paged_attention_combine_32"
    assert combine.grid == (3 * 24, 1, 1)
    launch_prefill(
        kernels, **common, q=ShapeOnly((300, 24, 64)), y=ShapeOnly((300, 24 * 32)),
        gate=ShapeOnly((300, 56 * 32)),
    )  # fmt: skip
    assert kernels.launches[-1].entry == f"paged_attention_prefill_{kv_format}_32_128"


def test_decode_of_a_short_capacity_launches_no_idle_blocks() -> None:
    kernels = RecordingLibrary()
    launch_decode(kernels, page_tables=ShapeOnly((3, 2), "int32"))
    assert kernels.launches[0].grid[0] == 3 * 2 * 4


@pytest.mark.parametrize("limits", [H200, SMALL])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 8, 9, 16, 17, 96, 512])
def test_decode_shapes_fit_the_device(
    limits: DeviceLimits, kv_format: str, head_dim: int, queries: int
) -> None:
    pages = view_pages("op", make_pages(kv_format, head_dim=head_dim))
    shape = paged_attention_decode.shape_decode(pages, queries, 256, limits)
    assert shape.tile_queries in (8, 16, 32)
    assert shape.tile_queries < 2 * max(8, queries)
    assert 2 <= shape.stages <= 8
    assert shape.shared_bytes <= limits.shared_bytes_per_block
    page_bytes = 64 * pages.row_bytes + pages.scale_bytes
    assert shape.shared_bytes >= shape.stages * page_bytes + shape.tile_queries * 2 * head_dim


@pytest.mark.parametrize(
    "change",
    [
        {"q": ShapeOnly((3, 24, 128))},
        {"q": ShapeOnly((3, 68, 256))},
        {"y": ShapeOnly((3, 24 * 128))},
        {"page_tables": ShapeOnly((2048,), "int32")},
        {"row_starts": ShapeOnly((3,), "int32")},
        {"ordinals": ShapeOnly((4,), "int32")},
        {"workspace": ShapeOnly((1000,), "float32")},
        {"columns_per_row": 33},
        {"columns_per_row": 0},
        {"firsts": ShapeOnly((3,), "int32"), "is_chained": True},
        {"firsts": ShapeOnly((4,), "int32")},
        {"firsts": ShapeOnly((3,), "int64")},
        {"gate": ShapeOnly((3, 32 * 256))},
        {"y": ShapeOnly((3, 24 * 32))},
        {"y": ShapeOnly((3, 24 * 48))},
        {"shape": paged_attention_decode.DecodeShape(16, 3, 16 * 2048)},
        {"shape": paged_attention_decode.DecodeShape(12, 3, 200_000)},
    ],
)
def test_decode_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="paged_attention_decode"):
        launch_decode(kernels, **change)
    assert not kernels.launches


@pytest.mark.parametrize("length", [0, 1, 64, 65, 2047, 2048, 2049, 2304, 2305, 131072, 262144])
def test_units_hold_every_key_once(length: int) -> None:
    fine = [min(64, length - start) for start in range(0, min(length, 2048), 64)]
    coarse = [min(256, length - start) for start in range(2048, length, 256)]
    assert paged_attention_decode.unit_count(length) == len(fine) + len(coarse)
    assert sum(fine) + sum(coarse) == length


def launch_prefill(kernels: RecordingLibrary, **changes: Any) -> None:
    """Of 300 columns, 24 heads without gates; `changes` replace arguments."""
    arguments: dict[str, Any] = {
        "q": ShapeOnly((300, 24, 256)),
        "kv": make_pages(),
        "y": ShapeOnly((300, 24 * 256)),
        "page_table": ShapeOnly((9,), "int32"),
        "ordinals": ShapeOnly((300,), "int32"),
    }
    arguments.update(changes)
    paged_attention_prefill.launch(kernels.library, **arguments, scale=0.0625, stream=0)


@pytest.mark.parametrize(("limits", "tile"), [(H200, 128), (SMALL, 64)])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8"])
def test_prefill_tiles_cover_all_queries(limits: DeviceLimits, tile: int, kv_format: str) -> None:
    kernels = RecordingLibrary(limits)
    launch_prefill(kernels, kv=make_pages(kv_format))
    launch = kernels.only()
    assert launch.entry == f"paged_attention_prefill_{kv_format}_256_{tile}"
    assert launch.grid[0] == 4 * -(-300 * 6 // tile)
    assert launch.block[0] == 2 * tile
    assert launch["gate"] == 0
    assert launch.options["shared_bytes"] <= limits.shared_bytes_per_block
    assert launch.arguments.dtype.itemsize == struct_bytes(
        "paged_attention_prefill", "PagedPrefillParams"
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_of_shorter_heads_fits_128_queries_everywhere(head_dim: int) -> None:
    kernels = RecordingLibrary(SMALL)
    q, y = ShapeOnly((20, 8, head_dim)), ShapeOnly((20, 8 * head_dim))
    pages = make_pages(kv_heads=2, head_dim=head_dim)
    ordinals = ShapeOnly((20,), "int32")
    launch_prefill(kernels, q=q, y=y, kv=pages, ordinals=ordinals)
    assert kernels.only().entry == f"paged_attention_prefill_bf16_{head_dim}_128"


@pytest.mark.parametrize(
    "change",
    [
        {"q": ShapeOnly((300, 24, 64))},
        {"q": ShapeOnly((300, 23, 256))},
        {"y": ShapeOnly((300, 24 * 256), "float32")},
        {"page_table": ShapeOnly((1, 9), "int32")},
        {"ordinals": ShapeOnly((299,), "int32")},
        {"gate": ShapeOnly((300, 32 * 256))},
        {"y": ShapeOnly((300, 24 * 32))},
    ],
)
def test_prefill_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="paged_attention_prefill"):
        launch_prefill(kernels, **change)
    assert not kernels.launches
