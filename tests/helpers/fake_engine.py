"""FakeFrontend and FakeEngine: the gateway's neighbours, with scripts a test writes.

A token is a byte. A script is a function from the request to an async generator of events; it runs
as its consumer asks for events, so one that waits for an asyncio.Event holds its request there.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np

from ninfer.contract.chat import ChatPrompt, GenerationParams
from ninfer.contract.errors import NInferError, RequestError, Unavailable, context_length_error
from ninfer.contract.generation import (
    Admitted,
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
    OutputPreview,
    Progress,
    Timings,
    Usage,
)
from ninfer.contract.model import ModelCard
from ninfer.contract.prompt import PreparedPrompt
from ninfer.contract.sampling import (
    GeneratedToken,
    PromptScores,
    PromptScoring,
    SamplingParams,
    TokenLogprobs,
)

VOCAB_SIZE = 300
SPECIAL_ID = 257
TIMINGS = Timings(queue_s=0.01, prefill_s=0.02, decode_s=0.5, total_s=0.53)
CARD = ModelCard(
    name="org/fake-model",
    architecture="FakeForCausalLM",
    max_context=64,
    created_s=1_700_000_000,
    fingerprint="fp_0123456789",
)
AT_STOP_TOKEN = Finish(FinishReason.STOP_TOKEN, 2)
Script: TypeAlias = Callable[[GenerationRequest], AsyncIterator[Event]]


class NoSession:
    """Stands in a request; the fake engine never calls it."""

    @property
    def reasoning_tokens(self) -> int:
        return 0

    @property
    def broken_calls(self) -> int:
        return 0

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        raise AssertionError("the fake engine has no use for sessions")

    def goes_on_after(self, token: GeneratedToken) -> bool:
        raise AssertionError("the fake engine has no use for sessions")

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[None]:
        raise AssertionError("the fake engine has no use for sessions")

    def commit(self, preview: OutputPreview) -> None:
        raise AssertionError("the fake engine has no use for sessions")

    def flush(self) -> tuple[OutputDelta, ...]:
        return ()


class FakeFrontend:
    """Bytes are tokens. `error` is raised by every prepare; `gate` holds it when set."""

    def __init__(self) -> None:
        self.chats: list[ChatPrompt] = []
        self.params: list[GenerationParams] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.default_seed = 1234
        self.max_context: int | None = CARD.max_context

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def has_tokenizer(self) -> bool:
        return True

    @property
    def has_chat_template(self) -> bool:
        return True

    async def prepare_chat(self, chat: ChatPrompt) -> PreparedPrompt:
        self.chats.append(chat)
        text = "|".join(message.text for message in chat.messages) + "|"
        return await self.prepare_text(text, "messages")

    async def render_chat(self, chat: ChatPrompt) -> str:
        return "|".join(message.text for message in chat.messages)

    def check_num_messages(self, num_messages: int, param: str = "messages") -> None:
        if self.max_context is not None and num_messages > self.max_context:
            raise context_length_error(num_messages, self.max_context, param, is_lower_bound=True)

    def for_context(self, max_context: int | None) -> FakeFrontend:
        frontend = copy.copy(self)
        frontend.max_context = max_context
        return frontend

    async def prepare_text(
        self, text: str, param: str = "prompt", *, parses_special: bool = True
    ) -> PreparedPrompt:
        """`<s>` stands for one special token."""
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        parts = text.split("<s>") if parses_special else [text]
        ids = [token_id for part in parts for token_id in (SPECIAL_ID, *part.encode())]
        return self.prepare_ids(ids[1:], param)

    def prepare_ids(self, token_ids: Sequence[int], param: str = "input_ids") -> PreparedPrompt:
        if self.max_context is not None and len(token_ids) > self.max_context:
            raise context_length_error(len(token_ids), self.max_context, param)
        return PreparedPrompt(np.array(token_ids, dtype=np.int32), param=param)

    def build_request(
        self, request_id: str, prompt: PreparedPrompt, params: GenerationParams, *, now: float
    ) -> GenerationRequest:
        self.params.append(params)
        sampling = SamplingParams(
            seed=self.default_seed if params.seed is None else params.seed,
            top_logprobs=params.top_logprobs,
        )
        deadline_s = None if params.timeout_s is None else now + params.timeout_s
        max_tokens = 1000 if params.max_tokens is None else params.max_tokens
        return GenerationRequest(
            request_id,
            prompt,
            sampling,
            NoSession(),
            max_tokens,
            deadline_s=deadline_s,
            cache=params.cache,
            scoring=_usable_scoring(prompt, params.scoring),
        )

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == SPECIAL_ID:
            return b"<s>"
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class FakeHandle:
    """`is_released` once the consumer has left; `has_ended` once a terminal event was taken."""

    def __init__(self, request: GenerationRequest, events: AsyncIterator[Event]) -> None:
        self.request = request
        self.is_released = False
        self.is_cancelled = False
        self.has_ended = False
        self._events = events
        self._ending: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

    def end_with(self, error: NInferError) -> None:
        """The engine ends the request from outside."""
        if not self._ending.done():
            self._ending.set_result(Failed(error, usage_of(self.request)))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self.has_ended:
            event = await self._next()
            if event is None:
                return
            self.has_ended = isinstance(event, Finished | Failed)
            yield event

    async def _next(self) -> Event | None:
        taking = asyncio.ensure_future(anext(self._events, None))
        try:
            await asyncio.wait((taking, self._ending), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else await self._ending
        finally:
            taking.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_cancelled = self.is_cancelled or not self.has_ended
        self.is_released = True


class FakeEngine:
    """Plays `script` for every request; `refusal` is raised by submit when set."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or say("Hello")
        self.handles: list[FakeHandle] = []
        self.refusal: Exception | None = None
        self.max_open: int | None = None
        self.health = EngineHealth.READY
        self.is_stuck = False
        self.is_admitting = True
        self.is_closed = False
        self.num_flushes = 0

    @property
    def max_context(self) -> int:
        return CARD.max_context

    @property
    def num_open(self) -> int:
        return sum(not handle.is_released for handle in self.handles)

    def check(self, request: GenerationRequest) -> None:
        prompt = request.prompt
        if prompt.num_tokens + min(request.max_tokens, 1) > self.max_context:
            raise context_length_error(prompt.num_tokens, self.max_context, prompt.param)

    def submit(self, request: GenerationRequest) -> FakeHandle:
        if self.refusal is not None:
            raise self.refusal
        if not self.is_admitting:
            raise Unavailable("server_draining", "The engine takes no more requests.")
        self.check(request)
        if self.max_open is not None and self.num_open >= self.max_open:
            raise Unavailable("server_overloaded", "Every place is taken.", 0.01)
        handle = FakeHandle(request, self.script(request))
        self.handles.append(handle)
        return handle

    def status(self) -> EngineStatus:
        return EngineStatus(
            health=self.health,
            waiting=0,
            running=self.num_open,
            outstanding=self.num_open,
            max_concurrency=8,
            max_pending=32,
            pages_used=0,
            pages_total=8,
            prompt_tokens_total=0,
            completion_tokens_total=0,
            error="device lost" if self.health is EngineHealth.UNAVAILABLE else None,
            has_ended=self.health is EngineHealth.UNAVAILABLE and not self.is_stuck,
        )

    def flush_cache(self) -> None:
        self.num_flushes += 1

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def close_admission(self) -> None:
        self.is_admitting = False

    async def drain(self, timeout_s: float) -> bool:
        self.close_admission()
        end_s = self.now() + timeout_s
        while self.num_open and self.now() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        has_drained = self.num_open == 0
        self._end_all(Unavailable("server_draining", "The server is shutting down."))
        return has_drained

    async def aclose(self) -> None:
        self.close_admission()
        self.is_closed = True
        self._end_all(Unavailable("engine_unavailable", "The engine has stopped."))

    def _end_all(self, error: NInferError) -> None:
        for handle in self.handles:
            if not handle.is_released:
                handle.end_with(error)


def usage_of(request: GenerationRequest, completion_tokens: int = 0) -> Usage:
    return Usage(request.prompt.num_tokens, completion_tokens)


def tokens_of(text: str, request: GenerationRequest) -> tuple[GeneratedToken, ...]:
    """One token a byte; logprobs as many as were asked for, the first alternative at -inf."""
    count = request.sampling.top_logprobs
    top = tuple((65 + rank, float("-inf") if rank else -0.1) for rank in range(count or 0))
    logprobs = None if count is None else TokenLogprobs(-0.5, top)
    return tuple(GeneratedToken(byte, logprobs) for byte in text.encode())


def scores_of(request: GenerationRequest) -> tuple[PromptScores, ...]:
    """What was asked for of the prompt: token t has -t / 100, the alternatives are A, B, ..."""
    scoring = request.scoring
    if scoring is None:
        return ()
    scored = request.prompt.token_ids[scoring.first :]
    shape = (scored.size, scoring.num_top)
    tops = np.broadcast_to(np.arange(scoring.num_top), shape)
    own = (scored / -100).astype(np.float64)
    best = (-0.5 - tops).astype(np.float64)
    return (PromptScores(scoring.first, own, (65 + tops).astype(np.int32), best),)


def _usable_scoring(prompt: PreparedPrompt, scoring: PromptScoring | None) -> PromptScoring | None:
    return None if scoring is None or scoring.first >= prompt.num_tokens else scoring


def delta_of(text: str, request: GenerationRequest, channel: Channel = "content") -> OutputDelta:
    return OutputDelta(channel, text, tokens_of(text, request))


def say(
    *pieces: str,
    reasoning: Sequence[str] = (),
    finish: Finish = AT_STOP_TOKEN,
) -> Script:
    """Think `reasoning`, then say `pieces`, then finish; the last piece comes with the finish."""

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        yield Admitted(usage_of(request))
        for part in scores_of(request):
            yield Progress((), usage_of(request), (part,))
        count = thought = 0
        for piece in reasoning:
            count += len(piece.encode())
            thought = count
            yield Progress(
                (delta_of(piece, request, "reasoning"),),
                Usage(request.prompt.num_tokens, count, thought),
            )
        for piece in pieces[:-1]:
            await asyncio.sleep(0)
            count += len(piece.encode())
            yield Progress(
                (delta_of(piece, request),), Usage(request.prompt.num_tokens, count, thought)
            )
        last = tuple(delta_of(piece, request) for piece in pieces[-1:])
        count += sum(len(delta.tokens) for delta in last) + 1
        yield Finished(finish, last, Usage(request.prompt.num_tokens, count, thought), TIMINGS)

    return script


def fail(error: NInferError, *pieces: str, is_admitted: bool = True) -> Script:
    """Say `pieces`, then fail."""

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        if is_admitted:
            yield Admitted(usage_of(request))
        for piece in pieces:
            yield Progress((delta_of(piece, request),), usage_of(request, 1))
        yield Failed(error, usage_of(request))

    return script


def hold(gate: asyncio.Event, *pieces: str, is_admitted: bool = True) -> Script:
    """Be admitted (or not), say `pieces`, wait for the gate, then finish with " done"."""

    async def script(request: GenerationRequest) -> AsyncIterator[Event]:
        if is_admitted:
            yield Admitted(usage_of(request))
        for piece in pieces:
            yield Progress((delta_of(piece, request),), usage_of(request, 1))
        await gate.wait()
        if not is_admitted:
            yield Admitted(usage_of(request))
        delta = delta_of(" done", request)
        yield Finished(AT_STOP_TOKEN, (delta,), usage_of(request, 6), TIMINGS)

    return script


def bad_prompt() -> RequestError:
    return RequestError("invalid_template", "The template refused the messages.", "messages")
