"""The `tools` of chat requests: checked and brought to one shape for the template.

Calls are not parsed out of answers yet, so tools are taken only when the client rules calls out
with `tool_choice: "none"`; everything else would quietly lose them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ninfer.gateway.cache_fields import has_mark
from ninfer.gateway.fields import (
    Fields,
    invalid_type,
    invalid_value,
    missing,
    unsupported_parameter,
)

MAX_TOOLS: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES: Final = ("none", "auto", "required", "any")
_CHOICE_FIELDS: Final = ("tool_choice", "function_call")
FREE_FORM: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool, which is a function with one string for the model."""


def parse_tools(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """OpenAI tool objects for the template. Raises RequestError naming the tool."""
    fields.boolean("parallel_tool_calls")
    tools = [tool for entry in fields.children("tools") if (tool := _tool(entry)) is not None]
    tools += [_function(entry) for entry in fields.children("functions")]
    path = fields.path_of(fields.first_of(("tools", "functions")) or "tools")
    if len(tools) > MAX_TOOLS:
        raise invalid_value(path, f"must have at most {MAX_TOOLS} entries")
    _check_unique(tools, path)
    choice_name = fields.first_of(_CHOICE_FIELDS) or "tool_choice"
    choices = {name: _choice(fields, name) for name in _CHOICE_FIELDS}
    choice = choices[choice_name]
    if not tools and choice in ("required", "any", "named"):
        raise invalid_value(fields.path_of(choice_name), "needs tools to choose from")
    if tools and choice != "none":
        raise unsupported_parameter(path, "tool calls are only possible with tool_choice none")
    return tuple(tools)


def has_marked_tool(fields: Fields) -> bool:
    """Whether the client marked any tool as the end of a prefix; they all stand in one place."""
    marks = [has_mark(entry) for entry in fields.children("tools")]
    return any(marks)


def _choice(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is None:
        return "auto"
    if isinstance(value, dict):
        return "named"
    if not isinstance(value, str):
        raise invalid_type(fields.path_of(name), "a string or an object", value)
    return fields.choice(name, _CHOICES) or "auto"


def _tool(entry: Fields) -> Mapping[str, Any] | None:
    """None for a type that only hosted services run."""
    kind = entry.string("type")
    if kind == "custom":
        custom = entry.child("custom") or entry
        description = custom.string("description")
        return template_tool(tool_name(custom), description, FREE_FORM)
    if kind not in (None, "function"):
        return None
    return _function(entry.child("function") or entry)


def _function(function: Fields) -> Mapping[str, Any]:
    parameters = function.child("parameters")
    function.boolean("strict")
    return template_tool(
        tool_name(function),
        function.string("description"),
        parameters.values if parameters is not None else None,
    )


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


def _check_unique(tools: list[Mapping[str, Any]], path: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in seen:
            raise invalid_value(path, "must have unique names")
        seen.add(name)
