"""Items of an answer while they come into being.

Each item is one object from its first event to the final answer, so every place that shows it
shows the same ids and texts. Its methods return the events of what they did:

    begin -> append* -> end | cut
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, Literal, TypeAlias

from ninfer.gateway.request_ids import new_id
from ninfer.gateway.responses.call_input import CallInput
from ninfer.gateway.responses.sealed_text import seal
from ninfer.gateway.responses.tools import DeclaredTool

Event: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputItem(ABC):
    """What all kinds have in common. `prefix`: of the item's id."""

    prefix = ""

    def __init__(self, output_index: int) -> None:
        self.item_id: Final = new_id(self.prefix)
        self.status: Status = "in_progress"
        self._output_index: Final = output_index

    @abstractmethod
    def as_json(self) -> dict[str, Any]: ...

    def begin(self) -> list[Event]:
        return [self._item_event("added"), *self._begin_content()]

    def end(self) -> list[Event]:
        return self._close("completed")

    def cut(self) -> list[Event]:
        """The answer ends inside the item."""
        return self._close("incomplete")

    def _close(self, status: Status) -> list[Event]:
        self.status = status
        return [*self._end_content(), self._item_event("done")]

    def _begin_content(self) -> list[Event]:
        return []

    def _end_content(self) -> list[Event]:
        return []

    def _item_event(self, what: Literal["added", "done"]) -> Event:
        return {
            "type": f"response.output_item.{what}",
            "output_index": self._output_index,
            "item": self.as_json(),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self.item_id,
            "output_index": self._output_index,
            **fields,
        }


class ReasoningItem(OutputItem):
    """A thought. Who asked for a summary gets the thought itself as one, while it comes."""

    prefix = "rs_"

    def __init__(self, output_index: int, *, has_summary: bool, is_sealed: bool) -> None:
        super().__init__(output_index)
        self._has_summary = has_summary
        self._is_sealed = is_sealed
        self._pieces: list[str] = []
        self._has_content = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def as_json(self) -> dict[str, Any]:
        is_shown = self._has_content
        item: dict[str, Any] = {
            "id": self.item_id,
            "type": "reasoning",
            "summary": [self._summary_part()] if is_shown and self._has_summary else [],
            "content": [self._part()] if is_shown else [],
            "status": self.status,
        }
        if self._is_sealed and self.status != "in_progress":
            item["encrypted_content"] = seal(self.text)
        return item

    def append(self, text: str) -> list[Event]:
        self._pieces.append(text)
        events = [self._event("reasoning_text.delta", content_index=0, delta=text)]
        if self._has_summary:
            events.append(self._event("reasoning_summary_text.delta", summary_index=0, delta=text))
        return events

    def _begin_content(self) -> list[Event]:
        self._has_content = True
        events = [self._event("content_part.added", content_index=0, part=self._part())]
        if self._has_summary:
            part = self._summary_part()
            events.append(self._event("reasoning_summary_part.added", summary_index=0, part=part))
        return events

    def _end_content(self) -> list[Event]:
        text = self.text
        events = [
            self._event("reasoning_text.done", content_index=0, text=text),
            self._event("content_part.done", content_index=0, part=self._part()),
        ]
        if self._has_summary:
            part = self._summary_part()
            events += [
                self._event("reasoning_summary_text.done", summary_index=0, text=text),
                self._event("reasoning_summary_part.done", summary_index=0, part=part),
            ]
        return events

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def _summary_part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}


class MessageItem(OutputItem):
    """`has_logprobs`: the text's part lists those of its tokens."""

    prefix = "msg_"

    def __init__(self, output_index: int, *, has_logprobs: bool) -> None:
        super().__init__(output_index)
        self._has_logprobs = has_logprobs
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._has_content = False

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": [self._part()] if self._has_content else [],
        }

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Of tokens behind the last text."""
        self._logprobs += logprobs

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._pieces.append(text)
        self._logprobs += logprobs
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _begin_content(self) -> list[Event]:
        self._has_content = True
        return [self._event("content_part.added", content_index=0, part=self._part())]

    def _end_content(self) -> list[Event]:
        text = "".join(self._pieces)
        return [
            self._event("output_text.done", content_index=0, text=text, logprobs=self._logprobs),
            self._event("content_part.done", content_index=0, part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": "".join(self._pieces),
            "annotations": [],
        }
        if self._has_logprobs:
            part["logprobs"] = list(self._logprobs)
        return part


class CallItem(OutputItem):
    """A call. One that is cut off gets no closing events: clients run a call when it is done."""

    def __init__(self, output_index: int, tool: DeclaredTool) -> None:
        super().__init__(output_index)
        self._tool = tool
        self._call_id: Final = new_id("call_")
        self._pieces: list[str] = []

    @abstractmethod
    def append(self, text: str) -> list[Event]:
        """`text` continues the arguments."""

    def cut(self) -> list[Event]:
        self.status = "incomplete"
        return []

    def _call_json(self, kind: str, content_name: str) -> dict[str, Any]:
        item = {
            "id": self.item_id,
            "type": kind,
            "call_id": self._call_id,
            "name": self._tool.name,
            content_name: "".join(self._pieces),
            "status": self.status,
        }
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        return item


class FunctionCallItem(CallItem):
    prefix = "fc_"

    def as_json(self) -> dict[str, Any]:
        return self._call_json("function_call", "arguments")

    def append(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def _end_content(self) -> list[Event]:
        name, arguments = self._tool.name, "".join(self._pieces)
        return [self._event("function_call_arguments.done", name=name, arguments=arguments)]


class CustomCallItem(CallItem):
    """Its input is the one string among the arguments."""

    prefix = "ctc_"

    def __init__(self, output_index: int, tool: DeclaredTool) -> None:
        super().__init__(output_index, tool)
        self._input = CallInput()

    def as_json(self) -> dict[str, Any]:
        return self._call_json("custom_tool_call", "input")

    def append(self, text: str) -> list[Event]:
        return self._take(self._input.feed(text))

    def _end_content(self) -> list[Event]:
        rest = self._take(self._input.end())
        return [*rest, self._event("custom_tool_call_input.done", input="".join(self._pieces))]

    def _take(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._event("custom_tool_call_input.delta", delta=text)]


def call_item(output_index: int, tool: DeclaredTool) -> CallItem:
    return (CustomCallItem if tool.function.is_custom else FunctionCallItem)(output_index, tool)
