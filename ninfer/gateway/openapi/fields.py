"""Fields that request bodies of several protocols have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ninfer.contract.cache import CacheMode
from ninfer.gateway.cache_fields import MAX_NAME_CHARACTERS
from ninfer.gateway.constraint_fields import FORMATS
from ninfer.gateway.fields import INT64_MAX, INT64_MIN
from ninfer.gateway.generation_fields import (
    BIASES,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TIMEOUT_S,
    PENALTIES,
    SHARES,
    TEMPERATURES,
    Spellings,
)
from ninfer.gateway.openapi.schema import (
    Schema,
    any_object,
    array,
    boolean,
    integer,
    number,
    one_of,
    string,
)
from ninfer.gateway.thinking import EFFORTS
from ninfer.gateway.tool_fields import MAX_TOOLS

_STOP_STRING: Final = string(shortest=1, longest=MAX_STOP_CHARACTERS)
MODEL: Final = string(about="Any name, unless the server is strict; the answer repeats it.")
CACHE: Final[Mapping[str, Schema]] = {
    "cache": string(*(mode.value for mode in CacheMode), about="off: neither read nor kept."),
    "cache_salt": string(shortest=1, longest=MAX_NAME_CHARACTERS),
    "session_id": string(longest=MAX_NAME_CHARACTERS, about="Names the conversation."),
    "prompt_cache_key": string(longest=MAX_NAME_CHARACTERS),
}
HINTS: Final[Mapping[str, Schema]] = {
    "metadata": any_object(),
    "priority": integer(INT64_MIN, INT64_MAX, about="Has no effect."),
}
CHOICES: Final[Mapping[str, Schema]] = {
    "n": integer(1, MAX_CHOICES, about="Answers to the same prompt."),
}
THINKING: Final[Mapping[str, Schema]] = {
    "enable_thinking": boolean(),
    "preserve_thinking": boolean("Keep the thoughts of earlier turns."),
    "reasoning_effort": string(*EFFORTS, about="none switches thinking off."),
    "thinking_budget": integer(-1, INT64_MAX, about="Most tokens of thought; -1 = any number."),
    "thinking_token_budget": integer(-1, INT64_MAX),
    "include_reasoning": boolean("false keeps thoughts out of the answer."),
    "chat_template_kwargs": any_object("Variables of the model's template."),
}
_JSON_SCHEMA: Final = one_of(any_object(), boolean(), string(), about="A JSON Schema.")
_FORMAT: Final[Schema] = {
    "type": "object",
    "properties": {
        "type": string(*FORMATS),
        "json_schema": {
            "type": ["object", "null"],
            "properties": {"schema": _JSON_SCHEMA, "name": string(), "strict": boolean()},
        },
    },
    "required": ["type"],
}
_CHOICE: Final = array(string(), shortest=1)
CONSTRAINTS: Final[Mapping[str, Schema]] = {
    "response_format": _FORMAT,
    "structured_outputs": any_object("One of json, regex, choice, grammar, json_object."),
    "guided_json": _JSON_SCHEMA,
    "guided_regex": string(),
    "guided_choice": _CHOICE,
    "guided_grammar": string(about="GBNF or Lark."),
    "json_schema": _JSON_SCHEMA,
    "regex": string(),
    "ebnf": string(),
    "grammar": string(),
}
"""One of them at most."""
TOOLS: Final[Mapping[str, Schema]] = {
    "tools": array(any_object(), longest=MAX_TOOLS),
    "tool_choice": one_of(string("none", "auto", "required", "any"), any_object()),
    "parallel_tool_calls": boolean(),
}


def sampling(spellings: Spellings) -> dict[str, Schema]:
    """What GenerationParams are made from, in the spellings of one protocol."""
    return {
        **_every(spellings.max_tokens, integer(-1, INT64_MAX, about="-1 = no limit of its own.")),
        **_every(spellings.min_tokens, integer(0, INT64_MAX)),
        **_every(spellings.seed, integer(INT64_MIN, INT64_MAX)),
        **_every(spellings.include_stop_string, boolean()),
        "temperature": number(*TEMPERATURES, about="0 = greedy."),
        "top_k": integer(-1, INT64_MAX, about="0 and -1 = off."),
        "top_p": number(*SHARES),
        "min_p": number(*SHARES),
        "presence_penalty": number(*PENALTIES),
        "frequency_penalty": number(*PENALTIES),
        "repetition_penalty": number(0, MAX_REPETITION_PENALTY, above=True),
        "repeat_penalty": number(0, MAX_REPETITION_PENALTY, above=True),
        "logit_bias": {
            "type": "object",
            "description": "Token ids and what is added to their logits.",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": number(*BIASES),
            "maxProperties": MAX_BIASES,
        },
        spellings.stop: one_of(_STOP_STRING, array(_STOP_STRING, longest=MAX_STOPS)),
        "stop_token_ids": array(integer(0), longest=MAX_STOP_TOKEN_IDS),
        "ignore_eos": boolean(),
        "skip_special_tokens": boolean(),
        "timeout_s": number(0, MAX_TIMEOUT_S, above=True),
    }


def _every(names: Sequence[str], schema: Schema) -> dict[str, Schema]:
    return dict.fromkeys(names, schema)
