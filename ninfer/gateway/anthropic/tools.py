"""`tools` and `tool_choice`: what the model is shown and which calls it may make.

Tools without a schema of their own are run by the hosted service; they are skipped here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.gateway.cache_fields import has_mark
from ninfer.gateway.fields import Fields, invalid_value, missing
from ninfer.gateway.tool_fields import MAX_TOOLS, template_tool, tool_name

_CHOICES: Final = ("auto", "any", "tool", "none")
_DEMANDING: Final = ("any", "tool")


@dataclass(frozen=True, slots=True)
class MessagesTools:
    """`objects` for the template; `rules` None without tools; `ends_prefix`: one is marked."""

    objects: tuple[Mapping[str, Any], ...] = ()
    rules: ToolRules | None = None
    ends_prefix: bool = False


def parse_message_tools(fields: Fields) -> MessagesTools:
    """Raises RequestError naming the tool or the choice."""
    entries = [entry for entry in fields.children("tools") if _is_own(entry)]
    path = fields.path_of("tools")
    if len(entries) > MAX_TOOLS:
        raise invalid_value(path, f"must have at most {MAX_TOOLS} entries")
    specs = tuple(_spec(entry) for entry in entries)
    names = [spec.name for spec in specs]
    for entry, name in zip(entries, names, strict=True):
        if names.count(name) > 1:
            raise invalid_value(entry.path_of("name"), "must be the only one of its name")
    choice = fields.child("tool_choice") or Fields({}, fields.path_of("tool_choice"))
    rules = _rules(choice, specs)
    marks = [has_mark(entry) for entry in entries]
    objects = tuple(
        template_tool(spec.name, entry.string("description"), spec.parameters)
        for entry, spec in zip(entries, specs, strict=True)
    )
    return MessagesTools(objects, rules, any(marks))


def _is_own(entry: Fields) -> bool:
    """Whether the client runs the tool itself."""
    return entry.string("type") in (None, "custom") and entry.has("input_schema")


def _spec(entry: Fields) -> ToolSpec:
    schema = entry.child("input_schema")
    return ToolSpec(
        name=tool_name(entry),
        parameters=None if schema is None else schema.values,
        is_strict=entry.flag("strict"),
    )


def _rules(choice: Fields, specs: tuple[ToolSpec, ...]) -> ToolRules | None:
    kind = choice.choice("type", _CHOICES) or "auto"
    name = choice.string("name")
    is_single = choice.flag("disable_parallel_tool_use")
    if not specs:
        if kind in _DEMANDING:
            raise invalid_value(choice.path_of("type"), "needs tools to choose from")
        return None
    allowed = None
    if kind == "tool":
        if name is None:
            raise missing(choice.path_of("name"))
        if name not in {spec.name for spec in specs}:
            raise invalid_value(choice.path_of("name"), "must be the name of one of the tools")
        allowed = (name,)
    return ToolRules(
        tools=specs, choice=_contract_choice(kind), allowed=allowed, parallel=not is_single
    )


def _contract_choice(kind: str) -> Literal["auto", "none", "required"]:
    if kind in _DEMANDING:
        return "required"
    return "none" if kind == "none" else "auto"
