"""ChaosPolicy: a ContextPolicy that is legal in every call and sensible in none.

It keeps whatever it can, offers any true prefix or none, moves checkpoints between tiers for no
reason and frees them in random order. The worker must be right under every policy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ninfer.contract.cache import CacheUse, CheckpointId
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.program import (
    Amounts,
    CheckpointFacts,
    Program,
    SequenceHandle,
    Source,
    Transfer,
    TransferKind,
)
from ninfer.engine.context_protocol import SourceChoice, TransferPlan


@dataclass(frozen=True, slots=True)
class _Ticket:
    request: GenerationRequest
    prompt: tuple[int, ...]
    stops: tuple[int, ...]


class ChaosPolicy:
    """Implements the engine's ContextPolicy.

    may_store   the program has a disk tier
    calls       how often each call was made, for tests that want to know what they reached
    """

    def __init__(self, program: Program, seed: int, *, may_store: bool = False) -> None:
        self._program = program
        self._random = random.Random(seed)
        self._may_store = may_store
        self._entries: dict[CheckpointId, tuple[int, ...]] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._pins: dict[int, CheckpointId] = {}
        self._open: TransferPlan | None = None
        self.num_hits = 0
        self.num_moves = 0

    def arrive(self, ticket: int, request: GenerationRequest) -> None:
        assert ticket not in self._tickets
        prompt = tuple(request.prompt.token_ids.tolist())
        frontiers = [frontier.num_tokens for frontier in request.prompt.frontiers]
        stops = tuple(sorted(f for f in frontiers if self._random.random() < 0.8))
        self._tickets[ticket] = _Ticket(request, prompt, stops)

    def choose(self, ticket: int) -> SourceChoice:
        self._pins.pop(ticket, None)
        sources = [
            checkpoint
            for checkpoint, tokens in self._entries.items()
            if self._is_source(checkpoint, tokens, self._tickets[ticket])
        ]
        if not sources or self._random.random() < 0.1:
            return SourceChoice(None, CacheUse())
        checkpoint = self._random.choice(sources)
        facts = self._facts(checkpoint)
        self._pins[ticket] = checkpoint
        if not facts.is_on_device:
            kind = TransferKind.RESTORE if facts.is_on_host else TransferKind.FETCH
            return SourceChoice(None, CacheUse(), TransferPlan(kind, checkpoint))
        num_others = list(self._pins.values()).count(checkpoint) - 1
        consumes = not num_others and not facts.is_leased and self._random.random() < 0.3
        source = Source(checkpoint, facts.frontier, consumes)
        return SourceChoice(source, CacheUse(num_tokens=facts.frontier))

    def unpin(self, ticket: int) -> None:
        self._pins.pop(ticket, None)

    def bound(self, ticket: int, choice: SourceChoice) -> None:
        assert choice.move is None
        if choice.source is not None:
            assert self._pins.pop(ticket) == choice.source.checkpoint
            self.num_hits += 1
            if choice.source.consumes:
                del self._entries[choice.source.checkpoint]
        assert ticket not in self._pins

    def stops(self, ticket: int) -> tuple[int, ...]:
        return self._tickets[ticket].stops

    def reached(self, ticket: int, handle: SequenceHandle, frontier: int) -> None:
        known = self._tickets[ticket]
        assert frontier in known.stops
        assert self._program.frontier(handle) == frontier
        self._keep(self._program.capture(handle), known.prompt[:frontier])

    def finished(
        self, ticket: int, handle: SequenceHandle, accepted: tuple[int, ...], frontier: int
    ) -> bool:
        tokens = (*self._tickets[ticket].prompt, *accepted)
        # An answer that ends inside a round has the state before the round.
        assert 1 <= len(tokens) - frontier <= 1 + self._program.capacity.max_draft_tokens
        if self._random.random() < 0.3:
            return False
        if self._random.random() < 0.2:
            self._keep(self._program.capture(handle), tokens[:frontier])
            return False
        self._keep(self._program.pause(handle, keeps_state=True).checkpoint, tokens[:frontier])
        return True

    def left(self, ticket: int) -> None:
        del self._tickets[ticket]
        self._pins.pop(ticket, None)

    def clear_device(self) -> bool:
        return self.relieve(Amounts(pages=1))

    def relieve(self, need: Amounts) -> bool:
        assert max(need.pages, need.slots, need.host_blocks) > 0
        is_host = need.pages == need.slots == 0
        removable = [
            checkpoint
            for checkpoint in self._idle()
            if (
                self._facts(checkpoint).is_on_host
                if is_host
                else self._facts(checkpoint).is_on_device
            )
        ]
        if not removable:
            return False
        checkpoint = self._random.choice(removable)
        facts = self._facts(checkpoint)
        if is_host and (facts.is_on_device or facts.is_on_disk):
            self._program.drop_host(checkpoint)
        elif not is_host and (facts.is_on_host or facts.is_on_disk):
            self._program.drop_device(checkpoint)
        else:
            self._release(checkpoint)
        return True

    def reclaimable(self) -> Amounts:
        return self._program.reclaimable(self._idle())

    def next_transfer(self, *, is_idle: bool) -> TransferPlan | None:
        idle = self._idle()
        if not idle or self._random.random() < 0.5:
            return None
        checkpoint = self._random.choice(idle)
        facts = self._facts(checkpoint)
        kinds = []
        if facts.is_on_device and not facts.is_on_host:
            kinds.append(TransferKind.DEMOTE)
        if facts.is_on_host and not facts.is_on_device:
            kinds.append(TransferKind.RESTORE)
        if self._may_store and not facts.is_on_disk and (facts.is_on_device or facts.is_on_host):
            kinds.append(TransferKind.STORE)
        if facts.is_on_disk and not facts.is_on_host:
            kinds.append(TransferKind.FETCH)
        return TransferPlan(self._random.choice(kinds), checkpoint) if kinds else None

    def transferred(self, plan: TransferPlan, transfer: Transfer | None, *, is_ok: bool) -> None:
        assert transfer is not None or not is_ok
        self.num_moves += is_ok
        facts = self._facts(plan.checkpoint)
        assert not facts.is_leased
        for checkpoint in list(self._entries):
            found = self._facts(checkpoint)
            if not (found.is_on_device or found.is_on_host or found.is_on_disk):
                self._release(checkpoint)

    def note_rates(
        self, *, prefill_tokens_s: float | None = None, move_tokens_s: float | None = None
    ) -> None:
        assert all(rate is None or rate > 0.0 for rate in (prefill_tokens_s, move_tokens_s))

    def flush(self) -> None:
        for checkpoint in self._idle():
            self._release(checkpoint)

    def _keep(self, checkpoint: CheckpointId | None, tokens: tuple[int, ...]) -> None:
        if checkpoint is not None:
            assert self._facts(checkpoint).frontier == len(tokens)
            self._entries[checkpoint] = tokens

    def _is_source(
        self, checkpoint: CheckpointId, tokens: tuple[int, ...], ticket: _Ticket
    ) -> bool:
        facts, scoring = self._facts(checkpoint), ticket.request.scoring
        if facts.is_leased and not facts.is_on_device:
            return False
        limit = len(ticket.prompt) if scoring is None else scoring.first
        return len(tokens) < limit and ticket.prompt[: len(tokens)] == tokens

    def _facts(self, checkpoint: CheckpointId) -> CheckpointFacts:
        return self._program.checkpoint(checkpoint)

    def _idle(self) -> list[CheckpointId]:
        pinned = set(self._pins.values())
        return [
            checkpoint
            for checkpoint in self._entries
            if checkpoint not in pinned and not self._facts(checkpoint).is_leased
        ]

    def _release(self, checkpoint: CheckpointId) -> None:
        """Also one that was pinned: its bytes are lost."""
        self._program.release(checkpoint)
        del self._entries[checkpoint]
        for ticket in [t for t, pinned in self._pins.items() if pinned == checkpoint]:
            del self._pins[ticket]
