"""What the launches of Gated DeltaNet queue, and which arguments they refuse; without a device."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.errors import OpContractError
from ninfer.contract.model import GdnConfig
from ninfer.kernels.library import DeviceLimits
from ninfer.ops import gated_rms_norm, gdn_decode, gdn_fold, gdn_prefill
from ninfer.ops.gdn_device import (
    CONV_WIDTHS,
    HEAD_DIMS,
    GdnMemory,
    GdnRows,
    GdnWeights,
    projection_width,
)
from ninfer.ops.gdn_prefill import ChunkShape
from tests.helpers.recorded_launches import H200, RecordingLibrary, ShapeOnly, struct_bytes

LARGE = GdnConfig(16, 48, 128, 128, 4)
MIDDLE = GdnConfig(16, 32, 128, 128, 4)
SMALL = GdnConfig(2, 6, 32, 64, 3)
WITH_163_KB = DeviceLimits("A100", "sm_80", 108, 166912, 167936)
WITH_99_KB = DeviceLimits("L4", "sm_89", 58, 101376, 102400)
NUM_SLOTS, NUM_LAYERS, LAYER = 5, 3, 2


def weights(config: GdnConfig, **changes: ShapeOnly) -> GdnWeights:
    heads = (config.num_value_heads,)
    arrays = {
        "conv": ShapeOnly((config.conv_dim, config.conv_width)),
        "a_log": ShapeOnly(heads, "float32"),
        "dt_bias": ShapeOnly(heads, "float32"),
        "norm": ShapeOnly((config.value_head_dim,)),
    }
    return GdnWeights(**{**arrays, **changes})


def memory(config: GdnConfig, layer: int = LAYER, **changes: ShapeOnly) -> GdnMemory:
    slots = (NUM_SLOTS, NUM_LAYERS)
    state = (config.num_value_heads, config.value_head_dim, config.key_head_dim)
    arrays = {
        "windows": ShapeOnly((*slots, config.conv_dim, config.conv_width - 1)),
        "states": ShapeOnly((*slots, *state), "float32"),
    }
    return GdnMemory(**{**arrays, **changes}, layer=layer)


def rows(count: int = 3) -> GdnRows:
    slots = ShapeOnly((count,), "int32")
    return GdnRows(ShapeOnly((count + 1,), "int32"), slots, slots)


def step_arguments(config: GdnConfig, tokens: int = 4) -> dict[str, Any]:
    return {
        "config": config, "weights": weights(config), "memory": memory(config), "rows": rows(),
        "projection": ShapeOnly((tokens, projection_width(config))),
        "y": ShapeOnly((tokens, config.value_dim)), "eps": 1e-6, "stream": 0,
    }  # fmt: skip


def chunk_arguments(config: GdnConfig, tokens: int, limits: DeviceLimits = H200) -> dict[str, Any]:
    shape = gdn_prefill.plan_chunks(config, limits)
    arguments = step_arguments(config, tokens)
    del arguments["rows"]
    size = gdn_prefill.workspace_bytes(config, shape, tokens)
    slot = ShapeOnly((1,), "int32")
    return {
        **arguments, "shape": shape, "read_slots": slot, "write_slots": slot,
        "workspace": ShapeOnly((size,), "uint8"),
    }  # fmt: skip


@pytest.mark.parametrize("key_dim", HEAD_DIMS)
@pytest.mark.parametrize("value_dim", HEAD_DIMS)
def test_a_step_takes_a_block_a_head_and_row(key_dim: int, value_dim: int) -> None:
    config = GdnConfig(2, 6, key_dim, value_dim, 4)
    kernels = RecordingLibrary()
    gdn_decode.launch(kernels.library, **step_arguments(config), is_chained=True)
    launch = kernels.only()
    assert launch.grid == (6, 3, 1)
    assert launch.block[0] >= 2 * key_dim + value_dim + 32
    assert launch.arguments.dtype.itemsize == struct_bytes("gdn_decode", "GdnDecodeParams")
    assert launch.options["programmatic"]


def test_a_step_reads_its_own_layer_of_a_slot() -> None:
    kernels = RecordingLibrary()
    gdn_decode.launch(kernels.library, **step_arguments(SMALL))
    launch = kernels.only()
    window, state = SMALL.conv_dim * 2, 6 * 64 * 32
    base = ShapeOnly((1,)).address
    assert launch["windows"] == base + LAYER * window * 2
    assert launch["states"] == base + LAYER * state * 4
    assert launch["window_stride"] == NUM_LAYERS * window
    assert launch["state_stride"] == NUM_LAYERS * state
    assert launch["width"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"config": GdnConfig(2, 6, 16, 64, 3)},
        {"config": GdnConfig(2, 6, 32, 256, 3)},
        {"config": GdnConfig(2, 5, 32, 64, 3)},
        {"config": GdnConfig(2, 6, 32, 64, 5)},
        {"eps": 0.0},
        {"eps": float("nan")},
        {"projection": ShapeOnly((4, projection_width(SMALL) - 2))},
        {"projection": ShapeOnly((0, projection_width(SMALL)))},
        {"projection": ShapeOnly((4, projection_width(SMALL)), "float32")},
        {"y": ShapeOnly((3, SMALL.value_dim))},
        {"weights": weights(SMALL, conv=ShapeOnly((SMALL.conv_dim, 4)))},
        {"weights": weights(SMALL, a_log=ShapeOnly((6,)))},
        {"weights": weights(SMALL, norm=ShapeOnly((32,)))},
        {"memory": memory(SMALL, NUM_LAYERS)},
        {"memory": memory(SMALL, -1)},
        {"memory": memory(SMALL, states=ShapeOnly((NUM_SLOTS, NUM_LAYERS, 6, 32, 64), "float32"))},
        {"memory": memory(SMALL, windows=ShapeOnly((4, NUM_LAYERS, SMALL.conv_dim, 2)))},
    ],
)
def test_both_forms_refuse(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="gdn_decode"):
        gdn_decode.launch(kernels.library, **{**step_arguments(SMALL), **change})
    with pytest.raises(OpContractError, match="gdn_prefill"):
        gdn_prefill.launch(kernels.library, **{**chunk_arguments(SMALL, 4), **change})
    assert not kernels.launches


def test_a_step_refuses_rows_that_do_not_belong_together() -> None:
    kernels = RecordingLibrary()
    slots = ShapeOnly((3,), "int32")
    mismatched = [
        GdnRows(slots, slots, slots),
        GdnRows(ShapeOnly((4,), "int32"), slots, ShapeOnly((2,), "int32")),
        GdnRows(ShapeOnly((4,), "int64"), slots, slots),
        rows(0),
    ]
    for item in mismatched:
        with pytest.raises(OpContractError, match="gdn_decode"):
            gdn_decode.launch(kernels.library, **{**step_arguments(SMALL), "rows": item})
    assert not kernels.launches


def test_padding_of_a_step_begins_where_it_is_told_or_nowhere() -> None:
    kernels = RecordingLibrary()
    starts, slots = ShapeOnly((4,), "int32", 4096), ShapeOnly((3,), "int32")
    ends = ShapeOnly((3,), "int32", 8192)
    arguments = step_arguments(SMALL)
    for item, keeps_state in ((GdnRows(starts, slots, slots), True),
                              (GdnRows(starts, slots, slots, ends), False)):  # fmt: skip
        gdn_decode.launch(kernels.library, **{**arguments, "rows": item}, keeps_state=keeps_state)
    launches = kernels.launches
    assert [launch["row_ends"] for launch in launches] == [4096 + 4, 8192]
    assert [launch["keeps_state"] for launch in launches] == [1, 0]
    with pytest.raises(OpContractError, match="row_ends"):
        gdn_decode.launch(
            kernels.library, **{**arguments, "rows": GdnRows(starts, slots, slots, starts)}
        )


def fold_arguments(config: GdnConfig) -> dict[str, Any]:
    planes = memory(config)
    return {
        "config": config, "layers": ShapeOnly((NUM_LAYERS * gdn_fold.LAYER.itemsize,), "uint8"),
        "windows": planes.windows, "states": planes.states, "rows": rows(), "stream": 0,
    }  # fmt: skip


@pytest.mark.parametrize("key_dim", HEAD_DIMS)
@pytest.mark.parametrize("value_dim", HEAD_DIMS)
def test_a_fold_takes_a_block_a_head_row_and_layer(key_dim: int, value_dim: int) -> None:
    config = GdnConfig(2, 6, key_dim, value_dim, 4)
    kernels = RecordingLibrary()
    gdn_fold.launch(kernels.library, **fold_arguments(config), is_chained=True)
    gdn_decode.launch(kernels.library, **step_arguments(config))
    fold, step = kernels.launches
    assert fold.grid == (6, 3, NUM_LAYERS)
    assert fold.block == step.block
    assert fold.arguments.dtype.itemsize == struct_bytes("gdn_fold", "GdnFoldParams")
    assert fold.options["programmatic"]
    assert fold["windows"] == fold["states"] == ShapeOnly((1,)).address
    for name in ("window_stride", "state_stride", "width", "key_heads", "value_heads", "row_ends"):
        assert fold[name] == step[name]


def test_the_table_of_a_fold_has_the_pointers_of_every_layer() -> None:
    width, gap = projection_width(SMALL), projection_width(SMALL) + 8
    layers = [
        gdn_fold.FoldLayer(weights(SMALL, conv=ShapeOnly((SMALL.conv_dim, 3), address=4096)),
                           ShapeOnly((16, width), address=8192)),
        gdn_fold.FoldLayer(weights(SMALL, a_log=ShapeOnly((6,), "float32", 256)),
                           ShapeOnly((16, width), strides=(2 * gap, 2))),
    ]  # fmt: skip
    table = gdn_fold.describe(SMALL, layers)
    base = ShapeOnly((1,)).address
    assert table["projection"].tolist() == [8192, base]
    assert table["projection_stride"].tolist() == [width, gap]
    assert table["conv"].tolist() == [4096, base]
    assert table["a_log"].tolist() == [base, 256]
    assert table["dt_bias"].tolist() == [base, base]
    assert table.dtype.itemsize == struct_bytes("gdn_fold", "FoldLayer")


@pytest.mark.parametrize(
    "change",
    [
        {"config": GdnConfig(2, 6, 16, 64, 3)},
        {"layers": ShapeOnly((2 * gdn_fold.LAYER.itemsize,), "uint8")},
        {"layers": ShapeOnly((NUM_LAYERS * gdn_fold.LAYER.itemsize,), "uint8", 1028)},
        {"windows": ShapeOnly((NUM_SLOTS, 2, SMALL.conv_dim, 2))},
        {"states": ShapeOnly((NUM_SLOTS, NUM_LAYERS, 6, 32, 64), "float32")},
        {"rows": rows(0)},
    ],
)
def test_a_fold_refuses(change: dict[str, Any]) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="gdn_fold"):
        gdn_fold.launch(kernels.library, **{**fold_arguments(SMALL), **change})
    assert not kernels.launches


def test_the_table_of_a_fold_refuses_what_a_step_refuses() -> None:
    projection = ShapeOnly((4, projection_width(SMALL)))
    for layer in (
        gdn_fold.FoldLayer(weights(SMALL), ShapeOnly((4, projection_width(SMALL) - 2))),
        gdn_fold.FoldLayer(weights(SMALL, conv=ShapeOnly((SMALL.conv_dim, 4))), projection),
    ):
        with pytest.raises(OpContractError, match="gdn_fold"):
            gdn_fold.describe(SMALL, [layer])


def test_chunks_cover_tokens_heads_and_columns() -> None:
    kernels = RecordingLibrary()
    gdn_prefill.launch(kernels.library, **chunk_arguments(LARGE, 130))
    convolve, transform, scan, norm = kernels.launches
    assert convolve.grid == (LARGE.conv_dim // 256, 5, 1)
    assert transform.grid == (3, 48, 1)
    assert scan.grid == (48, 2, 1)
    assert (transform.entry, scan.entry) == ("gdn_transform_128x64", "gdn_chunks_128x64x64")
    assert transform.block[0] == 128
    assert 8 * norm.grid[0] >= 130 * 48 > 8 * (norm.grid[0] - 1)
    assert scan.arguments.dtype.itemsize == struct_bytes("gdn_prefill", "GdnPrefillParams")
    assert not convolve.options["programmatic"]
    assert all(item.options["programmatic"] for item in (transform, scan, norm))


def test_the_norm_reads_the_gate_of_the_projection_and_works_in_place() -> None:
    kernels = RecordingLibrary()
    arguments = chunk_arguments(SMALL, 7)
    gdn_prefill.launch(kernels.library, **arguments)
    norm = kernels.launches[-1]
    assert norm["x"] == norm["y"] == arguments["y"].address
    assert norm["z"] == arguments["projection"].address + 2 * SMALL.conv_dim
    assert norm["z_stride"] == projection_width(SMALL)
    assert (norm["tokens"], norm["heads"]) == (7, 6)


def test_parts_of_the_workspace_follow_each_other() -> None:
    kernels = RecordingLibrary()
    arguments = chunk_arguments(SMALL, 70)
    gdn_prefill.launch(kernels.library, **arguments)
    scan = kernels.launches[2]
    ends = [scan[name] for name in ("transform", "scores", "scales")]
    starts = [scan[name] for name in ("convolved", "transform", "scores", "scales")]
    ends.append(arguments["workspace"].address + arguments["workspace"].shape[0])
    squares = 2 * 6 * 64 * 64 * 2 * 2
    sizes = (70 * SMALL.conv_dim * 2, squares, squares, 2 * 6 * 4 * 64 * 4)
    for start, end, size in zip(starts, ends, sizes, strict=True):
        assert start % 16 == 0
        assert end - start >= size


def test_a_small_workspace_is_refused() -> None:
    kernels = RecordingLibrary()
    arguments = chunk_arguments(SMALL, 70)
    size = arguments["workspace"].shape[0]
    arguments["workspace"] = ShapeOnly((size - 1,), "uint8")
    with pytest.raises(OpContractError, match=f"expected {size}"):
        gdn_prefill.launch(kernels.library, **arguments)
    assert not kernels.launches


def test_a_workspace_for_more_tokens_serves_fewer() -> None:
    shape = gdn_prefill.plan_chunks(LARGE, H200)
    sizes = [gdn_prefill.workspace_bytes(LARGE, shape, tokens) for tokens in range(1, 300)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("limits", [H200, WITH_163_KB, WITH_99_KB])
@pytest.mark.parametrize("key_dim", HEAD_DIMS)
@pytest.mark.parametrize("value_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [4, 48])
def test_every_device_has_a_shape_that_fits(
    limits: DeviceLimits, key_dim: int, value_dim: int, heads: int
) -> None:
    config = GdnConfig(2, heads, key_dim, value_dim, CONV_WIDTHS[0])
    kernels = RecordingLibrary(limits)
    gdn_prefill.launch(kernels.library, **chunk_arguments(config, 40, limits))
    scan = kernels.launches[2]
    columns = int(scan.entry.rsplit("x", 1)[1])
    assert scan.grid[1] * columns == value_dim
    assert scan.options["shared_bytes"] <= limits.shared_bytes_per_block


@pytest.mark.parametrize(
    ("config", "limits", "expected"),
    [
        (LARGE, H200, ChunkShape(128, 64, 64)),
        (MIDDLE, H200, ChunkShape(128, 64, 32)),
        (LARGE, WITH_163_KB, ChunkShape(128, 64, 32)),
        (LARGE, WITH_99_KB, ChunkShape(128, 32, 32)),
    ],
)
def test_blocks_are_wide_where_narrow_ones_do_not_run_at_once(
    config: GdnConfig, limits: DeviceLimits, expected: ChunkShape
) -> None:
    assert gdn_prefill.plan_chunks(config, limits) == expected


def test_a_device_without_shared_memory_is_refused() -> None:
    with pytest.raises(OpContractError, match="tiny"):
        gdn_prefill.plan_chunks(LARGE, DeviceLimits("tiny", "sm_89", 8, 49152, 65536))


@pytest.mark.parametrize("head_dim", [16, 48, 256])
def test_gated_rms_norm_refuses_head_sizes_without_a_kernel(head_dim: int) -> None:
    kernels = RecordingLibrary()
    x = ShapeOnly((3, 2 * head_dim))
    with pytest.raises(OpContractError, match="gated_rms_norm"):
        gated_rms_norm.launch(kernels.library, x, x, ShapeOnly((head_dim,)), x, eps=1e-6, stream=0)
    assert not kernels.launches


@pytest.mark.parametrize(
    ("x", "z", "eps"),
    [
        (ShapeOnly((3, 96)), ShapeOnly((3, 96)), 1e-6),
        (ShapeOnly((0, 128)), ShapeOnly((0, 128)), 1e-6),
        (ShapeOnly((3, 128)), ShapeOnly((2, 128)), 1e-6),
        (ShapeOnly((3, 128)), ShapeOnly((3, 128), "float32"), 1e-6),
        (ShapeOnly((3, 128)), ShapeOnly((3, 128)), 0.0),
    ],
)
def test_gated_rms_norm_refuses(x: ShapeOnly, z: ShapeOnly, eps: float) -> None:
    kernels = RecordingLibrary()
    with pytest.raises(OpContractError, match="gated_rms_norm"):
        gated_rms_norm.launch(kernels.library, x, z, ShapeOnly((64,)), x, eps=eps, stream=0)
    assert not kernels.launches


def test_gated_rms_norm_reads_a_gate_with_gaps() -> None:
    kernels = RecordingLibrary()
    x, z = ShapeOnly((5, 192)), ShapeOnly((5, 192), strides=(1000, 2))
    gated_rms_norm.launch(kernels.library, x, z, ShapeOnly((64,)), x, eps=1e-6, stream=0)
    launch = kernels.only()
    assert launch.arguments.dtype.itemsize == struct_bytes("gated_rms_norm", "GatedRmsNormParams")
    assert (launch["z_stride"], launch["heads"], launch.entry) == (500, 3, "gated_rms_norm_bf16_2")
