"""device_sampling: the token of every row of a unit from logits on the device.

What `ninfer.ops.sampling` states, with these differences: the scores are float32; cuts compare
distances from the best score in whole steps of temperature * 2^-27 and masses in whole units of
2^-35 of the best token's, so that a cut may fall one token elsewhere when masses agree to seven
digits; the draw itself is decided in float64.

    logits [R, V] + rows [R] (ROW) + lists -> token_ids, is_finite, logprobs, top_ids, top_logprobs

Shapes     logits [R, V], V >= num_valid_ids: later ids are never read; rows [R] of ROW;
           ids and values [n], the rows' lists; masks [R, ceil(num_valid_ids / 32)], bit id & 31 of
           word id >> 5 allows id; outputs [R], the top ones [R, MAX_TOP]
Dtypes     logits f32 or bf16; ids, token_ids, is_finite, top_ids int32; values, logprobs,
           top_logprobs f32; masks uint32; rows and scratch uint8
Units      token_ids -1: logits not finite or nothing may be drawn; log probabilities are natural
Effects    writes token_ids and is_finite of every row, log probabilities where a row asks for them
Order      a row's result is a function of its own logits and lists, bit for bit
Workspace  scratch of `scratch_bytes`, all zeros before the first launch; it stays ready
Errors     OpContractError for shapes, dtypes, alignment, a vocabulary or a list past its capacity
Tolerance  EXACT but for the cuts; log probabilities FLOAT32_REDUCTION
Source     ninfer/ops/sampling.py; radix selection; Salmon et al. 2011 for the random numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array, IntArray
from ninfer.contract.units import SampleRow
from ninfer.kernels.device_array import DeviceArray, view_of
from ninfer.kernels.library import KernelFunction, KernelLibrary
from ninfer.ops.checks import fail
from ninfer.ops.device_checks import require_alignment, require_view

_OP: Final = "device_sampling"

MAX_TOP: Final = 20
"""Most log probabilities of alternatives a row may ask for."""
ROW: Final = np.dtype(
    [
        ("seed", "<u8"), ("temperature", "<f8"), ("top_p", "<f8"), ("min_p", "<f4"),
        ("repetition", "<f4"), ("presence", "<f4"), ("frequency", "<f4"), ("position", "<i4"),
        ("purpose", "<i4"), ("top_k", "<i4"), ("is_greedy", "<i4"), ("num_top", "<i4"),
        ("has_mask", "<i4"), ("bias_begin", "<i4"), ("bias_count", "<i4"),
        ("suppressed_begin", "<i4"), ("suppressed_count", "<i4"), ("prompt_begin", "<i4"),
        ("prompt_count", "<i4"), ("generated_begin", "<i4"), ("generated_count", "<i4"),
    ]
)  # fmt: skip
"""How one token is chosen; lists are ranges of `ids`, biases and counts stand in `values`."""

_THREADS: Final = 512
_MAX_SLICE: Final = 16384
_MAX_PARTS: Final = 32
_HISTOGRAM_BYTES: Final = 3 * 2048 * 4
_ROW_SCRATCH_BYTES: Final = 129216
_MAX_ROWS: Final = 65535
_PARAMS: Final = np.dtype(
    [
        ("logits", "<u8"), ("rows", "<u8"), ("ids", "<u8"), ("values", "<u8"), ("masks", "<u8"),
        ("scratch", "<u8"), ("token_ids", "<u8"), ("is_finite", "<u8"), ("logprobs", "<u8"),
        ("top_ids", "<u8"), ("top_logprobs", "<u8"), ("logits_stride", "<i4"),
        ("num_valid_ids", "<i4"), ("slice", "<i4"), ("mask_words", "<i4"), ("first_row", "<i4"),
        ("padding", "<i4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """rows uint8 [R * ROW.itemsize], ids int32 [n], values f32 [n], masks uint32 [R, words]."""

    rows: DeviceArray
    ids: DeviceArray
    values: DeviceArray
    masks: DeviceArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingOutputs:
    """token_ids, is_finite int32 [R]; logprobs f32 [R]; top_ids int32, top_logprobs f32
    [R, MAX_TOP], of which a row fills as many as it asked for."""

    token_ids: DeviceArray
    is_finite: DeviceArray
    logprobs: DeviceArray
    top_ids: DeviceArray
    top_logprobs: DeviceArray


def fill_rows(
    samples: Sequence[SampleRow],
    num_valid_ids: int,
    rows: NDArray[np.void],
    ids: IntArray,
    values: Float32Array,
) -> int:
    """Describe `samples` in host buffers: rows [>= R] of ROW, ids and values [capacity].

    Returns how many ids are used. Raises OpContractError for a token id outside
    [0, num_valid_ids), too many log probabilities, or lists longer than the buffers.
    """
    lists = _Lists(num_valid_ids, ids, values)
    for index, sample in enumerate(samples):
        params = sample.params
        num_top = -1 if params.top_logprobs is None else params.top_logprobs
        if num_top > min(MAX_TOP, num_valid_ids):
            fail(_OP, f"{num_top} log probabilities asked for, at most {MAX_TOP}")
        row = np.zeros((), ROW)
        row["seed"] = params.seed % (1 << 64)
        row["temperature"], row["top_p"], row["min_p"] = (
            params.temperature, params.top_p, params.min_p,
        )  # fmt: skip
        row["is_greedy"], row["num_top"] = params.is_greedy, num_top
        row["top_k"] = params.top_k if 0 < params.top_k < num_valid_ids else 0
        row["position"], row["purpose"] = sample.position, int(sample.purpose)
        row["has_mask"] = sample.mask is not None
        row["repetition"] = params.repetition_penalty
        row["presence"], row["frequency"] = params.presence_penalty, params.frequency_penalty
        bias_ids, biases = _merged_bias(params.logit_bias)
        lists.add(row, "bias", bias_ids, biases)
        lists.add(row, "suppressed", np.unique(np.array(sample.suppressed_ids, np.int32)))
        if params.counts_tokens:
            lists.add(row, "generated", sample.generated_ids, sample.generated_counts)
        if params.repetition_penalty != 1.0:
            lists.add(row, "prompt", sample.prompt_ids)
        rows[index] = row
    return lists.used


def plain_rows(rows: NDArray[np.void], positions: NDArray[np.integer[Any]]) -> NDArray[np.void]:
    """Copies of `rows` for tokens at `positions`: without lists, mask, penalties and log
    probabilities."""
    plain = rows.copy()
    plain["position"] = positions
    plain["num_top"], plain["has_mask"], plain["repetition"] = -1, 0, 1.0
    plain["presence"] = plain["frequency"] = 0.0
    for name in ("bias", "suppressed", "prompt", "generated"):
        plain[f"{name}_begin"] = plain[f"{name}_count"] = 0
    return plain


def scratch_bytes(max_rows: int) -> int:
    """Bytes of the scratch that launches of up to max_rows rows need."""
    return max_rows * _ROW_SCRATCH_BYTES


def launch(
    kernels: KernelLibrary,
    logits: DeviceArray,
    inputs: SamplingInputs,
    outputs: SamplingOutputs,
    *,
    num_valid_ids: int,
    scratch: DeviceArray,
    stream: int,
    is_chained: bool = False,
) -> None:
    """Queue the choice of R tokens on `stream`; returns before it has run.

    is_chained   may start while the kernel ahead of it in the stream still runs
    """
    is_float = np.dtype(logits.__cuda_array_interface__["typestr"]) == np.float32
    source = view_of(_OP, "logits", logits, "float32" if is_float else "uint16", 2)
    num_rows, vocab_size = source.shape
    if not 1 <= num_rows <= _MAX_ROWS or not 1 <= num_valid_ids <= vocab_size:
        fail(_OP, f"{num_valid_ids} valid ids of logits {source.shape}")
    alignment = 16 if is_float else 8
    require_alignment(_OP, "logits", source, "float32" if is_float else "uint16", alignment)
    parts, slice_ids = _partition(num_valid_ids)
    params = np.zeros((), _PARAMS)
    params["logits"], params["logits_stride"] = source.address, source.row_stride
    params["num_valid_ids"], params["slice"] = num_valid_ids, slice_ids
    _set_inputs(params, inputs, num_rows, num_valid_ids)
    _set_outputs(params, outputs, num_rows)
    area = view_of(_OP, "scratch", scratch, "uint8", 1)
    if area.address % 16 or area.shape[0] < scratch_bytes(num_rows):
        fail(
            _OP, f"scratch of {area.shape[0]} bytes, {scratch_bytes(num_rows)} aligned to 16 needed"
        )
    function = kernels.function("sampling", "sampling_f32" if is_float else "sampling_bf16")
    shared_bytes = slice_ids * 4 + _HISTOGRAM_BYTES
    function.reserve_shared(shared_bytes)
    step = _rows_at_once(kernels, function, parts, shared_bytes)
    for first in range(0, num_rows, step):
        params["first_row"] = first
        params["scratch"] = area.address + scratch_bytes(first)
        function.launch(
            (parts, min(step, num_rows - first), 1),
            (_THREADS, 1, 1),
            params,
            stream=stream,
            shared_bytes=shared_bytes,
            programmatic=is_chained,
        )


class _Lists:
    """Appends the rows' lists to the shared buffers."""

    def __init__(self, num_valid_ids: int, ids: IntArray, values: Float32Array) -> None:
        self._num_valid_ids = num_valid_ids
        self._ids = ids
        self._values = values
        self.used = 0

    def add(
        self,
        row: NDArray[np.void],
        name: str,
        ids: NDArray[np.int32],
        values: NDArray[Any] | None = None,
    ) -> None:
        begin, end = self.used, self.used + ids.size
        if end > min(self._ids.size, self._values.size):
            fail(_OP, f"{end} listed ids do not fit buffers of {self._ids.size}")
        if ids.size and (ids.min() < 0 or ids.max() >= self._num_valid_ids):
            fail(_OP, f"a token id is outside [0, {self._num_valid_ids})")
        self._ids[begin:end] = ids
        if values is not None:
            self._values[begin:end] = values
        row[f"{name}_begin"], row[f"{name}_count"] = begin, ids.size
        self.used = end


def _merged_bias(
    pairs: tuple[tuple[int, float], ...],
) -> tuple[NDArray[np.int32], Float32Array]:
    """Distinct ids and the sum of each id's biases."""
    ids, places = np.unique(np.array([token for token, _ in pairs], np.int32), return_inverse=True)
    biases = np.zeros(ids.size, np.float32)
    np.add.at(biases, places, np.array([bias for _, bias in pairs], np.float32))
    return ids, biases


def _partition(num_valid_ids: int) -> tuple[int, int]:
    """Thread blocks of a row and ids of each: a function of the vocabulary alone."""
    parts = -(-num_valid_ids // _MAX_SLICE)
    if parts > _MAX_PARTS:
        fail(_OP, f"{num_valid_ids} ids are more than {_MAX_PARTS * _MAX_SLICE}")
    slice_ids = -(-num_valid_ids // (4 * parts)) * 4
    return -(-num_valid_ids // slice_ids), slice_ids


def _rows_at_once(
    kernels: KernelLibrary, function: KernelFunction, parts: int, shared_bytes: int
) -> int:
    """Rows whose thread blocks are all resident together: they wait for each other."""
    resident = function.resident_blocks(_THREADS, shared_bytes)
    rows = resident * kernels.limits.num_multiprocessors // parts
    if rows < 1:
        fail(_OP, f"{parts} thread blocks of a row do not fit {kernels.limits.name} at once")
    return rows


def _set_inputs(
    params: NDArray[np.void], inputs: SamplingInputs, num_rows: int, num_valid_ids: int
) -> None:
    rows = require_view(
        _OP, "rows", inputs.rows, "uint8", (num_rows * ROW.itemsize,), alignment_bytes=8
    )
    ids = view_of(_OP, "ids", inputs.ids, "int32", 1)
    values = view_of(_OP, "values", inputs.values, "float32", 1)
    if ids.shape != values.shape:
        fail(_OP, f"{ids.shape} ids and {values.shape} values")
    params["rows"], params["ids"], params["values"] = rows.address, ids.address, values.address
    if inputs.masks is not None:
        words = -(-num_valid_ids // 32)
        masks = require_view(_OP, "masks", inputs.masks, "uint32", (num_rows, words))
        params["masks"], params["mask_words"] = masks.address, words


def _set_outputs(params: NDArray[np.void], outputs: SamplingOutputs, num_rows: int) -> None:
    for name, array, dtype, shape in (
        ("token_ids", outputs.token_ids, "int32", (num_rows,)),
        ("is_finite", outputs.is_finite, "int32", (num_rows,)),
        ("logprobs", outputs.logprobs, "float32", (num_rows,)),
        ("top_ids", outputs.top_ids, "int32", (num_rows, MAX_TOP)),
        ("top_logprobs", outputs.top_logprobs, "float32", (num_rows, MAX_TOP)),
    ):
        params[name] = require_view(_OP, name, array, dtype, shape).address
