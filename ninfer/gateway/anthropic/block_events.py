"""Output of a session -> content blocks, one after another: begun, filled, stopped.

Whole answers and streams are both made from these events, so they say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import CallMark, OutputDelta
from ninfer.gateway.anthropic.signature import signature_of
from ninfer.gateway.request_ids import new_id

DeltaKind: TypeAlias = Literal[
    "thinking_delta", "signature_delta", "text_delta", "input_json_delta"
]
DELTA_FIELDS: Final[Mapping[DeltaKind, str]] = {
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "text_delta": "text",
    "input_json_delta": "partial_json",
}
"""The field of a delta that has its text."""
_NO_ARGUMENTS: Final = "{}"


@dataclass(frozen=True, slots=True)
class BlockStart:
    """`content` is the block as long as nothing is in it."""

    index: int
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BlockDelta:
    index: int
    kind: DeltaKind
    text: str


@dataclass(frozen=True, slots=True)
class BlockStop:
    """`is_whole`: False for a call that was cut off."""

    index: int
    is_whole: bool = True


BlockEvent: TypeAlias = BlockStart | BlockDelta | BlockStop


@dataclass(slots=True)
class _OpenBlock:
    """`call` is set in a block of a call; `texts` are those of a thought."""

    index: int
    channel: str
    call: CallMark | None = None
    texts: list[str] = field(default_factory=list)
    is_empty: bool = True


class BlockEvents:
    """The blocks of one answer: their indices count from 0 and at most one is open.

    hides_thinking   thinking blocks get their signature alone
    num_calls        calls that are complete
    """

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._open: _OpenBlock | None = None
        self._num_blocks = 0
        self.num_calls = 0

    def add(self, deltas: Iterable[OutputDelta]) -> Iterator[BlockEvent]:
        for delta in deltas:
            if delta.channel == "call":
                yield from self._add_call(delta)
            elif delta.text:
                yield from self._add_text(delta)

    def close(self) -> Iterator[BlockEvent]:
        """Stop the last block; a call that is still open was cut off."""
        block = self._open
        if block is None:
            return
        self._open = None
        if block.channel == "reasoning":
            signature = signature_of("".join(block.texts), is_shown=not self._hides_thinking)
            yield BlockDelta(block.index, "signature_delta", signature)
        yield BlockStop(block.index, is_whole=block.call is None)

    def _add_text(self, delta: OutputDelta) -> Iterator[BlockEvent]:
        block = self._open
        is_thought = delta.channel == "reasoning"
        if block is None or block.channel != delta.channel:
            yield from self.close()
            block = self._begin(delta.channel)
            empty = {"type": "text", "text": ""}
            if is_thought:
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield BlockStart(block.index, empty)
        if not is_thought:
            yield BlockDelta(block.index, "text_delta", delta.text)
            return
        block.texts.append(delta.text)
        if not self._hides_thinking:
            yield BlockDelta(block.index, "thinking_delta", delta.text)

    def _add_call(self, delta: OutputDelta) -> Iterator[BlockEvent]:
        mark, block = delta.call, self._open
        if mark is None:
            raise InvariantError("a delta of a call does not say of which")
        if block is None or block.call is None or block.call.index != mark.index:
            yield from self.close()
            block = self._begin(delta.channel, mark)
            head = {"type": "tool_use", "id": new_id("toolu_"), "name": mark.name}
            yield BlockStart(block.index, {**head, "input": {}})
        text = delta.text
        if mark.ends and block.is_empty and not text:
            text = _NO_ARGUMENTS
        if text:
            block.is_empty = False
            yield BlockDelta(block.index, "input_json_delta", text)
        if mark.ends:
            self._open = None
            self.num_calls += 1
            yield BlockStop(block.index)

    def _begin(self, channel: str, call: CallMark | None = None) -> _OpenBlock:
        block = self._open = _OpenBlock(self._num_blocks, channel, call)
        self._num_blocks += 1
        return block
