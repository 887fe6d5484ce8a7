"""A full body for every route that takes one: valid, with as many fields as go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1,
    "logit_bias": {"5": 1},
    "seed": 1,
    "stop_token_ids": [1],
    "metadata": {},
    "timeout_s": 50,
    "cache_salt": "s",
    "session_id": "c",
}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
CHAT: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
    "tool_choice": "none",
    "stop": ["a"],
    "max_tokens": 5,
    "min_tokens": 1,
    "n": 2,
    "best_of": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "thinking": {"type": "enabled"},
}
COMPLETION: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "model": "m",
    "prompt": ["a", "b"],
    "stop": "x",
    "max_tokens": 3,
    "n": 2,
    "echo": True,
    "logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
MESSAGES: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x", "is_error": True}
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "stream": True,
}
RESPONSES: Final[Mapping[str, Any]] = {
    **_SAMPLING,
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "message", "role": "user", "content": "b"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}, {"type": "web_search"}],
    "tool_choice": "auto",
    "max_output_tokens": 5,
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 1,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "store": True,
    "stream": True,
    "truncation": "auto",
}
GENERATE: Final[Mapping[str, Any]] = {
    "input_ids": [[1, 2], [3]],
    "sampling_params": {"max_new_tokens": 3, "n": 2, "stop": "x", "sampling_seed": 4},
    "stream": False,
    "rid": ["a", "b"],
    "return_logprob": True,
    "top_logprobs_num": 1,
}
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/generate": GENERATE,
    "/tokenize": {"prompt": "a b", "with_pieces": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": CHAT,
    "/abort_request": {"rid": "none", "abort_all": False},
}
"""By path."""
