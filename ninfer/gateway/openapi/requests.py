"""Schemas of request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ninfer.gateway.anthropic.request import MESSAGES_SPELLINGS
from ninfer.gateway.completion_request import COMPLETION_SPELLINGS
from ninfer.gateway.generation_fields import MAX_TOP_LOGPROBS, NATIVE_SPELLINGS, OPENAI_SPELLINGS
from ninfer.gateway.openapi.fields import (
    CACHE,
    CHOICES,
    CONSTRAINTS,
    HINTS,
    MODEL,
    THINKING,
    TOOLS,
    sampling,
)
from ninfer.gateway.openapi.schema import (
    Schema,
    any_object,
    array,
    boolean,
    integer,
    nullable,
    one_of,
    request,
    string,
)
from ninfer.gateway.prompt_fields import MAX_PROMPTS
from ninfer.gateway.responses.request import RESPONSES_SPELLINGS, TRUNCATIONS

_CONTENT: Final = one_of(string(), array(one_of(any_object(), string())))
_STREAM_OPTIONS: Final[Schema] = {
    "type": "object",
    "properties": {
        "include_usage": nullable(boolean("End with a chunk that has the usage.")),
        "continuous_usage_stats": nullable(boolean()),
    },
}
_MESSAGES: Final = [{"role": "user", "content": "Hello"}]
_TOKEN_IDS: Final = array(integer(0), shortest=1)
_MEDIA: Final = {"model": MODEL, "stream": boolean("Answer with server-sent events.")}


def _message(*roles: str) -> Schema:
    return {
        "type": "object",
        "properties": {"role": string(*roles), "content": nullable(_CONTENT)},
        "required": ["role"],
    }


CHAT: Final = request(
    {
        "messages": array(
            _message("system", "developer", "user", "assistant", "tool", "function"), shortest=1
        )
    },
    {
        **_MEDIA,
        **sampling(OPENAI_SPELLINGS),
        **CHOICES,
        **CACHE,
        **HINTS,
        **THINKING,
        **TOOLS,
        "stream_options": _STREAM_OPTIONS,
        "logprobs": boolean(),
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS, about="Needs logprobs."),
        **CONSTRAINTS,
        "continue_final_message": boolean(),
        "add_generation_prompt": boolean(),
        "stop_in_reasoning": boolean(),
    },
    example={"messages": _MESSAGES},
)
MESSAGES: Final = request(
    {"messages": array(_message("user", "assistant", "system"), shortest=1)},
    {
        **_MEDIA,
        **sampling(MESSAGES_SPELLINGS),
        **CACHE,
        **HINTS,
        "system": one_of(string(), array(any_object())),
        "thinking": any_object(),
        "output_config": any_object(),
        "tools": TOOLS["tools"],
        "tool_choice": any_object(),
    },
    example={"messages": _MESSAGES, "max_tokens": 16},
)
RESPONSES: Final = request(
    {},
    {
        **_MEDIA,
        **sampling(RESPONSES_SPELLINGS),
        **CACHE,
        **HINTS,
        **TOOLS,
        "input": one_of(string(), array(any_object())),
        "instructions": string(),
        "previous_response_id": string(),
        "store": boolean("Keep the response; default true."),
        "include": array(string()),
        "reasoning": any_object(),
        "text": any_object(),
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "truncation": string(*TRUNCATIONS),
    },
    example={"input": "Hello"},
    either=("input", "previous_response_id"),
)
COMPLETION: Final = request(
    {
        "prompt": one_of(
            string(),
            array(string(), shortest=1, longest=MAX_PROMPTS),
            _TOKEN_IDS,
            array(_TOKEN_IDS, shortest=1, longest=MAX_PROMPTS),
        )
    },
    {
        **_MEDIA,
        **sampling(COMPLETION_SPELLINGS),
        **CHOICES,
        **CACHE,
        **HINTS,
        "stream_options": _STREAM_OPTIONS,
        **CONSTRAINTS,
        "echo": boolean("Begin with the prompt."),
        "logprobs": one_of(integer(0, MAX_TOP_LOGPROBS), boolean()),
        "return_tokens_as_token_ids": boolean(),
    },
    example={"prompt": "Hello"},
)
_SAMPLING_PARAMS: Final[Schema] = {
    "type": "object",
    "properties": {
        name: nullable(schema)
        for name, schema in {**sampling(NATIVE_SPELLINGS), **CHOICES, **CONSTRAINTS}.items()
    },
}
GENERATE: Final = request(
    {},
    {
        **CACHE,
        **HINTS,
        "text": one_of(
            string(shortest=1), array(string(shortest=1), shortest=1, longest=MAX_PROMPTS)
        ),
        "input_ids": one_of(_TOKEN_IDS, array(_TOKEN_IDS, shortest=1, longest=MAX_PROMPTS)),
        "sampling_params": one_of(_SAMPLING_PARAMS, array(_SAMPLING_PARAMS, longest=MAX_PROMPTS)),
        "stream": boolean("Answer with server-sent events."),
        "incremental": boolean("Frames of a stream carry only what is new."),
        "rid": one_of(string(), array(string(), longest=MAX_PROMPTS)),
        "return_logprob": boolean(),
        "top_logprobs_num": integer(0, MAX_TOP_LOGPROBS, about="Needs return_logprob."),
        "return_text_in_logprobs": boolean(),
    },
    example={"text": "Hello"},
    either=("text", "input_ids"),
)
TOKENIZE: Final = request(
    {},
    {
        "prompt": string(about="Raw text."),
        "content": string(about="Raw text."),
        "messages": array(any_object(), shortest=1),
        "add_special_tokens": boolean("Has no effect."),
        "add_special": boolean("Has no effect."),
        "parse_special": boolean("false: special tokens in raw text are plain characters."),
        "with_pieces": boolean("Tokens are objects with their text, or else their bytes."),
        "return_token_strs": boolean("Add the text of every token."),
        "chat_template_kwargs": any_object(),
        "tools": TOOLS["tools"],
    },
    example={"prompt": "Hello"},
    either=("prompt", "content", "messages"),
)
DETOKENIZE: Final = request({"tokens": array(integer(0))}, {}, example={"tokens": [1, 2]})
ABORT: Final = request(
    {},
    {
        "rid": string(shortest=1, about="A name of the request."),
        "request_id": string(shortest=1),
        "abort_all": boolean("End every request there is."),
    },
    example={"rid": "req_1"},
)
REQUESTS: Final[Mapping[str, Schema]] = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "MessagesRequest": MESSAGES,
    "ResponsesRequest": RESPONSES,
    "GenerateRequest": GENERATE,
    "TokenizeRequest": TOKENIZE,
    "DetokenizeRequest": DETOKENIZE,
    "AbortRequest": ABORT,
}
