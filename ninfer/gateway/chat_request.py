"""The body of /v1/chat/completions, checked field by field -> ChatRequest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from ninfer.contract.chat import ChatPrompt, GenerationParams, ToolRules
from ninfer.contract.errors import RequestError
from ninfer.gateway.cache_fields import parse_cache_request
from ninfer.gateway.chat_messages import Conversation, parse_messages
from ninfer.gateway.constraint_fields import parse_constraint
from ninfer.gateway.fields import Fields, invalid_value
from ninfer.gateway.generation_fields import (
    MAX_TOP_LOGPROBS,
    OPENAI_SPELLINGS,
    check_hints,
    parse_num_choices,
    parse_params,
)
from ninfer.gateway.media.references import MediaReference
from ninfer.gateway.refused_fields import refuse, refuse_unsupported
from ninfer.gateway.thinking import parse_enable_thinking, parse_hide_reasoning
from ninfer.gateway.tool_fields import ChatTools, has_marked_tool, parse_chat_tools

_TEMPLATE_OWN: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_HOSTED: Final = ("web_search_options", "moderation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """`model` is the name the client sent, or None.

    include_usage      a stream ends with a usage chunk
    continuous_usage   every chunk of a stream carries the usage so far
    hide_reasoning     reasoning is generated and counted but not sent
    media              what the media parts of `chat` stand for, in their order
    """

    model: str | None
    chat: ChatPrompt
    params: GenerationParams
    num_choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    hide_reasoning: bool
    media: tuple[MediaReference, ...] = ()


def parse_chat_request(
    fields: Fields,
    vocab_size: int,
    session_header: str | None = None,
    *,
    takes_media: bool = False,
) -> ChatRequest:
    """Raises RequestError. Unknown fields are ignored; unsupported guarantees are not."""
    _refuse_unsupported(fields)
    check_hints(fields)
    media: list[MediaReference] = []
    conversation = parse_messages(fields, media if takes_media else None)
    tools = parse_chat_tools(fields)
    stream_options = fields.child("stream_options")
    return ChatRequest(
        model=fields.string("model"),
        chat=_chat_prompt(fields, conversation, tools),
        params=_params(fields, vocab_size, session_header, tools.rules),
        num_choices=parse_num_choices(fields),
        stream=fields.flag("stream"),
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        continuous_usage=(
            stream_options is not None and stream_options.flag("continuous_usage_stats")
        ),
        hide_reasoning=parse_hide_reasoning(fields),
        media=tuple(media),
    )


def _params(
    fields: Fields, vocab_size: int, session_header: str | None, rules: ToolRules | None
) -> GenerationParams:
    params = parse_params(
        fields,
        OPENAI_SPELLINGS,
        vocab_size,
        top_logprobs=_top_logprobs(fields),
        split_reasoning=True,
        cache=parse_cache_request(fields, session_header),
    )
    constraint = parse_constraint(fields)
    if constraint is not None and rules is not None and rules.choice == "required":
        raise invalid_value(constraint.param, "cannot be combined with a demanded tool call")
    return replace(params, constraint=constraint, tools=rules)


def _chat_prompt(fields: Fields, conversation: Conversation, tools: ChatTools) -> ChatPrompt:
    is_continued = fields.flag("continue_final_message") or conversation.is_prefill
    add_prompt = fields.boolean("add_generation_prompt")
    if is_continued and add_prompt:
        raise invalid_value(_continuing_path(fields), "excludes add_generation_prompt")
    if is_continued and conversation.messages[-1].role != "assistant":
        raise invalid_value(_continuing_path(fields), "needs an assistant message at the end")
    return ChatPrompt(
        messages=conversation.messages,
        tools=tools.objects,
        tools_end_prefix=has_marked_tool(fields),
        template_kwargs=parse_template_kwargs(fields),
        add_generation_prompt=not is_continued and add_prompt is not False,
        continue_final_message=is_continued,
    )


def _continuing_path(fields: Fields) -> str:
    """The field that asks for the last message to be continued."""
    if fields.flag("continue_final_message"):
        return fields.path_of("continue_final_message")
    *_, last = fields.children("messages")
    return last.path_of("prefix" if last.get("prefix") is True else "partial")


def parse_template_kwargs(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs` with the switches of thinking. Raises RequestError."""
    given = fields.child("chat_template_kwargs") or Fields({})
    for name in ("enable_thinking", "preserve_thinking"):
        given.boolean(name)
    for name in _TEMPLATE_OWN:
        if given.has(name):
            raise invalid_value(given.path_of(name), "is a field of the request itself")
    kwargs = {name: value for name, value in given.values.items() if value is not None}
    enable_thinking = parse_enable_thinking(fields)
    if enable_thinking is not None:
        kwargs.setdefault("enable_thinking", enable_thinking)
    preserve_thinking = fields.boolean("preserve_thinking")
    if preserve_thinking is not None:
        kwargs.setdefault("preserve_thinking", preserve_thinking)
    return kwargs


def _top_logprobs(fields: Fields) -> int | None:
    """None: no logprobs; else how many alternatives each entry lists."""
    wanted = fields.flag("logprobs")
    count = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if count is None:
        return 0 if wanted else None
    if not wanted:
        raise invalid_value(fields.path_of("top_logprobs"), "needs logprobs to be true")
    return count


def _refuse_unsupported(fields: Fields) -> None:
    refuse_unsupported(fields, takes_constraints=True)
    for name in _HOSTED:
        refuse(fields, name, ({}, [], False), "it needs a hosted service")
    refuse(fields, "echo", (False,), "a chat answer has no prompt in it")
    refuse(fields, "documents", ([],), "put them into messages")
    refuse(fields, "chat_template", ("",), "the model's own template is used")
    modalities = fields.sequence("modalities")
    if modalities is not None and (not modalities or any(item != "text" for item in modalities)):
        raise RequestError(
            "unsupported_value", "'modalities' must be text alone.", fields.path_of("modalities")
        )
