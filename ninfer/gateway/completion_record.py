"""What a completion's choices show: the prompt, if it is echoed, and the output, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ninfer.contract.chat import Frontend
from ninfer.contract.generation import Admitted, Progress
from ninfer.contract.prompt import PreparedPrompt
from ninfer.gateway.choices import LiveEvent
from ninfer.gateway.completion_logprobs import (
    EchoedPrompt,
    GeneratedLogprobs,
    LogprobLists,
    TokenNames,
)
from ninfer.gateway.completion_request import CompletionRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text with what is known of its tokens; None when that was not asked for."""

    text: str
    logprobs: LogprobLists | None = None


def echoed_text(prompt: PreparedPrompt, given: str | tuple[int, ...], frontend: Frontend) -> str:
    """A prompt as it was sent; the text of its tokens when these were sent."""
    if isinstance(given, str):
        return given
    data = b"".join(map(frontend.token_bytes, prompt.token_ids.tolist()))
    return data.decode("utf-8", "replace")


class PromptRecord:
    """The echo of one prompt: nothing, its text, or the text of its tokens as they are scored.

    text   to echo when there are no log probabilities. With them the tokens decide: they are what
           the model has read, should the tokenizer have normalised what was sent.
    """

    def __init__(
        self,
        request: CompletionRequest,
        prompt: PreparedPrompt,
        text: str,
        names: TokenNames,
    ) -> None:
        self._text = text
        self._scored: EchoedPrompt | None = None
        if request.echo and request.num_top is not None:
            self._scored = EchoedPrompt(prompt.token_ids.tolist(), names)
        self.num_characters = 0

    def opening(self) -> Iterator[Piece]:
        """What can be shown before anything has run."""
        if self._scored is not None:
            yield self._count(Piece(*self._scored.beginning()))
        elif self._text:
            yield self._count(Piece(self._text))

    def read(self, event: LiveEvent) -> Iterator[Piece]:
        if isinstance(event, Progress) and self._scored is not None:
            for scores in event.prompt_scores:
                yield self._count(Piece(*self._scored.scored(scores)))

    def _count(self, piece: Piece) -> Piece:
        self.num_characters += len(piece.text)
        return piece


class OutputRecord:
    """The output of one choice; places of its tokens count from its beginning."""

    def __init__(self, request: CompletionRequest, names: TokenNames) -> None:
        wants_logprobs = request.num_top is not None
        self._logprobs = GeneratedLogprobs(names) if wants_logprobs else None

    def read(self, event: LiveEvent) -> Iterator[Piece]:
        for delta in () if isinstance(event, Admitted) else event.deltas:
            logprobs = self._logprobs
            lists = None if logprobs is None else logprobs.read(delta.text, delta.tokens)
            yield Piece(delta.text, lists)


def moved(piece: Piece, num_before: int) -> Piece:
    """The same with so many characters in front of it."""
    if piece.logprobs is None or not num_before:
        return piece
    lists = LogprobLists()
    lists.extend(piece.logprobs, num_before)
    return Piece(piece.text, lists)


def joined(prompt: Iterable[Piece], output: Iterable[Piece], *, has_logprobs: bool) -> Piece:
    """The whole of a choice."""
    texts, lists, num_before = [], LogprobLists(), 0
    for piece in prompt:
        texts.append(piece.text)
        num_before += len(piece.text)
        if piece.logprobs is not None:
            lists.extend(piece.logprobs)
    for piece in output:
        texts.append(piece.text)
        if piece.logprobs is not None:
            lists.extend(piece.logprobs, num_before)
    return Piece("".join(texts), lists if has_logprobs else None)
