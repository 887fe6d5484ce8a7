"""Places of a rendered conversation where another one will part from it.

    system, tools | user ... | user, thoughts, calls, results | opener
                  ^          ^      ^                         ^
                  |          |      TURN_CLOSURE              RESPONSE_REPLAY
                  |          LONG_ANCHOR
                  STABLE_PREFIX

Places are found in the text itself. The frames of user turns and the opener are known from small
conversations that the template was tried with; blocks of user turns cannot be forged, because
control marks in what clients write are broken up. For a template without such frames the rendering
of a shorter conversation says where its end is, if the text begins with it, and that of another one
where the two part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ninfer.contract.cache import CheckpointKind
from ninfer.frontend.template_traits import TurnFrame

MAX_ANCHORS: Final = 4
MAX_MARKS: Final = 4
"""The client's last ones count."""
LEAST_ANCHOR_CHARACTERS: Final = 4096
"""Anchors lie at least about so far apart."""
_TOOL_RESULT: Final = ("<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class TextPlace:
    """The first `end` characters of a rendered text; see PromptFrontier."""

    end: int
    kind: CheckpointKind
    is_explicit: bool = False


@dataclass(frozen=True, slots=True)
class CacheMark:
    """The client marked a part of a message.

    beginning   what the message says up to the end of the part
    is_last     nothing follows in the message
    """

    message_index: int
    beginning: str
    is_last: bool


@dataclass(frozen=True)
class RenderedTurns:
    """A rendered conversation and what it came from.

    messages       as they were given to the template, stand-ins aside
    has_tools      the template was given tools
    tools_marked   the client marked the tools
    is_continued   the last message is left open
    is_opened      the text ends with the opener of a new answer
    user_frame     round a user's turn; None when the template has no fixed one
    opener         what the template writes for a new answer to a user; None when it tells nobody
    render_first   the rendering of the first n messages alone, without an opener; None when the
                   template refuses
    render_parted  the same, but for a question that begins like no other behind them
    """

    text: str
    messages: Sequence[Mapping[str, Any]]
    user_frame: TurnFrame | None
    opener: Callable[[], str | None]
    render_first: Callable[[int], str | None]
    render_parted: Callable[[int], str | None]
    has_tools: bool = False
    tools_marked: bool = False
    is_continued: bool = False
    is_opened: bool = True
    marks: Sequence[CacheMark] = ()

    def places(self) -> list[TextPlace]:
        """All that were found, in no order; several may be at one end."""
        marked = {mark.message_index for mark in self.marks if mark.is_last}
        places = []
        for index, kind, end in self._turns:
            is_marked = index in marked
            if kind is CheckpointKind.STABLE_PREFIX:
                is_marked = is_marked or self.tools_marked
            places.append(TextPlace(end, kind, is_marked))
        places += [TextPlace(end, CheckpointKind.LONG_ANCHOR) for end in self._anchors]
        return places + self._marked()

    @cached_property
    def _turns(self) -> list[tuple[int | None, CheckpointKind, int]]:
        """(index of the message that ends there, kind, end)"""
        found = (
            (0 if self._has_system else None, CheckpointKind.STABLE_PREFIX, self._stable),
            (max(self._questions, default=None), CheckpointKind.TURN_CLOSURE, self._closure),
            (self._num_answered - 1, CheckpointKind.RESPONSE_REPLAY, self._replay),
        )
        return [(index, kind, end) for index, kind, end in found if end is not None]

    @property
    def _has_system(self) -> bool:
        return bool(self.messages[0]["role"] == "system")

    @property
    def _num_answered(self) -> int:
        """Messages before the answer that is being produced."""
        return len(self.messages) - (1 if self.is_continued else 0)

    @cached_property
    def _questions(self) -> list[int]:
        """Indices of the user's own messages; tool results in a user's turn are none."""
        return [i for i, message in enumerate(self.messages) if _is_question(message)]

    @cached_property
    def _blocks(self) -> dict[int, tuple[int, int]]:
        """Where the user's turns are: [start, end) by index. One that is not found as expected
        ends the search."""
        blocks: dict[int, tuple[int, int]] = {}
        position = 0
        for index in self._questions if self.user_frame is not None else ():
            found = self._find_block(self.messages[index]["content"], position)
            if found is None:
                break
            blocks[index] = found
            position = found[1]
        return blocks

    def _find_block(self, content: str, position: int) -> tuple[int, int] | None:
        if self.user_frame is None:
            return None
        for text in dict.fromkeys((content, content.strip())):
            block = self.user_frame.around(text)
            start = self.text.find(block, position)
            if start >= 0:
                return start, start + len(block)
        return None

    @cached_property
    def _stable(self) -> int | None:
        if not self._has_system and not self.has_tools:
            return None
        first = 1 if self._has_system else 0
        if first in self._blocks:
            return self._blocks[first][0] or None
        return self._end_of(first) or self._common_with_another(first)

    @cached_property
    def _closure(self) -> int | None:
        if not self._questions:
            return None
        last = self._questions[-1]
        return self._blocks[last][1] if last in self._blocks else self._end_of(last + 1)

    @cached_property
    def _replay(self) -> int | None:
        if not self.is_opened and not self.is_continued:
            return None
        if self._num_answered - 1 in self._questions:
            return self._closure
        opener = None if self.is_continued else self.opener()
        if opener and self.text.endswith(opener):
            return len(self.text) - len(opener)
        return self._end_of(self._num_answered)

    @cached_property
    def _anchors(self) -> list[int]:
        """Ends of earlier questions, each the first behind a multiple of the spacing: that stays
        the same while the conversation grows, until the spacing doubles."""
        if self._closure is None:
            return []
        spacing = LEAST_ANCHOR_CHARACTERS
        while spacing * (MAX_ANCHORS + 1) < self._closure:
            spacing *= 2
        anchors: dict[int, int] = {}
        for _, end in self._blocks.values():
            if end < self._closure and end >= spacing:
                anchors.setdefault(end // spacing, end)
        return sorted(anchors.values())[-MAX_ANCHORS:]

    def _marked(self) -> list[TextPlace]:
        """Marks that are not at the end of something that is a place anyway."""
        places = []
        for mark in self.marks[-MAX_MARKS:]:
            end = self._end_of_mark(mark)
            if end is not None:
                is_system = mark.message_index == 0 and self._has_system
                kind = CheckpointKind.STABLE_PREFIX if is_system else CheckpointKind.LONG_ANCHOR
                places.append(TextPlace(end, kind, is_explicit=True))
        return places

    def _end_of_mark(self, mark: CacheMark) -> int | None:
        index = mark.message_index
        if mark.is_last and any(index == known for known, _, _ in self._turns):
            return None
        if mark.is_last and index in self._blocks:
            return self._blocks[index][1]
        before = [end for i, (_, end) in self._blocks.items() if i < index]
        beginning = mark.beginning.lstrip()
        found = self.text.find(beginning, max(before, default=0)) if beginning else -1
        return found + len(beginning) if found >= 0 else None

    def _end_of(self, num_messages: int) -> int | None:
        """The end of the first messages, where the text begins with their own rendering."""
        if not 0 < num_messages <= len(self.messages):
            return None
        shorter = self.render_first(num_messages)
        return len(shorter) if shorter and self.text.startswith(shorter) else None

    def _common_with_another(self, num_messages: int) -> int | None:
        """Where a conversation parts that goes on differently after the first messages."""
        other = self.render_parted(num_messages)
        return _num_common(self.text, other) or None if other else None


def _num_common(left: str, right: str) -> int:
    """Characters that two texts begin with alike."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left.startswith(right[:middle]) else (low, middle - 1)
    return low


def _is_question(message: Mapping[str, Any]) -> bool:
    if message["role"] != "user":
        return False
    text = message["content"].strip()
    return not (text.startswith(_TOOL_RESULT[0]) and text.endswith(_TOOL_RESULT[1]))
