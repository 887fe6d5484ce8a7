"""A Frontend and an Engine that play scripted answers, for what talks to both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from ninfer.contract.chat import ChatPrompt, GenerationParams
from ninfer.contract.errors import NInferError
from ninfer.contract.generation import (
    Admitted,
    CallMark,
    Channel,
    EngineHealth,
    EngineStatus,
    Event,
    Failed,
    Finish,
    Finished,
    FinishReason,
    GenerationRequest,
    OutputDelta,
    Progress,
    Timings,
    Usage,
)
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: pieces, then calls (name, arguments), then an end. `waits`: after the pieces only
    a cancel ends it."""

    pieces: tuple[tuple[Channel, str], ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    finish: FinishReason = FinishReason.STOP_TOKEN
    error: NInferError | None = None
    refusal: NInferError | None = None
    waits: bool = False


class ScriptedHandle:
    def __init__(self, request_id: str, script: Script) -> None:
        self._request_id = request_id
        self._script = script
        self._cancelled = asyncio.Event()
        self.is_released = False

    @property
    def request_id(self) -> str:
        return self._request_id

    def cancel(self) -> None:
        self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield Admitted(Usage(5))
        for count, (channel, text) in enumerate(self._script.pieces, 1):
            await asyncio.sleep(0)
            if self._cancelled.is_set():
                break
            yield Progress((OutputDelta(channel, text),), Usage(5, count))
        for index, (name, arguments) in enumerate(self._script.calls):
            for text, begins in ((arguments[:1], True), (arguments[1:], False)):
                mark = CallMark(index, name, begins=begins, ends=not begins)
                yield Progress((OutputDelta("call", text, call=mark),), Usage(5, 1))
        if self._script.waits:
            await self._cancelled.wait()
        yield self._last_event()

    def _last_event(self) -> Event:
        usage = Usage(5, len(self._script.pieces))
        if self._cancelled.is_set():
            return Finished(Finish(FinishReason.CANCELLED), (), usage, Timings(0, 0.1, 0.5, 0.6))
        if self._script.error is not None:
            return Failed(self._script.error, usage)
        return Finished(Finish(self._script.finish), (), usage, Timings(0, 0.1, 0.5, 0.6))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_released = True


@dataclass(slots=True)
class ScriptedEngine:
    """Plays `scripts` in order, one a request."""

    scripts: list[Script]
    requests: list[GenerationRequest] = field(default_factory=list)
    handles: list[ScriptedHandle] = field(default_factory=list)
    max_context: int = 100

    def check(self, request: GenerationRequest) -> None:
        pass

    def submit(self, request: GenerationRequest) -> ScriptedHandle:
        script = self.scripts[len(self.requests)]
        self.requests.append(request)
        if script.refusal is not None:
            raise script.refusal
        handle = ScriptedHandle(request.request_id, script)
        self.handles.append(handle)
        return handle

    def status(self) -> EngineStatus:
        return EngineStatus(EngineHealth.READY, 0, 0, 0, 1, 16, 2, 8, 0, 0)

    def flush_cache(self) -> None:
        raise NotImplementedError

    def now(self) -> float:
        return 0.0

    def close_admission(self) -> None:
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> bool:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class _NoSession:
    @property
    def reasoning_tokens(self) -> int:
        return 0

    @property
    def broken_calls(self) -> int:
        return 0

    def preview(self, tokens: Any, limit: Any) -> Any:
        raise NotImplementedError

    def goes_on_after(self, token: Any) -> bool:
        raise NotImplementedError

    def masks_behind(self, token_ids: Any) -> Any:
        raise NotImplementedError

    def commit(self, preview: Any) -> None:
        raise NotImplementedError

    def flush(self) -> tuple[OutputDelta, ...]:
        return ()


@dataclass(slots=True)
class ScriptedFrontend:
    """Remembers what it was asked to prepare. Its own temperature is 0.25."""

    chats: list[ChatPrompt] = field(default_factory=list)
    vocab_size: int = 16
    has_tokenizer: bool = True
    has_chat_template: bool = True

    async def prepare_chat(self, chat: ChatPrompt) -> PreparedPrompt:
        self.chats.append(chat)
        return PreparedPrompt(np.arange(5, dtype=np.int32))

    async def render_chat(self, chat: ChatPrompt) -> str:
        raise NotImplementedError

    def check_num_messages(self, num_messages: int, param: str = "messages") -> None:
        raise NotImplementedError

    def for_context(self, max_context: int | None) -> ScriptedFrontend:
        raise NotImplementedError

    async def prepare_text(
        self, text: str, param: str = "prompt", *, parses_special: bool = True
    ) -> PreparedPrompt:
        raise NotImplementedError

    def prepare_ids(self, token_ids: Sequence[int], param: str = "input_ids") -> PreparedPrompt:
        return PreparedPrompt(np.asarray(token_ids, dtype=np.int32))

    def build_request(
        self, request_id: str, prompt: PreparedPrompt, params: GenerationParams, *, now: float
    ) -> GenerationRequest:
        sampling = SamplingParams(
            temperature=0.25 if params.temperature is None else params.temperature,
            top_k=params.top_k or 0,
            seed=params.seed or 0,
        )
        max_tokens = 1000 if params.max_tokens is None else params.max_tokens
        return GenerationRequest(request_id, prompt, sampling, _NoSession(), max_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        raise NotImplementedError


def turns_of(chat: ChatPrompt) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in chat.messages]
