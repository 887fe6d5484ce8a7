"""Which physical object holds a logical parameter, and what consumes an object.

Binding   logical parameter -> rows [start, stop) of an object's first axis
Use       object -> the place that reads it, and the activation precisions allowed there
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActivationPrecision(Enum):
    """How wide the activations may be that meet a weight."""

    A16 = "A16"
    A8 = "A8"
    A4 = "A4"


@dataclass(frozen=True, slots=True)
class Binding:
    """`parameter` is rows [start, stop) of object `object_name`."""

    parameter: str
    object_name: str
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """Index of the parameter's view of the object."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Use:
    """`object_name` is read by `consumer`, with one of `activations`."""

    object_name: str
    consumer: str
    activations: tuple[ActivationPrecision, ...]
