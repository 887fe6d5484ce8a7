"""RowDrafter: the drafts of one request, from its first decode step to its end."""

from __future__ import annotations

from ninfer.contract.arrays import IntArray
from ninfer.engine.speculation.draft_length import DraftLength
from ninfer.engine.speculation.ngram import NgramDrafter


class RowDrafter:
    """Knows the request's ledger: prompt and accepted tokens, which only grow."""

    def __init__(self, prompt_ids: IntArray, max_tokens: int) -> None:
        self._ngrams = NgramDrafter()
        self._ngrams.extend(prompt_ids.tolist())
        self._length = DraftLength(max_tokens)
        self._num_seen = 0

    def draft(self, accepted: list[int], num_rows: int, room: int) -> tuple[int, ...]:
        """What may follow `accepted`, at most `room` tokens, in a batch of `num_rows`."""
        self._ngrams.extend(accepted[self._num_seen :])
        self._num_seen = len(accepted)
        if room < 1:
            return ()
        return self._ngrams.draft(min(room, self._length.next(num_rows)))

    def note(self, num_drafted: int, num_right: int) -> None:
        """What became of a draft."""
        self._length.note(num_drafted, num_right)
