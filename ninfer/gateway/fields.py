"""Typed reads of one JSON object; every error names the JSON path of the field.

A boolean is no number and a numeric string is none either; 5.0 is an integer and 5.5 is not;
integers stay within 64 bits; null is the same as absent. Messages carry no text of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from ninfer.contract.abandonment import stop_if_abandoned
from ninfer.contract.errors import RequestError

T = TypeVar("T")
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

_TYPE_NAMES: Final[Mapping[type, str]] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def invalid_type(path: str, wanted: str, value: object) -> RequestError:
    given = _TYPE_NAMES.get(type(value), "something else")
    return RequestError("invalid_type", f"'{path}' must be {wanted}, not {given}.", path)


def invalid_value(path: str, rule: str) -> RequestError:
    """`rule` completes "'path' ...", as in "must be at least 1"."""
    return RequestError("invalid_value", f"'{path}' {rule}.", path)


def missing(path: str) -> RequestError:
    return RequestError("missing_required_parameter", f"'{path}' is required.", path)


def unsupported_parameter(path: str, why: str) -> RequestError:
    return RequestError("unsupported_parameter", f"'{path}' is not supported: {why}.", path)


def unsupported_value(path: str, why: str) -> RequestError:
    return RequestError("unsupported_value", f"'{path}' is not supported: {why}.", path)


def as_integer(value: object, path: str, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(path, "an integer", value)
    if isinstance(value, float):
        if not value.is_integer():
            raise invalid_type(path, "an integer", value)
        value = int(value)
    if not minimum <= value <= maximum:
        lowest = INT64_MIN if value > maximum == INT64_MAX else minimum
        raise invalid_value(path, f"must be {_range_text(lowest, maximum)}")
    return value


def as_number(
    value: object, path: str, minimum: float, maximum: float, *, above: bool = False
) -> float:
    """`above`: the minimum itself is excluded."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(path, "a number", value)
    if not minimum <= value <= maximum or (above and value == minimum):
        lower = f"above {minimum:g}" if above else f"at least {minimum:g}"
        raise invalid_value(path, f"must be {lower} and at most {maximum:g}")
    return float(value)


def as_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_type(path, "a string", value)
    return value


def as_object(value: object, path: str) -> Fields:
    """Long lists are lists of objects, so here the reading of a body for nobody ends."""
    stop_if_abandoned()
    if not isinstance(value, dict):
        raise invalid_type(path, "an object", value)
    return Fields(value, path)


def first_given(values: Iterable[T | None]) -> T | None:
    """The value of the first of several spellings; all of them are read, and so checked."""
    return next((value for value in tuple(values) if value is not None), None)


class Fields:
    """One JSON object and where it stands in the request."""

    __slots__ = ("path", "values")

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Present and not null."""
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def first_of(self, names: Sequence[str]) -> str | None:
        """The first of several spellings that is present."""
        return next((name for name in names if self.has(name)), None)

    def boolean(self, name: str) -> bool | None:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise invalid_type(self.path_of(name), "a boolean", value)

    def flag(self, name: str) -> bool:
        return self.boolean(name) or False

    def integer(self, name: str, minimum: int = INT64_MIN, maximum: int = INT64_MAX) -> int | None:
        value = self.get(name)
        return None if value is None else as_integer(value, self.path_of(name), minimum, maximum)

    def number(
        self, name: str, minimum: float, maximum: float, *, above: bool = False
    ) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        return as_number(value, self.path_of(name), minimum, maximum, above=above)

    def string(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None else as_string(value, self.path_of(name))

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.string(name)
        if value is not None and value not in allowed:
            raise invalid_value(self.path_of(name), f"must be one of {', '.join(allowed)}")
        return value

    def meaning(self, name: str, table: Mapping[str, T]) -> T:
        """What a required word stands for, in capitals or not."""
        word = self.string(name)
        if word is None:
            raise missing(self.path_of(name))
        value = table.get(word.lower())
        if value is None:
            raise invalid_value(self.path_of(name), f"must be one of {', '.join(table)}")
        return value

    def sequence(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is None or isinstance(value, list):
            return value
        raise invalid_type(self.path_of(name), "a list", value)

    def child(self, name: str) -> Fields | None:
        value = self.get(name)
        return None if value is None else as_object(value, self.path_of(name))

    def children(self, name: str) -> Iterator[Fields]:
        """The objects of a list; absent is an empty list."""
        for index, value in enumerate(self.sequence(name) or ()):
            yield as_object(value, f"{self.path_of(name)}[{index}]")


def _range_text(minimum: int, maximum: int) -> str:
    if maximum == INT64_MAX:
        return "a 64-bit integer" if minimum == INT64_MIN else f"at least {minimum}"
    return f"{minimum} to {maximum}"
