"""Generation fields that all protocols share: types, ranges, spellings -> GenerationParams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ninfer.contract.cache import CacheRequest
from ninfer.contract.chat import GenerationParams
from ninfer.gateway.fields import (
    Fields,
    as_integer,
    as_number,
    as_string,
    first_given,
    invalid_type,
    invalid_value,
)
from ninfer.gateway.thinking import parse_thinking_budget

TEMPERATURES: Final = (0.0, 2.0)
SHARES: Final = (0.0, 1.0)
"""Range of top_p and min_p."""
PENALTIES: Final = (-2.0, 2.0)
"""Range of the presence and the frequency penalty."""
MAX_REPETITION_PENALTY: Final = 10.0
BIASES: Final = (-100.0, 100.0)
MAX_CHOICES: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_BIASES: Final = 1024
MAX_TIMEOUT_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spellings:
    """Names of the fields that protocols spell differently.

    The first one present counts; the others are checked all the same.
    """

    max_tokens: Sequence[str]
    min_tokens: Sequence[str]
    seed: Sequence[str]
    include_stop_string: Sequence[str]
    stop: str = "stop"
    default_max_tokens: int | None = None


OPENAI_SPELLINGS: Final = Spellings(
    max_tokens=("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"),
    min_tokens=("min_tokens",),
    seed=("seed",),
    include_stop_string=("include_stop_str_in_output",),
)
NATIVE_SPELLINGS: Final = Spellings(
    max_tokens=("max_new_tokens", "max_completion_tokens", "max_tokens", "max_output_tokens"),
    min_tokens=("min_new_tokens", "min_tokens"),
    seed=("seed", "sampling_seed"),
    include_stop_string=("include_stop_str_in_output", "no_stop_trim"),
    default_max_tokens=128,
)


def parse_params(
    fields: Fields,
    spellings: Spellings,
    vocab_size: int,
    *,
    top_logprobs: int | None,
    split_reasoning: bool,
    cache: CacheRequest,
) -> GenerationParams:
    """Check every shared field of one object. Raises RequestError naming the field."""
    max_tokens = _max_tokens(fields, spellings)
    return GenerationParams(
        temperature=fields.number("temperature", *TEMPERATURES),
        top_k=_top_k(fields, vocab_size),
        top_p=fields.number("top_p", *SHARES),
        min_p=fields.number("min_p", *SHARES),
        presence_penalty=fields.number("presence_penalty", *PENALTIES),
        frequency_penalty=fields.number("frequency_penalty", *PENALTIES),
        repetition_penalty=_repetition_penalty(fields),
        logit_bias=_logit_bias(fields, vocab_size),
        seed=_integer_of(fields, spellings.seed),
        top_logprobs=top_logprobs,
        max_tokens=max_tokens,
        min_tokens=_min_tokens(fields, spellings, max_tokens),
        stop=_stop(fields, spellings.stop),
        stop_token_ids=_stop_token_ids(fields, vocab_size),
        ignore_eos=fields.flag("ignore_eos"),
        include_stop_string=_flag_of(fields, spellings.include_stop_string),
        skip_special_tokens=fields.boolean("skip_special_tokens") is not False,
        stop_in_reasoning=fields.flag("stop_in_reasoning"),
        split_reasoning=split_reasoning,
        timeout_s=fields.number("timeout_s", 0.0, MAX_TIMEOUT_S, above=True),
        cache=cache,
        thinking_budget=parse_thinking_budget(fields),
    )


def parse_num_choices(fields: Fields) -> int:
    """`n`; `best_of` may only repeat it."""
    num_choices = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != num_choices:
        raise invalid_value(fields.path_of("best_of"), "must be equal to n")
    return num_choices


def check_hints(fields: Fields) -> None:
    """Fields without effect here, checked lightly."""
    fields.child("metadata")
    fields.integer("priority")


def _integer_of(fields: Fields, names: Sequence[str]) -> int | None:
    return first_given(fields.integer(name) for name in names)


def _flag_of(fields: Fields, names: Sequence[str]) -> bool:
    return first_given(fields.boolean(name) for name in names) or False


def _max_tokens(fields: Fields, spellings: Spellings) -> int | None:
    """-1 is a common way to say "no limit"."""
    value = first_given(fields.integer(name, -1) for name in spellings.max_tokens)
    if value is None:
        return spellings.default_max_tokens
    return None if value == -1 else value


def _min_tokens(fields: Fields, spellings: Spellings, max_tokens: int | None) -> int:
    value = first_given(fields.integer(name, 0) for name in spellings.min_tokens) or 0
    if max_tokens is not None and value > max_tokens:
        name = fields.first_of(spellings.min_tokens) or spellings.min_tokens[0]
        raise invalid_value(
            fields.path_of(name), f"must not exceed the output limit of {max_tokens}"
        )
    return value


def _top_k(fields: Fields, vocab_size: int) -> int | None:
    """As large as the vocabulary is the same as off."""
    value = fields.integer("top_k", -1)
    return 0 if value is not None and value >= vocab_size else value


def _repetition_penalty(fields: Fields) -> float | None:
    names = ("repetition_penalty", "repeat_penalty")
    return first_given(
        fields.number(name, 0.0, MAX_REPETITION_PENALTY, above=True) for name in names
    )


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.child("logit_bias")
    if biases is None:
        return ()
    if len(biases.values) > MAX_BIASES:
        raise invalid_value(biases.path, f"must have at most {MAX_BIASES} entries")
    pairs: dict[int, float] = {}
    for key, value in biases.values.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_number or int(key) >= vocab_size:
            raise invalid_value(
                biases.path, f"must have token ids from 0 to {vocab_size - 1} as keys"
            )
        pairs[int(key)] = as_number(value, biases.path_of(key), *BIASES)
    return tuple(sorted(pairs.items()))


def _stop(fields: Fields, name: str) -> tuple[str, ...]:
    path = fields.path_of(name)
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (_stop_string(value, path),)
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of strings", value)
    if len(value) > MAX_STOPS:
        raise invalid_value(path, f"must have at most {MAX_STOPS} strings")
    return tuple(_stop_string(item, f"{path}[{index}]") for index, item in enumerate(value))


def _stop_string(value: object, path: str) -> str:
    text = as_string(value, path)
    if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
        raise invalid_value(path, f"must have 1 to {MAX_STOP_CHARACTERS} characters")
    return text


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    path = fields.path_of("stop_token_ids")
    values = fields.sequence("stop_token_ids") or []
    if len(values) > MAX_STOP_TOKEN_IDS:
        raise invalid_value(path, f"must have at most {MAX_STOP_TOKEN_IDS} ids")
    return tuple(
        as_integer(value, f"{path}[{index}]", 0, vocab_size - 1)
        for index, value in enumerate(values)
    )
