"""`tools` and `tool_choice`: what the model is shown and which calls it may make.

Tools without a schema of their own are run by the hosted service; they are skipped here. All tools
are shown from the start, also those that a message brings later; one that a message takes away
stays in sight, so that the prompt keeps its beginning, but cannot be called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ninfer.contract.chat import ToolRules, ToolSpec
from ninfer.gateway.anthropic.blocks import ToolChange
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


def parse_message_tools(fields: Fields, changes: Sequence[ToolChange] = ()) -> MessagesTools:
    """`changes`: those that messages make, in their order. Raises RequestError naming the tool or
    the choice."""
    given = [*fields.children("tools")]
    given += [change.definition for change in changes if change.definition is not None]
    entries = [entry for entry in given if _is_own(entry)]
    if len(entries) > MAX_TOOLS:
        raise invalid_value(fields.path_of("tools"), f"must have at most {MAX_TOOLS} entries")
    specs = tuple(_spec(entry) for entry in entries)
    names = [spec.name for spec in specs]
    for entry, name in zip(entries, names, strict=True):
        if names.count(name) > 1:
            raise invalid_value(entry.path_of("name"), "must be the only one of its name")
    choice = fields.child("tool_choice") or Fields({}, fields.path_of("tool_choice"))
    rules = _rules(choice, specs, _callable_names(given, names, changes))
    marks = [has_mark(entry) for entry in entries]
    objects = tuple(
        template_tool(spec.name, entry.string("description"), spec.parameters)
        for entry, spec in zip(entries, specs, strict=True)
    )
    return MessagesTools(objects, rules, any(marks))


def _callable_names(
    given: Sequence[Fields], names: Sequence[str], changes: Sequence[ToolChange]
) -> tuple[str, ...] | None:
    """What may be called once all changes are made; None for all. A change may also name a tool
    that is skipped here."""
    known = {name for entry in given if (name := entry.string("name")) is not None}
    removed: set[str] = set()
    for change in changes:
        if change.definition is None and change.name not in known:
            raise invalid_value(change.path, "must be the name of one of the tools")
        if change.is_removal:
            removed.add(change.name)
        else:
            removed.discard(change.name)
    return tuple(name for name in names if name not in removed) if removed else None


def _is_own(entry: Fields) -> bool:
    """Whether the client runs the tool itself."""
    return entry.string("type") in (None, "custom") and entry.has("input_schema")


def _spec(entry: Fields) -> ToolSpec:
    schema = entry.child("input_schema")
    return ToolSpec(
        name=tool_name(entry),
        parameters=None if schema is None else schema.values,
        is_strict=entry.flag("strict"),
        path=entry.path_of("input_schema"),
    )


def _rules(
    choice: Fields, specs: tuple[ToolSpec, ...], allowed: tuple[str, ...] | None
) -> ToolRules | None:
    kind = choice.choice("type", _CHOICES) or "auto"
    name = choice.string("name")
    is_single = choice.flag("disable_parallel_tool_use")
    names = tuple(spec.name for spec in specs) if allowed is None else allowed
    if not names and kind in _DEMANDING:
        raise invalid_value(choice.path_of("type"), "needs tools to choose from")
    if not specs:
        return None
    if kind == "tool":
        if name is None:
            raise missing(choice.path_of("name"))
        if name not in names:
            raise invalid_value(choice.path_of("name"), "must be the name of one of the tools")
        allowed = (name,)
    return ToolRules(
        tools=specs,
        choice=_contract_choice(kind) if names else "none",
        allowed=allowed,
        parallel=not is_single,
    )


def _contract_choice(kind: str) -> Literal["auto", "none", "required"]:
    if kind in _DEMANDING:
        return "required"
    return "none" if kind == "none" else "auto"
