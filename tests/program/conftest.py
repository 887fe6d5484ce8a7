"""What tests of checkpoints and of transfers begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.checkpoint_rig import CheckpointRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CheckpointRig]:
    built = CheckpointRig(tmp_path)
    yield built
    built.program.close()


@pytest.fixture
def attention(tmp_path: Path) -> Iterator[CheckpointRig]:
    """A model without StateImages."""
    built = CheckpointRig(tmp_path, has_states=False)
    yield built
    built.program.close()
