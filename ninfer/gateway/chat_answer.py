"""A chat answer as one `chat.completion` object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from ninfer.contract.chat import Frontend
from ninfer.contract.generation import Admitted, Finish, OutputDelta
from ninfer.gateway.answer_parts import (
    chat_logprob_entry,
    finish_reason,
    timings_object,
    usage_object,
)
from ninfer.gateway.answers import AnswerHead, Ending, timings_of
from ninfer.gateway.chat_calls import CallCollector
from ninfer.gateway.chat_request import ChatRequest
from ninfer.gateway.choices import LiveEvent

_REASONING_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """How the client wants its answer. `reasoning_names`: the fields that thoughts go to."""

    num_choices: int
    wants_logprobs: bool
    include_usage: bool
    continuous_usage: bool
    reasoning_names: tuple[str, ...]

    @classmethod
    def of(cls, request: ChatRequest, reasoning_field: str) -> Self:
        """`reasoning_field` is the option of this name."""
        return cls(
            num_choices=request.num_choices,
            wants_logprobs=request.params.top_logprobs is not None,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            reasoning_names=() if request.hide_reasoning else _REASONING_NAMES[reasoning_field],
        )


class CompletionBuilder:
    """Collects all events of a request into one `chat.completion` object."""

    def __init__(self, head: AnswerHead, form: ChatForm, frontend: Frontend) -> None:
        self._head = head
        self._frontend = frontend
        self._wants_logprobs = form.wants_logprobs
        self._reasoning_names = form.reasoning_names
        count = form.num_choices
        self._endings = [Ending() for _ in range(count)]
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._thoughts: list[list[str]] = [[] for _ in range(count)]
        self._calls = [CallCollector() for _ in range(count)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(count)]

    def add(self, index: int, event: LiveEvent) -> None:
        self._endings[index].update(event)
        for delta in () if isinstance(event, Admitted) else event.deltas:
            if delta.channel == "content":
                self._texts[index].append(delta.text)
                self._entries[index] += self._logprobs(delta)
            elif delta.channel == "call":
                self._calls[index].add(delta)
            else:
                self._thoughts[index].append(delta.text)

    def answer(self) -> dict[str, Any]:
        usage = usage_object([ending.usage for ending in self._endings])
        return {
            **self._head.fields("chat.completion"),
            "choices": [self._choice(index) for index in range(len(self._endings))],
            "usage": usage,
            "timings": timings_object(timings_of(self._endings), usage["completion_tokens"]),
        }

    def _logprobs(self, delta: OutputDelta) -> list[dict[str, Any]]:
        if not self._wants_logprobs:
            return []
        return [chat_logprob_entry(token, self._frontend.token_bytes) for token in delta.tokens]

    def _choice(self, index: int) -> dict[str, Any]:
        text, calls = "".join(self._texts[index]), self._calls[index].entries()
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        thoughts = "".join(self._thoughts[index])
        if thoughts:
            message |= dict.fromkeys(self._reasoning_names, thoughts)
        if calls:
            message["tool_calls"] = calls
        finish = self._endings[index].require_finish()
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_object(self._entries[index]) if self._wants_logprobs else None,
            "finish_reason": chat_finish_reason(finish, has_calls=bool(calls)),
            "stop_reason": finish.matched,
        }


def chat_finish_reason(
    finish: Finish, *, has_calls: bool
) -> Literal["stop", "length", "tool_calls"]:
    """`has_calls`: a call is complete. An answer that was cut off is `length` all the same."""
    reason = finish_reason(finish)
    return "tool_calls" if has_calls and reason == "stop" else reason


def logprobs_object(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}
