"""JSON in model files: strict parsing, and typed, range-checked reads that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from ninfer.contract.errors import ModelFileError

MAX_INTEGER: Final = 2**31 - 1


def parse_object(data: bytes, path: Path, field: str | None = None) -> dict[str, Any]:
    """The JSON object in `data`. Raises ModelFileError for anything else, NaN and bad UTF-8."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ModelFileError(path, field, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, field, f"expected a JSON object, found {type_name(value)}")
    return value


def type_name(value: object) -> str:
    """JSON's word for the type of a parsed value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    return names.get(type(value), "an array" if isinstance(value, list) else "an object")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed reads from one JSON object of `path`; a null counts as missing.

    `prefix` is the object's own place in the document (`text_config.`). A read without a default
    requires the key. All errors are ModelFileError with the full key as `field`.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self.path, self.prefix + key, message)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(
        self, key: str, minimum: int, maximum: int = MAX_INTEGER, *, default: int | None = None
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, "an integer", value)
        if not minimum <= value <= maximum:
            raise self.error(key, f"{value} is not in [{minimum}, {maximum}]")
        return value

    def number(
        self,
        key: str,
        minimum: float,
        maximum: float = math.inf,
        *,
        default: float | None = None,
        above: bool = False,
    ) -> float:
        """`above`: the minimum itself is excluded."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(key, "a number", value)
        number = float(value)
        if not minimum <= number <= maximum or (above and number == minimum):
            bracket = "(" if above else "["
            raise self.error(key, f"{number:g} is not in {bracket}{minimum:g}, {maximum:g}]")
        return number

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong_type(key, "a boolean", value)
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong_type(key, "a string", value)
        return value

    def integers(
        self, key: str, minimum: int, maximum: int, *, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        if default is not None and not self.has(key):
            return default
        values = self._get(key, None)
        return tuple(self._item(key, value, minimum, maximum) for value in self._list(key, values))

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._list(key, self._get(key, None))
        for value in values:
            if not isinstance(value, str):
                raise self._wrong_type(key, "an array of strings", value)
        return tuple(values)

    def child(self, key: str) -> Fields:
        """The object under `key`."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self._wrong_type(key, "an object", value)
        return Fields(self.path, value, f"{self.prefix}{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "missing" if key not in self.values else "must not be null")
        return default

    def _list(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong_type(key, "an array", value)
        return value

    def _item(self, key: str, value: Any, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, "an array of integers", value)
        if not minimum <= value <= maximum:
            raise self.error(key, f"{value} is not in [{minimum}, {maximum}]")
        return value

    def _wrong_type(self, key: str, expected: str, value: object) -> ModelFileError:
        return self.error(key, f"expected {expected}, found {type_name(value)}")
