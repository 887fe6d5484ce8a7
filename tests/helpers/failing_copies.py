"""FailingCopies: a Program some of whose copies between device and host turn out bad.

Such a copy has been made and is found to be wrong: what it was to publish is taken back before
anybody sees it, and `settle_transfer` says False. Files fail by themselves (MemoryDisk).
"""

from __future__ import annotations

import random
from collections import Counter

from ninfer.contract.cache import CheckpointId
from ninfer.contract.program import Program, Transfer, TransferKind
from tests.helpers.watched_program import WatchedProgram


class FailingCopies(WatchedProgram):
    """`failures` is the share of bad copies; `failed` counts transfers that did not end well."""

    def __init__(self, program: Program, seed: int, failures: float) -> None:
        super().__init__(program)
        self._random = random.Random(seed)
        self._failures = failures
        self.failed: Counter[TransferKind] = Counter()

    def settle_transfer(self, transfer: Transfer) -> bool:
        is_ok = super().settle_transfer(transfer)
        if is_ok and self._random.random() < self._failures:
            is_ok = not self._is_taken_back(transfer.kind, transfer.checkpoint)
        self.failed[transfer.kind] += not is_ok
        return is_ok

    def _is_taken_back(self, kind: TransferKind, checkpoint: CheckpointId) -> bool:
        if kind is TransferKind.DEMOTE:
            self._program.drop_host(checkpoint)
        elif kind is TransferKind.RESTORE:
            self._program.drop_device(checkpoint)
            self._lose_damaged(checkpoint)
        else:
            return False
        return True

    def _lose_damaged(self, checkpoint: CheckpointId) -> None:
        """A copy on the host that cannot be read is forgotten, if there is a file besides."""
        if self._program.checkpoint(checkpoint).is_on_disk and self._random.random() < 0.5:
            self._program.drop_host(checkpoint)
