"""Sampling defaults of a model: its generation_config, checked once at load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ninfer.artifact.json_document import MAX_INTEGER, Fields

GENERATION_CONFIG_FILE: Final = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """None where generation_config says nothing.

    temperature     0 when the config asks for greedy decoding (`do_sample` false)
    eos_token_ids   None: those of config.json count
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] | None = None


def read_generation_config(
    config: Mapping[str, Any], path: Path = Path(GENERATION_CONFIG_FILE)
) -> GenerationDefaults:
    """Raises ModelFileError naming `path` and the key of a bad value. Unknown keys do not concern
    us."""
    fields = Fields(path, config)
    return GenerationDefaults(
        temperature=_temperature(fields),
        top_k=fields.integer("top_k", -1) if fields.has("top_k") else None,
        top_p=_number(fields, "top_p", 0.0, 1.0),
        min_p=_number(fields, "min_p", 0.0, 1.0),
        presence_penalty=_number(fields, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_number(fields, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=_number(fields, "repetition_penalty", 0.0, above=True),
        eos_token_ids=_eos_token_ids(fields),
    )


def _number(
    fields: Fields, key: str, minimum: float, maximum: float = math.inf, *, above: bool = False
) -> float | None:
    return fields.number(key, minimum, maximum, above=above) if fields.has(key) else None


def _temperature(fields: Fields) -> float | None:
    temperature = _number(fields, "temperature", 0.0)
    if not fields.has("do_sample"):
        return temperature
    if not fields.flag("do_sample", False):
        return 0.0
    return 1.0 if temperature is None else temperature


def _eos_token_ids(fields: Fields) -> tuple[int, ...] | None:
    key = "eos_token_id"
    if not fields.has(key):
        return None
    if isinstance(fields.values[key], list):
        return fields.integers(key, 0, MAX_INTEGER)
    return (fields.integer(key, 0),)
