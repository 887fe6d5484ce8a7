"""The body of /generate, checked field by field -> NativeRequest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ninfer.contract.cache import CacheRequest
from ninfer.contract.chat import GenerationParams
from ninfer.contract.sampling import PromptScoring
from ninfer.gateway.cache_fields import parse_cache_request
from ninfer.gateway.constraint_fields import parse_constraint
from ninfer.gateway.fields import (
    Fields,
    as_object,
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
)
from ninfer.gateway.prompt_fields import RawPrompt, RawPrompts, parse_id_lists, parse_texts
from ninfer.gateway.refused_fields import refuse, refuse_unsupported

_MEDIA: Final = ("image_data", "video_data", "audio_data", "input_embeds")
_SAMPLING_FIELDS: Final = (
    *NATIVE_SPELLINGS.max_tokens,
    *NATIVE_SPELLINGS.min_tokens,
    *NATIVE_SPELLINGS.seed,
    *NATIVE_SPELLINGS.include_stop_string,
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repeat_penalty",
    "logit_bias",
    "n",
    "best_of",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "timeout_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePrompt:
    """One prompt of a request. `answer_id`: the client's own id for its answer, or None."""

    raw: RawPrompt
    answer_id: str | None
    params: GenerationParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    """Prompts and what their answers have in common.

    is_batch         prompts came as a list, so the answer is one
    num_choices      of each prompt
    incremental      stream frames carry only what is new
    wants_logprobs   answers carry logprob triples
    text_in_logprobs logprob triples carry the token's text
    logprob_start    the prompt token from which on answers have triples for the prompt, or None
    """

    prompts: tuple[NativePrompt, ...]
    is_batch: bool
    num_choices: int
    stream: bool
    incremental: bool
    wants_logprobs: bool
    text_in_logprobs: bool
    logprob_start: int | None


def parse_native_request(
    fields: Fields, vocab_size: int, session_header: str | None = None
) -> NativeRequest:
    """Raises RequestError."""
    _refuse_unsupported(fields)
    check_hints(fields)
    given = _prompts(fields, vocab_size)
    samplings = _samplings(fields, len(given.prompts))
    ids = _ids(fields, len(given.prompts), given.is_batch)
    top_logprobs, start = _top_logprobs(fields), _logprob_start(fields)
    scoring = None
    if top_logprobs is not None and start is not None:
        scoring = PromptScoring(start + 1, top_logprobs)
    cache = parse_cache_request(fields, session_header)
    params = (_params(sampling, vocab_size, top_logprobs, cache) for sampling in samplings)
    prompts = tuple(
        NativePrompt(raw=raw, answer_id=answer_id, params=replace(own, scoring=scoring))
        for raw, answer_id, own in zip(given.prompts, ids, params, strict=True)
    )
    return NativeRequest(
        prompts=prompts,
        is_batch=given.is_batch,
        num_choices=_num_choices(samplings),
        stream=fields.flag("stream"),
        incremental=fields.flag("incremental"),
        wants_logprobs=top_logprobs is not None,
        text_in_logprobs=fields.flag("return_text_in_logprobs"),
        logprob_start=None if scoring is None else start,
    )


def _samplings(fields: Fields, num_prompts: int) -> list[Fields]:
    """The sampling_params of every prompt: one object for all, or a list with one for each."""
    value = fields.get("sampling_params")
    path = fields.path_of("sampling_params")
    if not isinstance(value, list):
        return [Fields({}, path) if value is None else as_object(value, path)] * num_prompts
    if len(value) != num_prompts:
        raise invalid_value(path, "must have one object for each prompt")
    paths = [f"{path}[{index}]" for index in range(num_prompts)]
    return [
        Fields({}, own_path) if item is None else as_object(item, own_path)
        for item, own_path in zip(value, paths, strict=True)
    ]


def _params(
    sampling: Fields, vocab_size: int, top_logprobs: int | None, cache: CacheRequest
) -> GenerationParams:
    refuse_unsupported(sampling, takes_constraints=True)
    params = parse_params(
        sampling,
        NATIVE_SPELLINGS,
        vocab_size,
        top_logprobs=top_logprobs,
        split_reasoning=False,
        cache=cache,
    )
    return replace(params, constraint=parse_constraint(sampling))


def _num_choices(samplings: Sequence[Fields]) -> int:
    counts = [parse_num_choices(sampling) for sampling in samplings]
    for sampling, count in zip(samplings, counts, strict=True):
        if count != counts[0]:
            raise invalid_value(sampling.path_of("n"), "must be the same for all prompts")
    return counts[0]


def _prompts(fields: Fields, vocab_size: int) -> RawPrompts:
    given = [name for name in ("text", "input_ids") if fields.has(name)]
    if not given:
        raise missing(fields.path_of("text"))
    if len(given) > 1:
        raise invalid_value(fields.path_of("input_ids"), "excludes text")
    path = fields.path_of(given[0])
    if given[0] == "text":
        return parse_texts(fields.get("text"), path)
    return parse_id_lists(fields.get("input_ids"), path, vocab_size)


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
    ids = tuple(as_string(item, f"{path}[{index}]") for index, item in enumerate(value))
    for index, answer_id in enumerate(ids):
        if answer_id in ids[:index]:
            raise invalid_value(f"{path}[{index}]", "must differ from the ids before it")
    return ids


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("return_logprob")
    count = fields.integer("top_logprobs_num", 0, MAX_TOP_LOGPROBS) or 0
    if count and not wanted:
        raise invalid_value(fields.path_of("top_logprobs_num"), "needs return_logprob to be true")
    return count if wanted else None


def _logprob_start(fields: Fields) -> int | None:
    """-1 stands for none of the prompt."""
    start = fields.integer("logprob_start_len", -1)
    return None if start == -1 else start


def _refuse_unsupported(fields: Fields) -> None:
    refuse_unsupported(fields)
    for name in _MEDIA:
        if fields.get(name) not in (None, "", []):
            raise unsupported_value(fields.path_of(name), "this model takes text alone")
    for name in _SAMPLING_FIELDS:
        refuse(fields, name, (), "it belongs into sampling_params")
