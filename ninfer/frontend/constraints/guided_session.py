"""GuidedSession: an output session whose tokens a Guide restricts.

It adds nothing to what the inner session makes of the tokens, but ends the answer when its grammar
is complete, and keeps the guide in step: a preview names the guide's successor, commit adopts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ninfer.contract.errors import InvariantError
from ninfer.contract.generation import FinishReason, OutputDelta, OutputPreview, OutputSession
from ninfer.contract.masks import TokenMask
from ninfer.contract.sampling import GeneratedToken
from ninfer.frontend.constraints.guide import Guide, GuideState, NotAllowed
from ninfer.frontend.constraints.mask_ahead import MaskAhead


class ThinkingSession(OutputSession, Protocol):
    """An output session that says where its thought ends."""

    def thinks_after(self, preview: OutputPreview) -> bool:
        """Whether what comes behind a preview belongs to a thought."""


class _State(NamedTuple):
    inner: OutputPreview
    guide: GuideState
    before: GuideState


class GuidedSession:
    """Implements contract OutputSession."""

    def __init__(self, inner: ThinkingSession, guide: Guide) -> None:
        self._inner = inner
        self._guide = guide

    @property
    def reasoning_tokens(self) -> int:
        return self._inner.reasoning_tokens

    @property
    def broken_calls(self) -> int:
        return self._inner.broken_calls

    def preview(
        self, tokens: Sequence[GeneratedToken], limit: FinishReason | None
    ) -> OutputPreview:
        """What `tokens` would mean; they end where the grammar does."""
        before = guide = self._guide.state
        preview = None
        for count in range(1, len(tokens) + 1):
            taken = tokens[:count]
            preview = self._inner.preview(taken, limit if count == len(tokens) else None)
            thinks = self._inner.thinks_after(preview)
            guide = self._after(guide, tokens[count - 1].token_id, thinks=thinks)
            if guide.is_complete and preview.finish is None:
                preview = self._inner.preview(taken, FinishReason.STOP_TOKEN)
            if preview.finish is not None:
                break
        if preview is None:
            raise InvariantError("an output preview needs at least one token")
        state = _State(preview, guide, before)
        return OutputPreview(preview.accepted, preview.finish, preview.deltas, state)

    def _after(self, guide: GuideState, token_id: int, *, thinks: bool) -> GuideState:
        try:
            return self._guide.after(guide, token_id, thinks=thinks)
        except NotAllowed:
            if self._guide.has_failed():
                raise self._guide.failure() from None
            raise

    def goes_on_after(self, token: GeneratedToken) -> bool:
        """False wherever the next token may be restricted: it is not known before the commit."""
        return self._guide.stays_free_after(token.token_id) and self._inner.goes_on_after(token)

    def masks_behind(self, token_ids: Sequence[int]) -> Sequence[TokenMask]:
        """As far as the grammar takes the tokens and leaves a choice behind them."""
        masks: list[TokenMask] = []
        guide, tokens = self._guide.state, list[GeneratedToken]()
        for token_id in token_ids:
            tokens.append(GeneratedToken(token_id))
            preview = self._inner.preview(tokens, None)
            if preview.finish is not None:
                break
            try:
                guide = self._guide.after(guide, token_id, thinks=self._inner.thinks_after(preview))
            except NotAllowed:
                break
            if guide.is_complete or self._guide.forced_at(guide):
                break
            masks.append(MaskAhead(self._guide, guide))
        return masks

    def commit(self, preview: OutputPreview) -> None:
        """Adopt a preview made from the present state; InvariantError for any other."""
        state: _State = preview.state
        if state.before is not self._guide.state:
            raise InvariantError("the output preview was not made from the present state")
        self._inner.commit(state.inner)
        self._guide.commit(state.guide)

    def flush(self) -> tuple[OutputDelta, ...]:
        return self._inner.flush()
