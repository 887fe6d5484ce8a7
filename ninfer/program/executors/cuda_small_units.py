"""SmallUnits: prompt units of few inputs as replayed graphs.

Such units are frequent: tokens that a grammar forces, replays, the end of a prompt whose beginning
is cached. Launched kernel by kernel they would cost the host many times what they cost the device.
A graph serves units of up to its number of columns; the others are padding, which changes no bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from ninfer.contract.units import UnitRow
from ninfer.program.executors.cuda_driver import CudaDriver, Graph
from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_window import WindowBlock, WindowInputs
from ninfer.program.graphs import capture_warm

_WIDTHS: Final = (1, 2, 4, 8, 16)


class SmallUnits:
    """Captures its graphs at once; each ends behind the last layer."""

    def __init__(
        self,
        driver: CudaDriver,
        memory: WindowBlock,
        *,
        max_tokens: int,
        queue_layers: Callable[[UnitTensors], DeviceTensor],
        warm_up_row: UnitRow,
    ) -> None:
        """queue_layers   queues embedding and layers of a unit; returns the residual stream"""
        self._driver = driver
        self._inputs = WindowInputs(driver, memory, keeps_state=True)
        self._queue_layers = queue_layers
        self._streams: dict[int, DeviceTensor] = {}
        self._graphs: dict[int, Graph] = {}
        self._widths = (*(width for width in _WIDTHS if width < max_tokens), max_tokens)
        for width in self._widths:
            self._inputs.queue((warm_up_row,), width, (1,))
            self._graphs[width] = capture_warm(driver, partial(self._queue_unit, width))

    def queue(self, row: UnitRow) -> tuple[UnitTensors, DeviceTensor]:
        """Queue a unit of at most `max_tokens` inputs; its tensors and the residual stream behind
        the last layer, both with columns of padding behind the inputs. Nothing of such a unit may
        be queued."""
        width = self.queue_inputs(row)
        self._driver.replay(self._graphs[width])
        return self.tensors(width), self._streams[width]

    def queue_inputs(self, row: UnitRow) -> int:
        """Queue only what the unit is told; its columns."""
        count = row.token_ids.size
        width = next(width for width in self._widths if width >= count)
        self._inputs.queue((row,), width, (count,))
        return width

    def queue_unit(self, width: int) -> DeviceTensor:
        """Queue what the graph of so many columns holds; the residual stream."""
        self._streams[width] = self._queue_layers(self.tensors(width))
        return self._streams[width]

    def tensors(self, width: int) -> UnitTensors:
        """Where a unit of so many columns finds its inputs."""
        return self._inputs.tensors(1, width).unit

    def _queue_unit(self, width: int) -> None:
        self.queue_unit(width)
