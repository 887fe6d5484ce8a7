"""RowDrafter: drafts from the text of a request itself, as long as they pay."""

from __future__ import annotations

from ninfer.contract.generation import GenerationRequest
from ninfer.engine.speculation.draft_length import DraftLength
from ninfer.engine.speculation.ngram import NgramDrafter


class RowDrafter:
    """Implements Drafter."""

    def __init__(self, request: GenerationRequest, max_tokens: int) -> None:
        self._ngrams = NgramDrafter()
        self._ngrams.extend(request.prompt.token_ids.tolist())
        self._length = DraftLength(max_tokens)
        self._num_seen = 0

    def draft(self, accepted: list[int], num_rows: int, room: int) -> tuple[int, ...]:
        self._ngrams.extend(accepted[self._num_seen :])
        self._num_seen = len(accepted)
        if room < 1:
            return ()
        return self._ngrams.draft(min(room, self._length.next(num_rows)))

    def note(self, num_drafted: int, num_right: int) -> None:
        self._length.note(num_drafted, num_right)
