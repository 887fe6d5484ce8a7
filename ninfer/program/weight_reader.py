"""Weights of a source one by one, checked against the objects it announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelObject, ModelSource
from ninfer.program import memory_costs


def read_weights(
    source: ModelSource, progress: Callable[[str, int, int], None]
) -> Iterator[tuple[str, Float32Array]]:
    """(name, float32) of every text object. `progress` counts float32 bytes that the caller is done
    with. Raises ModelFileError, and InvariantError when the source breaks its word."""
    missing = {item.name: item for item in source.objects if item.component == "text"}
    done, total = 0, memory_costs.weights_bytes_of(source.objects)
    progress("weights", done, total)
    for item, array in source.read_float32():
        _check_object(missing.pop(item.name, None), item, array)
        yield item.name, array
        done += array.nbytes
        progress("weights", done, total)
    if missing:
        raise InvariantError(f"{source.path}: {', '.join(missing)} were not read")


def _check_object(expected: ModelObject | None, item: ModelObject, array: Float32Array) -> None:
    if expected is None:
        raise InvariantError(f"{item.name} was read twice or is not an object of the model")
    if array.shape != expected.shape or array.dtype != np.float32:
        raise InvariantError(
            f"{item.name} was read as {array.dtype} {array.shape}, not float32 {expected.shape}"
        )
