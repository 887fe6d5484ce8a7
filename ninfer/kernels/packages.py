"""What is said where a Python package of CUDA is missing."""

from __future__ import annotations

from typing import Final

from ninfer.contract.errors import DeviceError

EXTRAS_HINT: Final = 'the extras cuda12 and cuda13 bring what is needed: pip install -e ".[cuda12]"'


def missing_package(what: str, error: ImportError) -> DeviceError:
    """`what` the package is, as in "the CUDA driver's"."""
    return DeviceError(f"{what} Python package is missing ({error}); {EXTRAS_HINT}")
