"""ScriptedSession: an output session whose text, end and failures a test decides.

A token's text is `<id>`. The session is strict: a preview that is committed must have been made
from the present state, and nothing may be previewed after the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ninfer.contract.generation import (
    Channel,
    Finish,
    FinishReason,
    OutputDelta,
    OutputPreview,
)
from ninfer.contract.masks import TokenMask
from ninfer.contract.sampling import GeneratedToken


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class _State:
    shown: tuple[GeneratedToken, ...] = ()
    held: tuple[GeneratedToken, ...] = ()
    is_finished: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.shown) + len(self.held)


class ScriptedSession:
    """Implements the contract's OutputSession.

    finish_after      a natural stop (STOP_TOKEN) at this many tokens
    hold_back         so many newest tokens stay hidden until more come or the request ends
    num_reasoning     the first tokens are reasoning
    on_call           called with the method's name before anything happens; may raise
    """

    def __init__(
        self,
        *,
        finish_after: int | None = None,
        hold_back: int = 0,
        num_reasoning: int = 0,
        on_call: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._finish_after = finish_after
        self._hold_back = hold_back
        self._num_reasoning = num_reasoning
        self._on_call = on_call
        self._state = _State()

    @property
    def num_committed(self) -> int:
        return self._state.num_tokens

    @property
    def committed_ids(self) -> list[int]:
        return [token.token_id for token in (*self._state.shown, *self._state.held)]

    @property
    def reasoning_tokens(self) -> int:
        self._on_call("reasoning_tokens")
        return min(self._num_reasoning, self._state.num_tokens)

    @property
    def broken_calls(self) -> int:
        return self._state.num_tokens // 2

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        self._on_call("preview")
        if not tokens or self._state.is_finished:
            raise AssertionError("previewed without tokens, or after the end")
        taken = tokens[: self._num_left(len(tokens))]
        held = (*self._state.held, *taken)
        is_cut = len(taken) < len(tokens)
        num_tokens = self._state.num_tokens + len(taken)
        finish = self._finish_of(taken[-1], num_tokens, None if is_cut else limit)
        keep = 0 if finish is not None else min(self._hold_back, len(held))
        visible, held = held[: len(held) - keep], held[len(held) - keep :]
        state = _State((*self._state.shown, *visible), held, finish is not None)
        return OutputPreview(
            accepted=len(taken),
            finish=finish,
            deltas=self._deltas(visible),
            state=(self._state, state),
        )

    def goes_on_after(self, token: GeneratedToken) -> bool:
        self._on_call("goes_on_after")
        return self._state.num_tokens + 1 != self._finish_after

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        """Ends are a surprise."""
        self._on_call("masks_behind")
        return (None,) * len(token_ids)

    def commit(self, preview: OutputPreview) -> None:
        self._on_call("commit")
        before, after = preview.state
        if before is not self._state:
            raise AssertionError("the preview was made from another state")
        self._state = after

    def flush(self) -> tuple[OutputDelta, ...]:
        self._on_call("flush")
        deltas = self._deltas(self._state.held)
        self._state = _State((*self._state.shown, *self._state.held), (), True)
        return deltas

    def _num_left(self, num_tokens: int) -> int:
        """How many of so many tokens come before the natural stop, the last one included."""
        if self._finish_after is None:
            return num_tokens
        return min(num_tokens, self._finish_after - self._state.num_tokens)

    def _finish_of(
        self, last: GeneratedToken, num_tokens: int, limit: FinishReason | None
    ) -> Finish | None:
        if num_tokens == self._finish_after:
            return Finish(FinishReason.STOP_TOKEN, last.token_id)
        return None if limit is None else Finish(limit)

    def _deltas(self, tokens: Sequence[GeneratedToken]) -> tuple[OutputDelta, ...]:
        num_shown = len(self._state.shown)
        num_thought = max(0, self._num_reasoning - num_shown)
        parts: list[tuple[Channel, Sequence[GeneratedToken]]] = [
            ("reasoning", tokens[:num_thought]),
            ("content", tokens[num_thought:]),
        ]
        return tuple(
            OutputDelta(channel, text_of([token.token_id for token in part]), tuple(part))
            for channel, part in parts
            if part
        )
