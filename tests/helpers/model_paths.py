"""Paths of the models that lie in the tree, and how they are copied for a test to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
DEMO_MODEL = REPOSITORY / "ninfer" / "data" / "demo_model"
GOLDEN_CASES = tuple(sorted(path.parent.name for path in GOLDEN.glob("*/golden.json")))
"""Names of all golden cases."""


def golden_model(case: str) -> Path:
    return GOLDEN / case / "model"


def all_models() -> list[Path]:
    """Every golden checkpoint and the demo model."""
    return [*(golden_model(case) for case in GOLDEN_CASES), DEMO_MODEL]


def copy_golden(case: str, folder: Path) -> Path:
    """A private copy of a golden checkpoint."""
    return Path(shutil.copytree(golden_model(case), folder))
