"""CudaSampler: the choice of tokens from logits on the device, its inputs and its results.

Every unit copies the rows' parameters in and the results out, between page-locked blocks and fixed
places. Two sides of the blocks take turns, so that a unit can be queued behind one that still runs.
The lists (biases, penalties) are usually empty: what is in use of them is copied apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array, IntArray
from ninfer.contract.errors import InvariantError
from ninfer.contract.sampling import DrawPurpose, GeneratedToken, SamplingParams, TokenLogprobs
from ninfer.contract.units import RowOutput, SampleRow
from ninfer.ops import device_sampling
from ninfer.ops.device_sampling import MAX_TOP, SamplingInputs, SamplingOutputs
from ninfer.program.executors.cuda_driver import NUM_MARKS, CudaDriver
from ninfer.program.executors.cuda_tensor import Arena, DeviceTensor

_SPARSE_IDS: Final = 4096
"""Ids of a row that biases and suppressed tokens may list."""
_RESULT_WORDS: Final = 3 + 2 * MAX_TOP


@dataclass(frozen=True, slots=True)
class SamplerTensors:
    """rows, masks, results and scratch for R rows; ids and values of `list_capacity` elements."""

    rows: DeviceTensor
    ids: DeviceTensor
    values: DeviceTensor
    masks: DeviceTensor
    results: DeviceTensor
    scratch: DeviceTensor


def carve_sampler(
    arena: Arena, *, max_rows: int, max_lists: int, vocab_size: int, max_context: int
) -> SamplerTensors:
    """For units of `max_rows` rows, of which `max_lists` may have lists as long as can be."""
    capacity = list_capacity(max_lists, vocab_size, max_context)
    return SamplerTensors(
        rows=arena.take((max_rows * device_sampling.ROW.itemsize,), "uint8"),
        ids=arena.take((capacity,), "int32"),
        values=arena.take((capacity,), "float32"),
        masks=arena.take((max_rows, -(-vocab_size // 32)), "uint32"),
        results=arena.take((max_rows * _RESULT_WORDS,), "int32"),
        scratch=arena.take((device_sampling.scratch_bytes(max_rows),), "uint8"),
    )


class _Side:
    """The host's blocks of one unit.

    described   the parameters that `rows` hold, when nothing but positions and masks is to be added
    """

    def __init__(self, driver: CudaDriver, tensors: SamplerTensors) -> None:
        self.block = driver.allocate_pinned(tensors.rows.num_bytes)
        self.rows: NDArray[np.void] = self.block.view(device_sampling.ROW)
        self.positions: IntArray = self.rows["position"]
        self.has_mask: IntArray = self.rows["has_mask"]
        results = driver.allocate_pinned(tensors.results.num_bytes)
        self.results: IntArray = results.view(np.int32)
        self.described: list[SamplingParams] = []


class CudaSampler:
    """Samples the rows of a unit. Raises OpContractError for lists past capacity."""

    def __init__(self, driver: CudaDriver, tensors: SamplerTensors, *, vocab_size: int) -> None:
        self._driver = driver
        self._tensors = tensors
        self._vocab_size = vocab_size
        self._sides = [_Side(driver, tensors) for _ in range(NUM_MARKS)]
        self.side = 0
        ids = driver.allocate_pinned(tensors.ids.num_bytes)
        values = driver.allocate_pinned(tensors.values.num_bytes)
        masks = driver.allocate_pinned(tensors.masks.num_bytes)
        tokens = driver.allocate_pinned(self.token_ids.num_bytes)
        self._host_ids: IntArray = ids.view(np.int32)
        self._host_values: Float32Array = values.view(np.float32)
        self._host_masks: NDArray[np.uint32] = masks.view(np.uint32).reshape(tensors.masks.shape)
        self._host_tokens: IntArray = tokens.view(np.int32)
        driver.fill(tensors.scratch.address, 0, tensors.scratch.num_bytes)

    @property
    def max_rows(self) -> int:
        """Most rows of one unit."""
        return int(self._sides[0].rows.shape[0])

    @property
    def token_ids(self) -> DeviceTensor:
        """int32 [max_rows]: the tokens that the newest unit chose, a row each."""
        return DeviceTensor.dense(
            self._tensors.results.address, (self.max_rows,), self._tensors.results.dtype
        )

    @property
    def max_listed(self) -> int:
        """Most ids in all lists of one unit."""
        return int(self._host_ids.size)

    def write_tokens(self, token_ids: Sequence[int]) -> None:
        """Queue the copy of `token_ids` to where chosen ones are. No unit may be queued."""
        self._host_tokens[: len(token_ids)] = token_ids
        self._driver.upload(self._tensors.results.address, self._host_tokens[: len(token_ids)])

    def write(self, samples: Sequence[SampleRow]) -> None:
        """Describe the rows, on the other side, and queue the copy of their lists, if there are
        any. Only the unit before may still be queued, and none with lists."""
        side, num_rows = self._turn(), len(samples)
        described, have_no_lists = (
            [sample.params for sample in samples],
            all(map(_is_short, samples)),
        )
        if have_no_lists and side.described[:num_rows] == described:
            # The same requests some tokens later.
            side.positions[:num_rows] = [sample.position for sample in samples]
            side.has_mask[:num_rows] = [sample.mask is not None for sample in samples]
            return
        side.described = described if have_no_lists else []
        used = device_sampling.fill_rows(
            samples, self._vocab_size, side.rows, self._host_ids, self._host_values
        )
        if used:
            self._driver.upload(self._tensors.ids.address, self._host_ids[:used])
            self._driver.upload(self._tensors.values.address, self._host_values[:used])

    def advance(self, num_rows: int) -> None:
        """The rows that were described last, all of them plain, a token later, on the other
        side."""
        before = self._sides[self.side]
        side = self._turn()
        side.rows[:num_rows] = before.rows[:num_rows]
        side.positions[:num_rows] += 1
        side.described = before.described[:num_rows]

    @property
    def next_side(self) -> int:
        """The one that will be described next."""
        return (self.side + 1) % len(self._sides)

    def _turn(self) -> _Side:
        """To the side that no queued unit uses."""
        self.side = self.next_side
        return self._sides[self.side]

    def queue_copy_in(self, num_rows: int) -> None:
        """Queue the copy of the rows' parameters."""
        size = num_rows * device_sampling.ROW.itemsize
        self._driver.upload(self._tensors.rows.address, self._sides[self.side].block[:size])

    @property
    def host_masks(self) -> NDArray[np.uint32]:
        """[max_rows, words], page-locked: to be filled once nothing that was queued before copies
        masks any more."""
        return self._host_masks

    def queue_masks(self, num_rows: int) -> None:
        """Queue the copy of the filled masks."""
        self._driver.upload(self._tensors.masks.address, self._host_masks[:num_rows])

    def queue_masked(self, logits: DeviceTensor) -> None:
        """Queue the choice of a token a row, under the masks of the rows that have one; may be
        captured."""
        self._launch(logits, self._tensors.masks.rows(0, logits.shape[0]))

    def queue_draft(
        self,
        logits: DeviceTensor,
        rows: DeviceTensor,
        outputs: SamplingOutputs,
        *,
        num_valid_ids: int | None = None,
    ) -> None:
        """Queue the choice of a token a row as `rows` on the device say, which have no lists; may
        be captured. Ids from `num_valid_ids` on are not chosen."""
        self._launch_rows(logits, rows, None, outputs, num_valid_ids)

    def queue(self, logits: DeviceTensor) -> None:
        """Queue the choice of a token a row from logits f32 [R, V]; may be captured. Rows choose as
        if they had no masks."""
        self._launch(logits, None)

    def _launch(self, logits: DeviceTensor, masks: DeviceTensor | None) -> None:
        num_rows = logits.shape[0]
        self._launch_rows(logits, self.rows(num_rows), masks, self.outputs(num_rows))

    def rows(self, num_rows: int) -> DeviceTensor:
        """uint8, where the parameters of a unit's rows are."""
        return self._tensors.rows.rows(0, num_rows * device_sampling.ROW.itemsize)

    def outputs(self, num_rows: int) -> SamplingOutputs:
        """Where the results of a unit's rows are."""
        return results_of(self._tensors.results.address, num_rows)

    def _launch_rows(
        self,
        logits: DeviceTensor,
        rows: DeviceTensor,
        masks: DeviceTensor | None,
        outputs: SamplingOutputs,
        num_valid_ids: int | None = None,
    ) -> None:
        device_sampling.launch(
            self._driver.kernels,
            logits,
            SamplingInputs(rows, self._tensors.ids, self._tensors.values, masks),
            outputs,
            num_valid_ids=num_valid_ids or self._vocab_size,
            scratch=self._tensors.scratch,
            stream=self._driver.stream,
            is_chained=masks is None,
        )

    def queue_copy_out(self, num_rows: int) -> None:
        """Queue the copy of the results."""
        size = num_rows * _RESULT_WORDS
        self._driver.download(self._sides[self.side].results[:size], self._tensors.results.address)

    def results(self, num_rows: int, side: int) -> IntArray:
        """What the unit that was described on `side` and has run left for `parse`; the
        caller's own."""
        return self._sides[side].results[: num_rows * _RESULT_WORDS].copy()

    def parse(self, samples: Sequence[SampleRow], results: IntArray) -> tuple[RowOutput, ...]:
        """The outputs of the rows."""
        num_rows = len(samples)
        words = results[: 2 * num_rows].tolist()
        outputs = []
        for index, sample in enumerate(samples):
            token_id, is_finite = words[index], words[num_rows + index]
            if not is_finite or token_id < 0:
                is_dead_end = bool(is_finite)
                outputs.append(RowOutput(None, is_finite=is_dead_end, is_dead_end=is_dead_end))
                continue
            if token_id >= self._vocab_size:
                raise InvariantError(f"the device chose token {token_id}")
            num_top = sample.params.top_logprobs
            logprobs = None if num_top is None else _logprobs(results, index, num_rows, num_top)
            outputs.append(RowOutput(GeneratedToken(token_id, logprobs)))
        return tuple(outputs)


def results_of(address: int, num_rows: int) -> SamplingOutputs:
    """The sampler's outputs dense for exactly this many rows, so that one copy brings them all."""
    size = num_rows * MAX_TOP
    places = (0, num_rows, 2 * num_rows, 3 * num_rows, 3 * num_rows + size)
    shapes = ((num_rows,), (num_rows,), (num_rows,), (num_rows, MAX_TOP), (num_rows, MAX_TOP))
    dtypes = ("int32", "int32", "float32", "int32", "float32")
    return SamplingOutputs(
        *(
            DeviceTensor.dense(address + 4 * place, shape, dtype)
            for place, shape, dtype in zip(places, shapes, dtypes, strict=True)
        )
    )


def _logprobs(results: IntArray, index: int, num_rows: int, num_top: int) -> TokenLogprobs:
    values: Float32Array = results.view(np.float32)
    first = 3 * num_rows + index * MAX_TOP
    top_ids = results[first : first + num_top].tolist()
    first += num_rows * MAX_TOP
    tops = values[first : first + num_top].tolist()
    own = float(values[2 * num_rows + index])
    return TokenLogprobs(own, tuple(zip(top_ids, tops, strict=True)))


def has_masks(samples: Sequence[SampleRow]) -> bool:
    return any(sample.mask is not None for sample in samples)


def is_plain(sample: SampleRow) -> bool:
    """All of it but the position follows from its parameters."""
    return sample.mask is None and _is_short(sample)


def _is_short(sample: SampleRow) -> bool:
    """All of it but position and mask follows from its parameters."""
    params = sample.params
    return not (
        params.counts_tokens
        or params.logit_bias
        or sample.suppressed_ids
        or sample.purpose is not DrawPurpose.TARGET
    )


def num_listed(sample: SampleRow) -> int:
    """Most ids that the lists of a row take."""
    params, size = sample.params, len(sample.suppressed_ids) + len(sample.params.logit_bias)
    if params.counts_tokens:
        size += int(sample.generated_ids.size) + int(sample.prompt_ids.size)
    return size


def list_capacity(max_rows: int, vocab_size: int, max_context: int) -> int:
    """Ids that the lists of a unit may hold: prompt and generated tokens of each row are distinct
    and never more than its context."""
    return max_rows * (2 * min(vocab_size, max_context) + min(2 * vocab_size, _SPARSE_IDS))
