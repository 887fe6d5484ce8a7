"""The body of /generate, checked field by field -> NativeRequest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ninfer.contract.chat import GenerationParams
from ninfer.gateway.fields import (
    Fields,
    as_integer,
    as_string,
    invalid_type,
    invalid_value,
    missing,
    unsupported_value,
)
from ninfer.gateway.generation_fields import (
    MAX_TOP_LOGPROBS,
    NATIVE_SPELLINGS,
    check_hints,
    parse_num_choices,
    parse_params,
    refuse_constraints,
)

MAX_PROMPTS: Final = 128
_MEDIA: Final = ("image_data", "video_data", "audio_data", "input_embeds")
NativePrompt: TypeAlias = str | tuple[int, ...]
"""Raw text, or token ids as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    """`prompt_field` is "text" or "input_ids"; `ids` has one answer id a prompt, or None each.

    is_batch         prompts came as a list, so the answer is one
    incremental      stream frames carry only what is new
    text_in_logprobs logprob triples carry the token's text
    """

    prompts: tuple[NativePrompt, ...]
    prompt_field: str
    ids: tuple[str | None, ...]
    is_batch: bool
    params: GenerationParams
    num_choices: int
    stream: bool
    incremental: bool
    text_in_logprobs: bool


def parse_native_request(fields: Fields, vocab_size: int) -> NativeRequest:
    """Raises RequestError."""
    _refuse_unsupported(fields)
    prompt_field = _prompt_field(fields)
    value = fields.get(prompt_field)
    path = fields.path_of(prompt_field)
    prompts: tuple[NativePrompt, ...]
    if prompt_field == "text":
        prompts, is_batch = _texts(value, path)
    else:
        prompts, is_batch = _id_lists(value, path, vocab_size)
    sampling = fields.child("sampling_params") or Fields({}, fields.path_of("sampling_params"))
    refuse_constraints(sampling)
    check_hints(fields)
    return NativeRequest(
        prompts=prompts,
        prompt_field=prompt_field,
        ids=_ids(fields, len(prompts), is_batch),
        is_batch=is_batch,
        params=parse_params(
            sampling,
            NATIVE_SPELLINGS,
            vocab_size,
            top_logprobs=_top_logprobs(fields),
            split_reasoning=False,
        ),
        num_choices=parse_num_choices(sampling),
        stream=fields.flag("stream"),
        incremental=fields.flag("incremental"),
        text_in_logprobs=fields.flag("return_text_in_logprobs"),
    )


def _prompt_field(fields: Fields) -> str:
    given = [name for name in ("text", "input_ids") if fields.has(name)]
    if not given:
        raise missing(fields.path_of("text"))
    if len(given) > 1:
        raise invalid_value(fields.path_of("input_ids"), "excludes text")
    return given[0]


def _texts(value: object, path: str) -> tuple[tuple[str, ...], bool]:
    if not isinstance(value, list):
        return (_text(value, path),), False
    _check_batch(value, path)
    return tuple(_text(item, f"{path}[{index}]") for index, item in enumerate(value)), True


def _text(value: object, path: str) -> str:
    text = as_string(value, path)
    if not text:
        raise invalid_value(path, "must not be empty")
    return text


def _id_lists(
    value: object, path: str, vocab_size: int
) -> tuple[tuple[tuple[int, ...], ...], bool]:
    if not isinstance(value, list):
        raise invalid_type(path, "a list of token ids", value)
    if not value or not isinstance(value[0], list):
        return (_token_ids(value, path, vocab_size),), False
    _check_batch(value, path)
    lists = (_token_ids(item, f"{path}[{i}]", vocab_size) for i, item in enumerate(value))
    return tuple(lists), True


def _token_ids(value: object, path: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise invalid_type(path, "a list of token ids", value)
    if not value:
        raise invalid_value(path, "must not be empty")
    return tuple(
        as_integer(item, f"{path}[{index}]", 0, vocab_size - 1) for index, item in enumerate(value)
    )


def _check_batch(values: Sequence[Any], path: str) -> None:
    if not 1 <= len(values) <= MAX_PROMPTS:
        raise invalid_value(path, f"must have 1 to {MAX_PROMPTS} prompts")


def _ids(fields: Fields, num_prompts: int, is_batch: bool) -> tuple[str | None, ...]:
    value = fields.get("rid")
    path = fields.path_of("rid")
    if value is None:
        return (None,) * num_prompts
    if not is_batch:
        return (as_string(value, path),)
    if not isinstance(value, list):
        raise invalid_type(path, "a list of strings", value)
    if len(value) != num_prompts:
        raise invalid_value(path, "must have one id for each prompt")
    return tuple(as_string(item, f"{path}[{index}]") for index, item in enumerate(value))


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("return_logprob")
    count = fields.integer("top_logprobs_num", 0, MAX_TOP_LOGPROBS) or 0
    start = fields.integer("logprob_start_len", -1)
    if wanted and start is not None and start >= 0:
        raise unsupported_value(
            fields.path_of("logprob_start_len"), "prompts have no logprobs here"
        )
    return count if wanted else None


def _refuse_unsupported(fields: Fields) -> None:
    refuse_constraints(fields)
    for name in _MEDIA:
        if fields.get(name) not in (None, "", []):
            raise unsupported_value(fields.path_of(name), "this model takes text alone")
