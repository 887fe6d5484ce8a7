"""TokenChoice: tokens from logits that are queued, with the masks of the rows that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ninfer.contract.sampling import SamplingParams
from ninfer.contract.units import RowOutput, SampleRow, UnitRow
from ninfer.program.executors.cuda_driver import CudaDriver, Graph
from ninfer.program.executors.cuda_masks import MaskFiller
from ninfer.program.executors.cuda_sampler import CudaSampler, has_masks
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_watch import DeviceWatch
from ninfer.program.graphs import DecodeGraphs


class TokenChoice:
    """Owns what fills masks. Captures a graph of the choice for every number of rows, as
    a launch of its own would cost the host ten times as much."""

    def __init__(
        self,
        driver: CudaDriver,
        watch: DeviceWatch,
        sampler: CudaSampler,
        logits: Callable[[int], DeviceTensor],
        *,
        max_rows: int,
    ) -> None:
        """logits   where those of so many rows lie"""
        self._driver = driver
        self._watch = watch
        self._sampler = sampler
        self._logits = logits
        self._graphs = DecodeGraphs[Graph](
            driver, max_rows, prepare=self._prepare, enqueue=self._queue_masked
        )
        self.masks = MaskFiller(sampler.host_masks)

    async def run(
        self, samples: Sequence[SampleRow], logits: DeviceTensor
    ) -> tuple[RowOutput, ...]:
        """The tokens from any logits, without masks, once the device has chosen them."""
        sampler = self._sampler
        sampler.write(samples)
        sampler.queue_copy_in(len(samples))
        sampler.queue(logits)
        sampler.queue_copy_out(len(samples))
        self._driver.mark(sampler.side)
        await self._watch.passed(sampler.side)
        return self.outputs(samples)

    def outputs(self, samples: Sequence[SampleRow]) -> tuple[RowOutput, ...]:
        """The tokens of the choice that was queued last and has run."""
        sampler = self._sampler
        return sampler.parse(samples, sampler.results(len(samples), sampler.side))

    async def queue(self, samples: Sequence[SampleRow], *, are_new: bool = False) -> None:
        """Queue the choice from the logits of so many rows that are queued, the copy of its results
        and the mark behind it. Masks are filled while the device works on what was queued before.

        are_new   these requests choose for the first time
        """
        sampler = self._sampler
        sampler.write(samples)
        sampler.queue_copy_in(len(samples))
        if has_masks(samples):
            await self.masks.fill(samples, is_new=are_new)
            sampler.queue_masks(len(samples))
        self._graphs.replay(len(samples))
        sampler.queue_copy_out(len(samples))
        self._driver.mark(sampler.side)

    def close(self) -> None:
        self.masks.close()

    def _prepare(self, num_rows: int) -> None:
        self._sampler.write((unused_sample(),) * num_rows)
        self._sampler.queue_copy_in(num_rows)

    def _queue_masked(self, num_rows: int) -> None:
        self._sampler.queue_masked(self._logits(num_rows))


def samples_of(rows: Sequence[UnitRow]) -> tuple[SampleRow, ...]:
    """How to choose a token in each row; anyhow where nobody wants one."""
    return tuple(row.sample or unused_sample() for row in rows)


def unused_sample() -> SampleRow:
    nothing = np.empty(0, np.int32)
    return SampleRow(SamplingParams(), 0, nothing, nothing, nothing)
