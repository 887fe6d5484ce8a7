"""Weights of a source one by one, checked against the objects it announced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.arrays import Float32Array
from ninfer.contract.errors import InvariantError
from ninfer.contract.model import ModelObject, ModelSource
from ninfer.contract.weights import AnyBand
from ninfer.program import memory_costs

Progress: TypeAlias = Callable[[str, int, int], None]


def read_weights(
    source: ModelSource, progress: Progress, components: Sequence[str] = ("text",)
) -> Iterator[tuple[str, Float32Array]]:
    """(name, float32) of every object of the components. `progress` counts float32 bytes that the
    caller is done with. Raises ModelFileError, and InvariantError when the source breaks its
    word."""
    watch = _Watch(source, progress, components)
    for component in components:
        for item, array in source.read_float32(component):
            _check_shape(watch.expect(item), item, array, (np.float32,))
            yield item.name, array
            watch.finish(item)
    watch.close()


def read_bands(
    source: ModelSource,
    encoded: Collection[str],
    progress: Progress,
    components: Sequence[str] = ("text",),
) -> Iterator[tuple[str, tuple[AnyBand, ...]]]:
    """(name, bands) of every object of the components: of those in `encoded` as they are stored, of
    others one band of numbers. `progress` and errors as read_weights."""
    watch = _Watch(source, progress, components)
    for component in components:
        for item, bands in source.read_bands(encoded, component):
            expected = watch.expect(item)
            if item.name not in encoded:
                _check_shape(expected, item, bands[0].codes, (np.float32, np.uint16))
            yield item.name, bands
            watch.finish(item)
    watch.close()


class _Watch:
    """Sees to it that every object of the components comes once, and reports progress."""

    def __init__(self, source: ModelSource, progress: Progress, components: Sequence[str]) -> None:
        self._missing = {item.name: item for item in source.objects if item.component in components}
        self._path = source.path
        self._progress = progress
        self._done = 0
        self._total = memory_costs.weights_bytes_of(source.objects, components)
        progress("weights", 0, self._total)

    def expect(self, item: ModelObject) -> ModelObject:
        expected = self._missing.pop(item.name, None)
        if expected is None:
            raise InvariantError(f"{item.name} was read twice or is not an object of the model")
        return expected

    def finish(self, item: ModelObject) -> None:
        self._done += memory_costs.object_bytes(item)
        self._progress("weights", self._done, self._total)

    def close(self) -> None:
        if self._missing:
            raise InvariantError(f"{self._path}: {', '.join(self._missing)} were not read")


def _check_shape(
    expected: ModelObject, item: ModelObject, array: NDArray[Any], dtypes: tuple[type, ...]
) -> None:
    if array.shape != expected.shape or array.dtype not in dtypes:
        names = " or ".join(dtype.__name__ for dtype in dtypes)
        raise InvariantError(
            f"{item.name} was read as {array.dtype} {array.shape}, not {names} {expected.shape}"
        )
