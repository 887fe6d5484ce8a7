"""The body of /v1/responses, checked field by field -> ResponsesRequest.

What it says of stored responses and items is resolved later: nothing here looks outside the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ninfer.contract.chat import GenerationParams
from ninfer.gateway.cache_fields import parse_cache_request
from ninfer.gateway.chat_request import parse_template_kwargs
from ninfer.gateway.fields import Fields, as_string, invalid_value, missing, unsupported_parameter
from ninfer.gateway.generation_fields import (
    MAX_TOP_LOGPROBS,
    OPENAI_SPELLINGS,
    Spellings,
    check_hints,
    parse_params,
)
from ninfer.gateway.refused_fields import refuse, refuse_unsupported
from ninfer.gateway.responses.input_items import InputItem, ItemReader, parse_input
from ninfer.gateway.responses.output_recorder import OutputView
from ninfer.gateway.responses.text_format import parse_text_format
from ninfer.gateway.responses.tools import ToolSet, parse_tool_rules, parse_tools
from ninfer.gateway.thinking import parse_hide_reasoning
from ninfer.gateway.tool_fields import has_marked_tool

RESPONSES_SPELLINGS: Final[Spellings] = replace(
    OPENAI_SPELLINGS,
    max_tokens=("max_output_tokens", "max_completion_tokens", "max_tokens", "max_new_tokens"),
)
_WITH_SEALED: Final = "reasoning.encrypted_content"
_WITH_LOGPROBS: Final = "message.output_text.logprobs"
TRUNCATIONS: Final = ("auto", "disabled")
_TEXT_HINTS: Final = ("user", "safety_identifier", "service_tier", "prompt_cache_retention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """`model` is the name the client sent, or None.

    echo     what the answer repeats of the request
    store    the response is to be kept
    reader   reads items, those of the history too
    """

    model: str | None
    items: tuple[InputItem, ...]
    instructions: str | None
    previous_response_id: str | None
    reader: ItemReader
    tools_end_prefix: bool
    template_kwargs: Mapping[str, Any]
    params: GenerationParams
    view: OutputView
    echo: Mapping[str, Any]
    store: bool
    stream: bool

    @property
    def tools(self) -> ToolSet:
        return self.reader.tools


def parse_responses_request(
    fields: Fields,
    vocab_size: int,
    session_header: str | None = None,
    *,
    takes_media: bool = False,
) -> ResponsesRequest:
    """Raises RequestError. Unknown fields are ignored; unsupported guarantees are not."""
    _refuse_unsupported(fields)
    _check_own_hints(fields)
    reader = ItemReader(parse_tools(fields), takes_media)
    view, top_logprobs = _view(fields)
    store = fields.boolean("store") is not False
    return ResponsesRequest(
        model=fields.string("model"),
        items=_items(fields, reader),
        instructions=fields.string("instructions"),
        previous_response_id=fields.string("previous_response_id"),
        reader=reader,
        tools_end_prefix=has_marked_tool(fields),
        template_kwargs=parse_template_kwargs(fields),
        params=_params(fields, vocab_size, session_header, reader.tools, top_logprobs),
        view=view,
        echo=_echo(fields, store),
        store=store,
        stream=fields.flag("stream"),
    )


def _items(fields: Fields, reader: ItemReader) -> tuple[InputItem, ...]:
    items = parse_input(fields, reader)
    if not items and not fields.has("previous_response_id"):
        path = fields.path_of("input")
        raise invalid_value(path, "must not be empty") if fields.has("input") else missing(path)
    return items


def _params(
    fields: Fields,
    vocab_size: int,
    session_header: str | None,
    tools: ToolSet,
    top_logprobs: int | None,
) -> GenerationParams:
    rules, constraint = parse_tool_rules(fields, tools), parse_text_format(fields)
    if constraint is not None and rules is not None and rules.choice == "required":
        raise invalid_value("text.format", "cannot be combined with a demanded tool call")
    params = parse_params(
        fields,
        RESPONSES_SPELLINGS,
        vocab_size,
        top_logprobs=top_logprobs,
        split_reasoning=True,
        cache=parse_cache_request(fields, session_header),
    )
    return replace(params, tools=rules, constraint=constraint)


def _view(fields: Fields) -> tuple[OutputView, int | None]:
    """(what is shown, alternatives of each logprob)."""
    path = fields.path_of("include")
    included = {
        as_string(value, f"{path}[{index}]")
        for index, value in enumerate(fields.sequence("include") or ())
    }
    count = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    has_logprobs = _WITH_LOGPROBS in included
    view = OutputView(
        hides_reasoning=parse_hide_reasoning(fields),
        has_summary=_summary(fields) not in (None, "none"),
        seals_reasoning=_WITH_SEALED in included,
        has_logprobs=has_logprobs,
    )
    return view, (count or 0) if has_logprobs else None


def _summary(fields: Fields) -> str | None:
    reasoning = fields.child("reasoning")
    if reasoning is None:
        return None
    names = ("summary", "generate_summary")
    return next((text for text in [reasoning.string(name) for name in names] if text), None)


def _echo(fields: Fields, store: bool) -> dict[str, Any]:
    reasoning, text = fields.child("reasoning"), fields.child("text")
    max_output_tokens = fields.integer("max_output_tokens", -1)
    return {
        "instructions": fields.string("instructions"),
        "max_output_tokens": None if max_output_tokens == -1 else max_output_tokens,
        "max_tool_calls": fields.integer("max_tool_calls"),
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.boolean("parallel_tool_calls") is not False,
        "previous_response_id": fields.string("previous_response_id"),
        "prompt_cache_key": fields.string("prompt_cache_key"),
        "reasoning": {
            "effort": None if reasoning is None else reasoning.string("effort"),
            "summary": _summary(fields),
        },
        "safety_identifier": fields.string("safety_identifier"),
        "service_tier": "default",
        "store": store,
        "text": {"format": {"type": "text"}, **({} if text is None else _given(text))},
        "tool_choice": "auto" if fields.get("tool_choice") is None else fields.get("tool_choice"),
        "tools": fields.sequence("tools") or [],
        "top_logprobs": fields.integer("top_logprobs") or 0,
        "truncation": fields.string("truncation") or "disabled",
        "user": fields.string("user"),
    }


def _given(fields: Fields) -> dict[str, Any]:
    return {name: value for name, value in fields.values.items() if value is not None}


def _refuse_unsupported(fields: Fields) -> None:
    refuse_unsupported(fields)
    refuse(fields, "background", (False,), "responses are made while the client waits")
    refuse(fields, "conversation", (), "use previous_response_id")
    refuse(fields, "prompt", (), "there are no stored prompts")
    refuse(fields, "moderation", ({},), "it needs a hosted service")
    refuse(fields, "n", (1,), "a response is one answer")
    refuse(fields, "response_format", ({"type": "text"},), "use text.format")
    for entry in fields.children("context_management"):
        if entry.has("compact_threshold"):
            path = entry.path_of("compact_threshold")
            raise unsupported_parameter(path, "conversations are not compacted")


def _check_own_hints(fields: Fields) -> None:
    check_hints(fields)
    fields.choice("truncation", TRUNCATIONS)
    fields.integer("max_tool_calls")
    fields.child("stream_options")
    for name in _TEXT_HINTS:
        fields.string(name)
