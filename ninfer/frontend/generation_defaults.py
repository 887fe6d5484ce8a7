"""Sampling defaults of a model: its generation_config, checked once at load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ninfer.contract.errors import ModelFileError

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


def read_generation_config(config: Mapping[str, Any]) -> GenerationDefaults:
    """Raises ModelFileError naming the key of a bad value. Unknown keys do not concern us."""
    return GenerationDefaults(
        temperature=_temperature(config),
        top_k=_top_k(config),
        top_p=_number(config, "top_p", 0.0, 1.0),
        min_p=_number(config, "min_p", 0.0, 1.0),
        presence_penalty=_number(config, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_number(config, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=_repetition_penalty(config),
        eos_token_ids=_eos_token_ids(config),
    )


def _error(key: str, message: str) -> ModelFileError:
    return ModelFileError(GENERATION_CONFIG_FILE, key, message)


def _number(
    config: Mapping[str, Any], key: str, minimum: float, maximum: float = math.inf
) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _error(key, f"{value!r} is not a number")
    if not minimum <= value <= maximum:
        limit = f"at least {minimum:g}" if maximum == math.inf else f"{minimum:g} to {maximum:g}"
        raise _error(key, f"{value} is out of range ({limit})")
    return float(value)


def _temperature(config: Mapping[str, Any]) -> float | None:
    temperature = _number(config, "temperature", 0.0)
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _error("do_sample", f"{do_sample!r} is neither true nor false")
    if do_sample is False:
        return 0.0
    if do_sample is True and temperature is None:
        return 1.0
    return temperature


def _top_k(config: Mapping[str, Any]) -> int | None:
    value = config.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _error("top_k", f"{value!r} is not a whole number")
    if value < -1:
        raise _error("top_k", f"{value} is out of range (at least -1)")
    return value


def _repetition_penalty(config: Mapping[str, Any]) -> float | None:
    value = _number(config, "repetition_penalty", 0.0)
    if value == 0.0:
        raise _error("repetition_penalty", "0 is out of range (above 0)")
    return value


def _eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = config.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _error("eos_token_id", f"{token_id!r} is not a token id")
    return tuple(ids)
