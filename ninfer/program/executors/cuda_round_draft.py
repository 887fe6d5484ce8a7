"""RoundDraft: a draft model beside the target of the CUDA executor.

    a prompt   layers of the target -> queue_absorb
    a round    layers and choice of the target -> queue_settled -> guesses, each as graphs

What it keeps of a sequence lies where the target's does, in KV pages and StateImages. What it
writes behind a frontier is read by nobody before it was written anew.
"""

from __future__ import annotations

from typing import Protocol

from ninfer.program.executors.cuda_inputs import UnitTensors
from ninfer.program.executors.cuda_tensor import DeviceTensor
from ninfer.program.executors.cuda_window import Size, WindowTensors


class RoundDraft(Protocol):
    """Queues; the caller waits."""

    @property
    def proposals(self) -> DeviceTensor:
        """int32, flat: [R, K] the guesses of a round, -1 from where a row has none."""

    def queue_absorb(self, unit: UnitTensors, hidden: DeviceTensor, num_inputs: int) -> None:
        """Follow a prompt's unit. `hidden` [T, C] is the target's residual stream behind its last
        layer; it is used up. Columns from `num_inputs` on are padding."""

    def queue_settled(self, window: WindowTensors) -> None:
        """Behind draft_match, in the same graph: what outlives the round of its right inputs. The
        target's residual stream is still in its buffer and may be used up."""

    def queue_rewound(self, window: WindowTensors) -> None:
        """Behind a settled round, whatever was guessed since: what a StateImage has of it, now
        behind the columns that draft_match's `kept_columns` names. Follows a copy."""

    def capture_unit(self, window: WindowTensors) -> None:
        """Capture what depends on the columns of a round; one of these sizes was just settled."""

    def capture_rows(self, window: WindowTensors) -> None:
        """Capture what depends on a round's rows alone, in the same way."""

    def replay(self, size: Size, num_proposed: int) -> None:
        """Queue the guesses of a settled round: at most so many a row, or none."""
