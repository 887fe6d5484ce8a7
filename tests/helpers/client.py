"""Client: one request of a random program, what it has seen and what was done to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ninfer.contract.generation import Failed, Finished, GenerationRequest, RequestHandle
from tests.helpers.engine_rig import Transcript


@dataclass(slots=True, eq=False)
class Client:
    """`reader` reads until the end or until it is cancelled, which is to leave."""

    request: GenerationRequest
    handle: RequestHandle
    submitted_s: float
    transcript: Transcript = field(default_factory=Transcript)
    reader: asyncio.Task[None] | None = None
    was_cancelled: bool = False
    has_left: bool = False

    @property
    def is_running(self) -> bool:
        events = self.transcript.events
        has_ended = bool(events) and isinstance(events[-1], Finished | Failed)
        return not has_ended and not self.has_left

    @property
    def history(self) -> list[int]:
        """All it said and heard so far."""
        return [*self.request.prompt.token_ids.tolist(), *self.transcript.token_ids]

    async def read(self) -> None:
        async with self.handle:
            async for event in self.handle:
                self.transcript.events.append(event)
