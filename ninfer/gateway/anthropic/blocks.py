"""Content blocks of messages, collected turn by turn.

text, document, search_result -> text          thinking -> reasoning
tool_use -> a call                             tool_result -> a tool message
image -> a place for a picture                 what only hosted services run -> nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from ninfer.contract.chat import ChatMessage, ContentPart, MediaPart, TextPart, ToolCall
from ninfer.gateway.anthropic.signature import thought_in
from ninfer.gateway.cache_fields import has_mark
from ninfer.gateway.fields import (
    Fields,
    as_object,
    invalid_type,
    invalid_value,
    missing,
    unsupported_value,
)
from ninfer.gateway.media.references import MediaReference, parse_media_part

TurnRole: TypeAlias = Literal["system", "user", "assistant"]
BLANK_LINE: Final = "\n\n"
ERROR_PREFIX: Final = "Error: "
"""What the model sees before the result of a call that failed."""
_HOSTED: Final = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_listing",
        "fallback",
    }
)
_HOSTED_RESULT: Final = "_tool_result"


@dataclass(frozen=True, slots=True)
class ToolChange:
    """From here on a tool may be called, or (`is_removal`) may not. `definition`: an entry like
    those of `tools`, where the block brings one, else `name` refers to one."""

    path: str
    name: str
    definition: Fields | None
    is_removal: bool


@dataclass(slots=True)
class Turn:
    """What neighbouring messages of one role say together.

    media   references of the turn's pictures by the id of their place in `parts` or `results`
    """

    role: TurnRole
    parts: list[ContentPart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)
    tool_changes: list[ToolChange] = field(default_factory=list)
    media: dict[int, MediaReference] = field(default_factory=dict)

    def messages(self) -> list[ChatMessage]:
        """Results first: they answer the turn before. A system turn without text is none."""
        if not self.parts and (self.results or self.role == "system"):
            return self.results
        own = ChatMessage(
            role=self.role,
            content=tuple(self.parts),
            reasoning_content="".join(self.thoughts) or None,
            tool_calls=tuple(self.calls),
        )
        return [*self.results, own]

    def mark_end(self) -> None:
        """All up to the end of this turn will be sent again."""
        if self.parts:
            self.parts = mark_last(self.parts)
        elif self.results:
            last = self.results[-1]
            content = tuple(mark_last(list(last.content)))
            self.results[-1] = replace(last, content=content)


def read_content(message: Fields, turn: Turn) -> None:
    """Add a message's content to its turn. Raises RequestError naming the block."""
    for block in _blocks(message, "content"):
        if isinstance(block, str):
            turn.parts.append(TextPart(block))
        else:
            _read_block(block, turn)


def read_texts(holder: Fields, name: str) -> list[TextPart]:
    """The parts of a field that is a string or a list of text blocks. Raises RequestError."""
    parts = []
    for block in _blocks(holder, name):
        if isinstance(block, str):
            parts.append(TextPart(block))
            continue
        kind = _kind(block)
        if kind != "text":
            raise invalid_value(block.path_of("type"), "must be text")
        parts.append(TextPart(_required(block, "text"), has_mark(block)))
    return parts


def mark_last(parts: list[ContentPart]) -> list[ContentPart]:
    """The last part ends a prefix, if it is a text."""
    if parts and isinstance(parts[-1], TextPart):
        return [*parts[:-1], replace(parts[-1], ends_prefix=True)]
    return parts


def _blocks(holder: Fields, name: str) -> list[str | Fields]:
    value = holder.get(name)
    path = holder.path_of(name)
    if value is None:
        return []
    if isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of blocks", value)
    return [
        item if isinstance(item, str) else as_object(item, f"{path}[{index}]")
        for index, item in enumerate(value)
    ]


def _kind(block: Fields) -> str:
    kind = block.string("type")
    if kind is None:
        raise missing(block.path_of("type"))
    return kind


def _required(block: Fields, name: str) -> str:
    text = block.string(name)
    if text is None:
        raise missing(block.path_of(name))
    return text


def _read_block(block: Fields, turn: Turn) -> None:
    kind = _kind(block)
    if kind in _HOSTED or (kind.endswith(_HOSTED_RESULT) and kind != "tool_result"):
        return
    readers = _READERS[turn.role]
    reader = readers.get(kind)
    if reader is not None:
        reader(block, turn)
    elif kind == "container_upload":
        raise unsupported_value(block.path, "there is no store of uploaded files")
    else:
        rule = f"must be one of {', '.join(readers)} in a message of the {turn.role}"
        raise invalid_value(block.path_of("type"), rule)


def _read_text(block: Fields, turn: Turn) -> None:
    turn.parts.append(TextPart(_required(block, "text"), has_mark(block)))


def _read_document(block: Fields, turn: Turn) -> None:
    turn.parts.append(_document(block))


def _read_search_result(block: Fields, turn: Turn) -> None:
    turn.parts.append(_search_result(block))


def _read_image(block: Fields, turn: Turn) -> None:
    turn.parts.append(_image(block, turn))


def _read_compaction(block: Fields, turn: Turn) -> None:
    """The summary of what stood before it; null where there was none."""
    text = block.string("content")
    if text:
        turn.parts.append(TextPart(text, has_mark(block)))


def _read_tool_change(block: Fields, turn: Turn) -> None:
    tool = block.child("tool")
    if tool is None:
        raise missing(block.path_of("tool"))
    kind, is_removal = _kind(tool), block.string("type") == "tool_removal"
    if kind == "tool_reference":
        change = ToolChange(tool.path_of("name"), _required(tool, "name"), None, is_removal)
    elif kind == "tool_definition" and not is_removal:
        definition = tool.child("definition")
        if definition is None:
            raise missing(tool.path_of("definition"))
        name = definition.string("name") or ""
        change = ToolChange(definition.path, name, definition, is_removal)
    elif kind.startswith("mcp_"):
        return
    else:
        raise invalid_value(tool.path_of("type"), "must be the reference or definition of a tool")
    turn.tool_changes.append(change)


def _read_thinking(block: Fields, turn: Turn) -> None:
    thought = block.string("thinking") or thought_in(block.string("signature") or "")
    if thought:
        turn.thoughts.append(thought)


def _read_tool_use(block: Fields, turn: Turn) -> None:
    arguments = block.child("input")
    name = _required(block, "name")
    if not name:
        raise invalid_value(block.path_of("name"), "must not be empty")
    has_mark(block)
    values: Mapping[str, Any] = {} if arguments is None else arguments.values
    turn.calls.append(ToolCall(name, values, block.string("id")))


def _read_tool_result(block: Fields, turn: Turn) -> None:
    parts: list[ContentPart] = [TextPart(ERROR_PREFIX)] if block.flag("is_error") else []
    for item in _blocks(block, "content"):
        parts.append(TextPart(item) if isinstance(item, str) else _result_part(item, turn))
    if has_mark(block):
        parts = mark_last(parts)
    call_id = block.string("tool_use_id")
    turn.results.append(ChatMessage("tool", tuple(parts), tool_call_id=call_id))


def _result_part(block: Fields, turn: Turn) -> ContentPart:
    kind = _kind(block)
    match kind:
        case "text":
            return TextPart(_required(block, "text"), has_mark(block))
        case "image":
            return _image(block, turn)
        case "document":
            return _document(block)
        case "search_result":
            return _search_result(block)
        case "tool_reference":
            return TextPart(f"[tool: {_required(block, 'tool_name')}]")
        case _:
            rule = "must be one of text, image, document, search_result, tool_reference"
            raise invalid_value(block.path_of("type"), rule)


def _image(block: Fields, turn: Turn) -> MediaPart:
    reference = parse_media_part(block)
    has_mark(block)
    part = MediaPart(reference.kind, b"")
    turn.media[id(part)] = reference
    return part


def _document(block: Fields) -> TextPart:
    """The text of a document, below its title and context."""
    source = block.child("source")
    if source is None:
        raise missing(block.path_of("source"))
    kind = _kind(source)
    if kind == "text":
        text = _required(source, "data")
    elif kind == "content":
        text = _joined(read_texts(source, "content"))
    else:
        raise unsupported_value(source.path, "only documents of plain text can be read")
    heads = (block.string("title"), block.string("context"))
    lines = [line for line in (*heads, text) if line]
    return TextPart("\n".join(lines), has_mark(block))


def _search_result(block: Fields) -> TextPart:
    heads = (block.string("title"), block.string("source"))
    text = _joined(read_texts(block, "content"))
    return TextPart("\n".join(line for line in (*heads, text) if line), has_mark(block))


def _joined(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)


_Reader: TypeAlias = Callable[[Fields, Turn], None]
_ANYONE: Final[Mapping[str, _Reader]] = {
    "text": _read_text,
    "tool_addition": _read_tool_change,
    "tool_removal": _read_tool_change,
}
_READERS: Final[Mapping[TurnRole, Mapping[str, _Reader]]] = {
    "system": _ANYONE,
    "user": {
        **_ANYONE,
        "image": _read_image,
        "document": _read_document,
        "search_result": _read_search_result,
        "tool_result": _read_tool_result,
        "compaction": _read_compaction,
    },
    "assistant": {
        **_ANYONE,
        "thinking": _read_thinking,
        "tool_use": _read_tool_use,
        "compaction": _read_compaction,
    },
}
