"""The body of /v1/messages, checked field by field -> MessagesRequest."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from ninfer.contract.cache import CacheRequest
from ninfer.contract.chat import ChatPrompt, Constraint, GenerationParams
from ninfer.contract.errors import RequestError
from ninfer.gateway.anthropic.conversation import MessagesConversation, parse_conversation
from ninfer.gateway.anthropic.tools import MessagesTools, parse_message_tools
from ninfer.gateway.cache_fields import MAX_NAME_CHARACTERS, parse_cache_request
from ninfer.gateway.chat_request import parse_template_kwargs
from ninfer.gateway.constraint_fields import parse_constraint
from ninfer.gateway.fields import Fields, invalid_value, missing
from ninfer.gateway.generation_fields import Spellings, check_hints, parse_params
from ninfer.gateway.json_text import parse_json
from ninfer.gateway.media.references import MediaReference
from ninfer.gateway.refused_fields import refuse, refuse_unsupported

MESSAGES_SPELLINGS: Final = Spellings(
    max_tokens=("max_tokens",),
    min_tokens=("min_tokens",),
    seed=("seed",),
    include_stop_string=("include_stop_str_in_output",),
    stop="stop_sequences",
)
_SESSION_IN_USER_ID: Final = re.compile(r"_session_([A-Za-z0-9-]+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """`model` is the name the client sent, or None.

    media            references of the pictures in `chat`, in their order
    hides_thinking   thoughts are sent as signatures alone
    """

    model: str | None
    chat: ChatPrompt
    media: tuple[MediaReference, ...]
    params: GenerationParams
    stream: bool
    hides_thinking: bool


def parse_messages_request(
    fields: Fields,
    vocab_size: int,
    session_header: str | None = None,
    *,
    is_count: bool = False,
) -> MessagesRequest:
    """`is_count`: only the prompt is of interest. Raises RequestError. Unknown fields are ignored;
    unsupported guarantees are not."""
    refuse_unsupported(fields, takes_constraints=True)
    if not is_count:
        refuse(fields, "compaction", (), "ask for a summary in a message")
    if fields.has("thread"):
        raise _no_threads(fields.path_of("thread"))
    check_hints(fields)
    conversation = parse_conversation(fields)
    tools = parse_message_tools(fields, conversation.tool_changes)
    constraint = _constraint(fields)
    if constraint is not None:
        _check_constraint(constraint, conversation, tools)
    params = parse_params(
        fields,
        MESSAGES_SPELLINGS,
        vocab_size,
        top_logprobs=None,
        split_reasoning=True,
        cache=_cache_request(fields, session_header),
    )
    budget = _thinking_budget(fields, params)
    return MessagesRequest(
        model=fields.string("model"),
        chat=_chat_prompt(fields, conversation, tools),
        media=conversation.media,
        params=replace(
            params,
            tools=tools.rules,
            constraint=constraint,
            thinking_budget=None if conversation.is_prefill else budget,
        ),
        stream=fields.flag("stream"),
        hides_thinking=_hides_thinking(fields),
    )


def _no_threads(path: str) -> RequestError:
    """A thread's next request brings only what is new. Client libraries know this error and send
    the whole conversation instead."""
    return RequestError(
        "thread_unsupported_request",
        f"'{path}' is not supported: conversations are not stored here, so send all messages.",
        path,
    )


def _chat_prompt(
    fields: Fields, conversation: MessagesConversation, tools: MessagesTools
) -> ChatPrompt:
    is_prefill = conversation.is_prefill
    kwargs = parse_template_kwargs(fields)
    if is_prefill:
        kwargs["enable_thinking"] = False
    return ChatPrompt(
        messages=conversation.messages,
        tools=tools.objects,
        tools_end_prefix=tools.ends_prefix,
        template_kwargs=kwargs,
        add_generation_prompt=not is_prefill,
        continue_final_message=is_prefill,
    )


def _thinking_budget(fields: Fields, params: GenerationParams) -> int | None:
    """Below `max_tokens`, so that a token of the answer is left."""
    thinking = fields.child("thinking")
    if thinking is not None:
        thinking.integer("budget_tokens", 1)
        if thinking.string("type") == "disabled":
            return None
    budget, max_tokens = params.thinking_budget, params.max_tokens
    if budget is None or max_tokens is None:
        return budget
    return min(budget, max(max_tokens - 1, 1))


def _hides_thinking(fields: Fields) -> bool:
    """Other displays than `omitted` show the thought as it is."""
    thinking = fields.child("thinking")
    return thinking is not None and thinking.string("display") == "omitted"


def _constraint(fields: Fields) -> Constraint | None:
    """`output_config.format`, in older requests `output_format`, or a spelling of the others."""
    config = fields.child("output_config")
    formats = [config.child("format") if config is not None else None]
    formats.append(fields.child("output_format"))
    constraints = [_schema(item) for item in formats if item is not None]
    constraints += [item for item in (parse_constraint(fields),) if item is not None]
    if len(constraints) > 1:
        first, second, *_ = constraints
        raise invalid_value(second.param, f"cannot be combined with '{first.param}'")
    return constraints[0] if constraints else None


def _schema(output_format: Fields) -> Constraint:
    kind = output_format.string("type")
    if kind is None:
        raise missing(output_format.path_of("type"))
    if kind != "json_schema":
        raise invalid_value(output_format.path_of("type"), "must be json_schema")
    schema = output_format.child("schema")
    if schema is None:
        raise missing(output_format.path_of("schema"))
    text = json.dumps(schema.values, ensure_ascii=False)
    return Constraint("json_schema", text, schema.path)


def _check_constraint(
    constraint: Constraint, conversation: MessagesConversation, tools: MessagesTools
) -> None:
    if conversation.is_prefill:
        raise invalid_value(constraint.param, "excludes a last message of the assistant")
    if tools.rules is not None and tools.rules.choice == "required":
        raise invalid_value(constraint.param, "excludes a tool_choice that demands a call")


def _cache_request(fields: Fields, session_header: str | None) -> CacheRequest:
    """The conversation is named as in other protocols, else by `metadata.user_id`."""
    request = parse_cache_request(fields, session_header)
    if request.session_key is not None:
        return request
    metadata = fields.child("metadata")
    user_id: Any = None if metadata is None else metadata.get("user_id")
    if not isinstance(user_id, str) or not 0 < len(user_id) <= MAX_NAME_CHARACTERS:
        return request
    return replace(request, session_key=_session_in(user_id) or user_id)


def _session_in(user_id: str) -> str | None:
    """The session that some clients write into it, as an ending or inside a JSON object."""
    match = _SESSION_IN_USER_ID.search(user_id)
    if match:
        return match.group(1)
    if not user_id.startswith("{"):
        return None
    try:
        value = parse_json(user_id.encode("utf-8")).value
    except RequestError:
        return None
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) and session else None
