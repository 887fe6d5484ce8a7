"""Requests whose masks force tokens, just those that the made-up model would draw anyway: so their
answers are the same as without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ninfer.contract.errors import NInferError, RequestError
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.sampling import GeneratedToken
from tests.helpers.engine_rig import solo_tokens
from tests.helpers.scripted_session import ScriptedSession


class BoundSession(ScriptedSession):
    """Never surely goes on: its next token may be restricted."""

    def goes_on_after(self, token: GeneratedToken) -> bool:
        return False


class ForcingMask:
    """Restricts nothing; forces `counts[n]` tokens once n are committed."""

    def __init__(self, session: ScriptedSession, counts: dict[int, int]) -> None:
        self._session = session
        self._counts = counts
        self.token_ids: list[int] = []

    @property
    def is_active(self) -> bool:
        return False

    def forced(self) -> tuple[int, ...]:
        place = self._session.num_committed
        return tuple(self.token_ids[place : place + self._counts.get(place, 0)])

    def fill(self, words: NDArray[np.uint32]) -> None:
        words[:] = 0xFFFFFFFF

    def failure(self) -> NInferError:
        return RequestError("constraint_dead_end", "nothing may come")


def forcing(
    request: GenerationRequest, session: ScriptedSession, counts: dict[int, int]
) -> GenerationRequest:
    """The request with forced tokens in its answer."""
    mask = ForcingMask(session, counts)
    mask.token_ids = solo_tokens(request, request.max_tokens)
    return replace(request, session=session, mask=mask)
