"""Plans of linear_small_t: how a weight is split over the device, and a launch over shared memory.

    plan   thread blocks, each with one stretch of the image; the same for every T, and so is the
           order of sums
    ring   stages of weights and windows of x, by T and the device; changes nothing of the result

A window of x holds what a block's stretch needs, if that fits. Else there are two: one is on its
way while the other is multiplied.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ninfer.kernels.library import DeviceLimits
from ninfer.ops.checks import fail
from ninfer.ops.linear_packing import PARTS_PER_UNIT, STRIP_ROWS, ImageLayout, WeightFormat

_OP: Final = "linear_small_t"

MAX_TOKENS: Final = 32
"""Most columns of a launch; `max_tokens` says how many a plan takes on a device."""
COLUMN_TILE: Final = 8
_KEPT_TOKENS: Final = 16
"""Most columns of which one window may be moved, or keep whole rows of x."""
_CROWDED_TOKENS: Final = 24
"""Most columns of two blocks a multiprocessor: registers."""
_LEAST_STAGES: Final = 4
_WINDOW_UNITS: Final = 8
"""Units of each of two windows: enough to hide a copy, few enough to leave room for stages."""
_LONG_STRETCH_UNITS: Final = 20
_LOOKAHEAD_UNITS: Final = 4
_UNITS_FOR_TWO_BLOCKS: Final = 8
_BARRIER_BYTES: Final = 12 * 8 * 2 + MAX_TOKENS * 4
_TILES_AT_ONCE: Final = 2
"""Column tiles whose sums warps exchange at once."""
_WARPS_PER_PART: Final = MappingProxyType(
    {
        WeightFormat.BF16: 1,
        WeightFormat.FP8_ROW: 2,
        WeightFormat.FP8_BLOCK: 2,
        WeightFormat.NVFP4: 1,
    }
)
"""As in kernels/include/linear_parts.cuh."""
_BLOCK_RESERVE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How a weight is split over the device; the same for every T.

    thread_blocks   each takes one contiguous stretch of the image
    """

    layout: ImageLayout
    thread_blocks: int

    @property
    def max_units(self) -> int:
        """Most units of one thread block."""
        return -(-self.layout.units // self.thread_blocks)


@dataclass(frozen=True, slots=True)
class RingShape:
    """How one launch uses shared memory; changes nothing of the result.

    window      columns of x in a window
    windows     2: one is on its way while the other is multiplied
    lookahead   units beyond the first ring that are called into the L2 at the start
    """

    stages: int
    window: int
    windows: int
    shared_bytes: int
    lookahead: int


def plan_linear(layout: ImageLayout, limits: DeviceLimits) -> LinearPlan:
    """One thread block a multiprocessor; two where decoding, not memory, would be the limit."""
    units = layout.units
    count = 1
    if layout.format is WeightFormat.NVFP4 and _can_share(limits):
        count = 2 if units >= _UNITS_FOR_TWO_BLOCKS * limits.num_multiprocessors else 1
    blocks = count * limits.num_multiprocessors
    if units * blocks >= 2**31:
        fail(_OP, f"[{layout.rows}, {layout.columns}] is too large")
    return LinearPlan(layout, min(blocks, units))


def workspace_size(plan: LinearPlan, max_tokens: int = MAX_TOKENS) -> int:
    """Elements (f32) of the workspace that launches of up to max_tokens columns need."""
    layout = plan.layout
    slots = plan.thread_blocks + layout.row_blocks
    tiles = -(-max_tokens // COLUMN_TILE)
    return slots * layout.strips_per_block * STRIP_ROWS * tiles * COLUMN_TILE


def threads(fmt: WeightFormat) -> int:
    """Threads of a block: one or two warps a part of a unit, and the warp that fills the ring."""
    return 32 * (_consumers(fmt) + 1)


def max_tokens(plan: LinearPlan, limits: DeviceLimits) -> int:
    """Most columns that a launch of this plan takes; 16 or more wherever one column is taken."""
    is_crowded = plan.thread_blocks > limits.num_multiprocessors
    for tokens in range(_CROWDED_TOKENS if is_crowded else MAX_TOKENS, _KEPT_TOKENS, -COLUMN_TILE):
        if _shape_ring(plan, tokens, limits) is not None:
            return tokens
    return _KEPT_TOKENS


def shape_ring(plan: LinearPlan, tokens: int, limits: DeviceLimits) -> RingShape:
    """How launches of this plan use shared memory; measured, see bench/results/NOTES.md.

    Long stretches take all of a multiprocessor, and of bf16 look ahead; short ones of few warps
    leave room for the next kernel of a chain, if their part of x fits; two blocks of one kernel
    share with shallow rings. Raises OpContractError if so many columns do not fit.
    """
    ring = _shape_ring(plan, tokens, limits)
    if ring is None:
        fail(_OP, f"{tokens} columns do not fit the shared memory of {limits.name}")
    return ring


def fit_ring(
    plan: LinearPlan,
    tokens: int,
    limits: DeviceLimits,
    *,
    resident_blocks: int,
    max_stages: int,
    lookahead: int,
    window_units: int | None = None,
) -> RingShape:
    """Fit a ring and x into what a block has when `resident_blocks` share a multiprocessor.

    One window grows to what a block's stretch needs as long as four stages remain; it gives way
    to fewer only where a single unit of x would not fit. With `window_units` there are two windows
    of at most so many units. Raises OpContractError if nothing fits.
    """
    needed = _needed_window(plan, tokens)
    most = needed if window_units is None else min(needed, _round_window(plan, window_units))
    fitted = _fit(
        plan, tokens, limits, resident_blocks, max_stages,
        windows=1 if window_units is None else 2, most_columns=most,
    )  # fmt: skip
    if fitted is None:
        fail(_OP, f"{tokens} columns do not fit the shared memory of {limits.name}")
    return dataclasses.replace(fitted, lookahead=lookahead)


def least_window(plan: LinearPlan, tokens: int) -> int:
    """Columns that a window alone has to hold; from 17 columns t on it cannot be moved."""
    return _needed_window(plan, tokens) if tokens > _KEPT_TOKENS else 1


def _consumers(fmt: WeightFormat) -> int:
    """Warps of a block that multiply."""
    return PARTS_PER_UNIT * _WARPS_PER_PART[fmt]


def _shape_ring(plan: LinearPlan, tokens: int, limits: DeviceLimits) -> RingShape | None:
    if plan.thread_blocks > limits.num_multiprocessors:
        return _fit_windows(plan, tokens, limits, resident_blocks=2, max_stages=3)
    needed = _needed_window(plan, tokens)
    is_long = plan.max_units >= _LONG_STRETCH_UNITS
    if not is_long and _WARPS_PER_PART[plan.layout.format] == 1 and _can_share(limits):
        ring = _fit(plan, tokens, limits, 2, 6, windows=1, most_columns=needed)
        if ring is not None and ring.window >= needed:
            return ring
    ring = _fit_windows(plan, tokens, limits, resident_blocks=1, max_stages=8)
    if ring is None or not is_long or plan.layout.format is not WeightFormat.BF16:
        return ring
    return dataclasses.replace(ring, lookahead=_LOOKAHEAD_UNITS)


def _fit_windows(
    plan: LinearPlan, tokens: int, limits: DeviceLimits, *, resident_blocks: int, max_stages: int
) -> RingShape | None:
    """One window if it holds what a stretch needs, else two."""
    needed = _needed_window(plan, tokens)
    shares = (plan, tokens, limits, resident_blocks, max_stages)
    one = _fit(*shares, windows=1, most_columns=needed)
    if one is not None and one.window >= needed:
        return one
    most = min(needed, _round_window(plan, _WINDOW_UNITS))
    two = _fit(*shares, windows=2, most_columns=most)
    return one if two is None and tokens <= _KEPT_TOKENS else two


def _fit(
    plan: LinearPlan,
    tokens: int,
    limits: DeviceLimits,
    resident_blocks: int,
    max_stages: int,
    *,
    windows: int,
    most_columns: int,
) -> RingShape | None:
    """The longest windows that leave four stages, or fewer; then as many stages as fit."""
    layout = plan.layout
    stage_bytes = layout.format.unit_bytes()
    step = _round_window(plan, 1)
    pad = 8 if layout.format is WeightFormat.NVFP4 else 32
    share = limits.shared_bytes_per_multiprocessor // resident_blocks
    tiles = min(-(-tokens // COLUMN_TILE), _TILES_AT_ONCE)
    scratch_bytes = (_consumers(layout.format) - layout.strips_per_block) * tiles * 1024
    fixed_bytes = _BARRIER_BYTES + scratch_bytes
    budget = min(limits.shared_bytes_per_block, share - _BLOCK_RESERVE_BYTES) - fixed_bytes
    pitch_bytes = 2 * tokens * windows
    for least_stages in range(min(_LEAST_STAGES, max_stages), 1, -1):
        free_bytes = budget - least_stages * stage_bytes
        window = min(most_columns, (free_bytes // pitch_bytes - pad) // step * step)
        if window >= step:
            window_bytes = (window + pad) * pitch_bytes
            stages = min(max_stages, (budget - window_bytes) // stage_bytes)
            shared_bytes = stages * stage_bytes + fixed_bytes + window_bytes
            return RingShape(stages, window, windows, shared_bytes, lookahead=0)
    return None


def _round_window(plan: LinearPlan, units: int) -> int:
    """Columns of at least so many units: whole units, and rows whose fragments lie in different
    banks."""
    unit_columns = plan.layout.unit_columns
    step = max(64, unit_columns)
    return -(-units * unit_columns // step) * step


def _needed_window(plan: LinearPlan, tokens: int) -> int:
    """Columns of x that a block's stretch reads; those of a row once, if the window keeps rows."""
    stretch = _round_window(plan, plan.max_units)
    if tokens > _KEPT_TOKENS:
        return stretch
    return min(stretch, _round_window(plan, plan.layout.units_per_block))


def _can_share(limits: DeviceLimits) -> bool:
    """Whether two blocks with deep rings fit one multiprocessor."""
    return limits.shared_bytes_per_multiprocessor >= 200 * 1024
