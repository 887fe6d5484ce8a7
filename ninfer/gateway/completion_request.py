"""The body of /v1/completions, checked field by field -> CompletionRequest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ninfer.contract.chat import GenerationParams
from ninfer.contract.sampling import PromptScoring
from ninfer.gateway.cache_fields import parse_cache_request
from ninfer.gateway.constraint_fields import parse_constraint
from ninfer.gateway.fields import Fields, as_integer, missing
from ninfer.gateway.generation_fields import (
    MAX_TOP_LOGPROBS,
    OPENAI_SPELLINGS,
    check_hints,
    parse_num_choices,
    parse_params,
)
from ninfer.gateway.prompt_fields import RawPrompt, parse_prompts
from ninfer.gateway.refused_fields import refuse, refuse_unsupported

COMPLETION_SPELLINGS: Final = replace(
    OPENAI_SPELLINGS,
    max_tokens=(*OPENAI_SPELLINGS.max_tokens, "n_predict"),
    default_max_tokens=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """`model` is the name the client sent, or None.

    num_choices       of each prompt; choice k of prompt p has the index p * num_choices + k
    echo              texts begin with the prompt, and its tokens have log probabilities too
    names_by_id       tokens of logprobs are called `token_id:N` instead of by their text
    include_usage     a stream ends with a usage chunk
    continuous_usage  every chunk of a stream carries the usage so far
    """

    model: str | None
    prompts: tuple[RawPrompt, ...]
    params: GenerationParams
    num_choices: int
    echo: bool
    names_by_id: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def num_top(self) -> int | None:
        """Alternatives that each token's log probabilities list; None without any."""
        return self.params.top_logprobs


def parse_completion_request(
    fields: Fields, vocab_size: int, session_header: str | None = None
) -> CompletionRequest:
    """Raises RequestError. Unknown fields are ignored; unsupported guarantees are not."""
    refuse_unsupported(fields, takes_constraints=True)
    refuse(fields, "suffix", ("",), "text is only continued, not filled in")
    refuse(fields, "prompt_embeds", ([],), "send text or token ids")
    check_hints(fields)
    if not fields.has("prompt"):
        raise missing(fields.path_of("prompt"))
    stream_options = fields.child("stream_options") or Fields({})
    echo, num_top = fields.flag("echo"), _num_top(fields)
    params = parse_params(
        fields,
        COMPLETION_SPELLINGS,
        vocab_size,
        top_logprobs=num_top,
        split_reasoning=False,
        cache=parse_cache_request(fields, session_header),
    )
    return CompletionRequest(
        model=fields.string("model"),
        prompts=parse_prompts(fields.get("prompt"), fields.path_of("prompt"), vocab_size).prompts,
        params=replace(
            params,
            constraint=parse_constraint(fields),
            scoring=PromptScoring(1, num_top) if echo and num_top is not None else None,
            # Who counts tokens from the end (`logprobs[-1]` is the generated one) finds it there.
            reports_stop_token=num_top is not None,
        ),
        num_choices=parse_num_choices(fields),
        echo=echo,
        names_by_id=fields.flag("return_tokens_as_token_ids"),
        stream=fields.flag("stream"),
        include_usage=stream_options.flag("include_usage"),
        continuous_usage=stream_options.flag("continuous_usage_stats"),
    )


def _num_top(fields: Fields) -> int | None:
    """`logprobs`: a count; true stands for 1."""
    value = fields.get("logprobs")
    if value is None or value is False:
        return None
    if value is True:
        return 1
    return as_integer(value, fields.path_of("logprobs"), 0, MAX_TOP_LOGPROBS)
