"""The `tools` of requests: checked, in one shape for the template, and which may be called.

A custom tool is a function with one string, `input`, for the model, and its calls come back as
calls of that function. Types that only hosted services run are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.gateway.cache_fields import has_mark
from ninfer.gateway.fields import Fields, invalid_value, missing, unsupported_value
from ninfer.gateway.tool_choice import ToolChoice, parse_tool_choice

MAX_TOOLS: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
FREE_FORM: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool, which is a function with one string for the model."""


@dataclass(frozen=True, slots=True)
class ChatTools:
    """`objects` for the template; `rules` None when there is nothing to call."""

    objects: tuple[Mapping[str, Any], ...] = ()
    rules: ToolRules | None = None


def parse_chat_tools(fields: Fields) -> ChatTools:
    """Of `tools` or the older `functions`. Raises RequestError naming the field."""
    tools = [tool for entry in fields.children("tools") if (tool := parse_tool(entry)) is not None]
    tools += [_function(entry) for entry in fields.children("functions")]
    path = fields.path_of(fields.first_of(("tools", "functions")) or "tools")
    if len(tools) > MAX_TOOLS:
        raise invalid_value(path, f"must have at most {MAX_TOOLS} entries")
    names = [tool.spec.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_value(path, "must have unique names")
    rules = tool_rules(fields, tools, parse_tool_choice(fields, names))
    return ChatTools(tuple(tool.template_object() for tool in tools), rules)


def tool_rules(
    fields: Fields, tools: Sequence[FunctionTool], choice: ToolChoice
) -> ToolRules | None:
    """None when there is nothing to call. Raises RequestError naming the field."""
    is_parallel = fields.boolean("parallel_tool_calls") is not False
    if not tools:
        return None
    if choice.choice == "required":
        _check_demanded(tools, choice)
    return ToolRules(
        tools=tuple(tool.spec for tool in tools),
        choice=choice.choice,
        allowed=choice.allowed,
        parallel=is_parallel,
    )


def has_marked_tool(fields: Fields) -> bool:
    """Whether the client marked any tool as the end of a prefix; they all stand in one place."""
    marks = [has_mark(entry) for entry in fields.children("tools")]
    return any(marks)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """What the model is told of a tool. `has_grammar`: its input should match a grammar, which it
    is only told."""

    spec: ToolSpec
    description: str | None = None
    is_custom: bool = False
    has_grammar: bool = False

    def template_object(self) -> Mapping[str, Any]:
        return template_tool(self.spec.name, self.description, self.spec.parameters)


def parse_tool(entry: Fields) -> FunctionTool | None:
    """None for a type that only hosted services run. Raises RequestError naming the field."""
    kind = entry.string("type")
    if kind == "custom":
        return _custom(entry.child("custom") or entry)
    if kind not in (None, "function"):
        return None
    return _function(entry.child("function") or entry)


def _function(function: Fields) -> FunctionTool:
    parameters = function.child("parameters")
    spec = ToolSpec(
        tool_name(function),
        None if parameters is None else parameters.values,
        function.flag("strict"),
        function.path_of("parameters"),
    )
    return FunctionTool(spec, function.string("description"))


def _custom(custom: Fields) -> FunctionTool:
    rule = _grammar_rule(custom.child("format"))
    texts = [text for text in (custom.string("description"), rule) if text]
    spec = ToolSpec(tool_name(custom), FREE_FORM)
    description = "\n\n".join(texts) if texts else None
    return FunctionTool(spec, description, is_custom=True, has_grammar=rule is not None)


def _grammar_rule(form: Fields | None) -> str | None:
    """The grammar of a custom tool's input, in words for the model."""
    if form is None or form.choice("type", ("text", "grammar")) != "grammar":
        return None
    grammar = form.child("grammar") or form
    definition = grammar.string("definition")
    if not definition:
        raise missing(grammar.path_of("definition"))
    syntax = grammar.choice("syntax", ("lark", "regex")) or "lark"
    return f"The input must match this {syntax} grammar:\n{definition}"


def _check_demanded(tools: Sequence[FunctionTool], choice: ToolChoice) -> None:
    """A call that is demanded would have to follow its grammar, and cannot be held to it."""
    callable_tools = [tool for tool in tools if choice.allows(tool.spec.name)]
    if all(tool.has_grammar for tool in callable_tools):
        raise unsupported_value(choice.path, "a tool with a grammar cannot be demanded")


def template_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """A function as templates are given it."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def tool_name(function: Fields) -> str:
    """Raises RequestError when there is none or it is malformed."""
    name = function.string("name")
    if name is None:
        raise missing(function.path_of("name"))
    if not _NAME.fullmatch(name):
        raise invalid_value(
            function.path_of("name"), "must be 1 to 128 of the characters A-Z a-z 0-9 _ . : / -"
        )
    return name
