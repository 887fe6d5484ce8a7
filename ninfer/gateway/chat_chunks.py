"""A chat answer as a stream of `chat.completion.chunk` frames."""

from __future__ import annotations

from typing import Any, Final

from ninfer.contract.chat import Frontend
from ninfer.contract.generation import Admitted, Finish, Finished, OutputDelta
from ninfer.gateway.answer_parts import chat_logprob_entry, timings_object, usage_object
from ninfer.gateway.answers import AnswerHead, Ending, timings_of
from ninfer.gateway.chat_answer import ChatForm, chat_finish_reason, logprobs_object
from ninfer.gateway.chat_calls import CallDeltas
from ninfer.gateway.choices import LiveEvent
from ninfer.gateway.frame_template import FrameTemplate
from ninfer.gateway.sse import DONE_FRAME, OpenAIStreamStyle, data_frame

_CONTENT: Final = ("content",)


class ChunkWriter(OpenAIStreamStyle):
    """Turns events into `chat.completion.chunk` frames.

    Logprobs travel with the chunk that carries their text; those of tokens without a text of
    their own wait for the next chunk of their choice.
    """

    def __init__(self, head: AnswerHead, form: ChatForm, frontend: Frontend) -> None:
        self._base = head.fields("chat.completion.chunk")
        self._form = form
        self._frontend = frontend
        self._wants_logprobs = form.wants_logprobs
        self._endings = [Ending() for _ in range(form.num_choices)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(form.num_choices)]
        self._calls = [CallDeltas() for _ in range(form.num_choices)]
        self._templates: dict[tuple[int, str], FrameTemplate] = {}

    def opening(self) -> list[bytes]:
        """Role chunks of all choices, in order: accumulators use the index as a list position."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(self._choice(index, delta)) for index in range(len(self._endings))]

    def frames(self, index: int, event: LiveEvent) -> list[bytes]:
        """What one event makes visible, maybe nothing."""
        self._endings[index].update(event)
        if isinstance(event, Admitted):
            return []
        frames = [frame for delta in event.deltas for frame in self._delta_frames(index, delta)]
        if isinstance(event, Finished):
            frames.append(self._finish_frame(index, event.finish))
        return frames

    def closing(self) -> list[bytes]:
        """The usage chunk, if asked for, and the closing mark."""
        if not self._form.include_usage:
            return [DONE_FRAME]
        usage = self._usage()
        chunk = {**self._base, "choices": [], "usage": usage, "timings": self._timings()}
        return [data_frame(chunk), DONE_FRAME]

    def _delta_frames(self, index: int, delta: OutputDelta) -> list[bytes]:
        if delta.channel == "reasoning":
            names = self._form.reasoning_names
            return [self._text_chunk(index, names, delta.text)] if delta.text and names else []
        if delta.channel == "call":
            deltas = self._calls[index].of(delta)
            return [self._chunk(self._choice(index, part)) for part in deltas]
        if self._wants_logprobs:
            token_bytes = self._frontend.token_bytes
            self._entries[index] += [
                chat_logprob_entry(token, token_bytes) for token in delta.tokens
            ]
        if not delta.text:
            return []
        if not self._entries[index]:
            return [self._text_chunk(index, _CONTENT, delta.text)]
        choice = self._choice(index, {"content": delta.text})
        choice["logprobs"] = self._take_logprobs(index)
        return [self._chunk(choice)]

    def _text_chunk(self, index: int, names: tuple[str, ...], text: str) -> bytes:
        """A text under one name or more. By far most chunks are of this kind."""

        def frame_of(some_text: str) -> bytes:
            return self._chunk(self._choice(index, dict.fromkeys(names, some_text)))

        if self._form.continuous_usage or len(names) > 1:
            return frame_of(text)
        template = self._templates.get((index, names[0]))
        if template is None:
            template = self._templates[index, names[0]] = FrameTemplate(frame_of)
        return template.fill(text)

    def _finish_frame(self, index: int, finish: Finish) -> bytes:
        choice = self._choice(index, {})
        choice["logprobs"] = self._take_logprobs(index)
        has_calls = self._calls[index].has_complete
        choice["finish_reason"] = chat_finish_reason(finish, has_calls=has_calls)
        choice["stop_reason"] = finish.matched
        is_last = all(ending.finish is not None for ending in self._endings)
        if is_last and not self._form.include_usage:
            return self._chunk(choice, {"timings": self._timings()})
        return self._chunk(choice)

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._base, "choices": [choice]}
        if self._form.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._form.include_usage:
            chunk["usage"] = None
        if extra:
            chunk |= extra
        return data_frame(chunk)

    def _take_logprobs(self, index: int) -> dict[str, Any] | None:
        entries = self._entries[index]
        if not entries:
            return None
        self._entries[index] = []
        return logprobs_object(entries)

    def _usage(self) -> dict[str, Any]:
        return usage_object([ending.usage for ending in self._endings])

    def _timings(self) -> dict[str, Any]:
        return timings_object(timings_of(self._endings), self._usage()["completion_tokens"])
