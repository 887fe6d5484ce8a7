"""RandomRequests: requests of every kind the engine serves, from a seed.

Prompts share beginnings, go on from answers, come several times at once (siblings), want their
scores told, or have answers of which a mask allows little.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ninfer.contract.cache import CacheMode, CacheRequest, CheckpointKind
from ninfer.contract.generation import GenerationRequest
from ninfer.contract.prompt import PreparedPrompt, PromptFrontier
from ninfer.contract.sampling import PromptScoring, SamplingParams
from tests.helpers.engine_rig import VOCAB_SIZE, EngineRig
from tests.helpers.masked_session import MaskedSession, MaskRule
from tests.helpers.scripted_session import ScriptedSession

MAX_CONTEXT = 200


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the requests of one submission have in common."""

    prompt: PreparedPrompt
    cache: CacheRequest
    is_talker: bool


class RandomRequests:
    """Contexts of at most MAX_CONTEXT tokens. With `are_talkers` most prompts are short and answers
    long, so that memory runs out while answers grow."""

    def __init__(self, rig: EngineRig, source: random.Random, *, are_talkers: bool) -> None:
        self._rig = rig
        self._random = source
        self._are_talkers = are_talkers
        self._families = [self._tokens(MAX_CONTEXT) for _ in range(3)]

    def next(self, history: Sequence[int] | None) -> list[GenerationRequest]:
        """One request, or several with one prompt. `history` is what may be gone on from."""
        source = self._random
        num_requests = source.randint(2, 4) if source.random() < 0.08 else 1
        shape = _Shape(
            prompt=self._prompt(history, has_tail=num_requests > 1),
            cache=CacheRequest(
                mode=CacheMode.OFF if source.random() < 0.1 else CacheMode.DEFAULT,
                session_key=source.choice((None, "a", "b")),
            ),
            is_talker=self._are_talkers and source.random() < 0.8,
        )
        return [self._request(shape) for _ in range(num_requests)]

    def _request(self, shape: _Shape) -> GenerationRequest:
        source = self._random
        session = self._session(is_talker=shape.is_talker)
        deadline_s = self._rig.clock.now_s + source.uniform(0.1, 3.0)
        lengths = (0, 3, 20, 80, 200)
        return self._rig.request(
            prompt=shape.prompt,
            max_tokens=source.randint(70, 140) if shape.is_talker else source.choice(lengths),
            session=session,
            sampling=self._sampling(),
            deadline_s=deadline_s if source.random() < 0.1 else None,
            queue_timeout_s=source.choice((0.0, 0.5, 2.0)) if source.random() < 0.1 else None,
            cache=shape.cache,
            scoring=self._scoring(shape.prompt.num_tokens),
            mask=session if isinstance(session, MaskedSession) else None,
        )

    def _sampling(self) -> SamplingParams:
        source = self._random
        if source.random() < 0.7:
            return SamplingParams()
        return SamplingParams(temperature=1.0, seed=source.getrandbits(30), presence_penalty=0.5)

    def _scoring(self, num_tokens: int) -> PromptScoring | None:
        source = self._random
        if num_tokens < 2 or source.random() > 0.06:
            return None
        return PromptScoring(source.randrange(1, num_tokens), source.choice((0, 2)))

    def _session(self, *, is_talker: bool) -> ScriptedSession:
        source = self._random
        finish_after = None if is_talker else source.choice((None, None, 2, 90))
        hold_back = source.choice((0, 0, 2))
        if source.random() > 0.15:
            return ScriptedSession(finish_after=finish_after, hold_back=hold_back)
        begin = source.choice((0, 0, 1, 40))
        end = begin + source.choice((1, 5, 20, 100))
        rule = MaskRule(
            begin=begin,
            end=end,
            width=source.choice((1, 1, 3)),
            vocab_size=VOCAB_SIZE,
            dead_end=source.randrange(end + 1) if source.random() < 0.2 else None,
        )
        return MaskedSession(rule, finish_after=finish_after, hold_back=hold_back)

    def _prompt(self, history: Sequence[int] | None, *, has_tail: bool) -> PreparedPrompt:
        """Mostly the beginning of a family or of what was said before, with an end of its own.
        `has_tail`: a checkpoint in front of its last token is wanted."""
        source, is_short = self._random, self._are_talkers
        base: Sequence[int] = source.choice(self._families)
        if history is not None and source.random() < 0.4:
            base = history
        lengths = (0, 40, 58, 61) if is_short else (0, 40, 64, 100, 150)
        num_shared = min(len(base), source.choice(lengths))
        rest = self._tokens(source.choice((1, 3, 8) if is_short else (1, 5, 30, 90)))
        tokens = (*base[:num_shared], *rest)[: MAX_CONTEXT - source.choice((1, 1, 40))]
        numbers = range(1, len(tokens) + 1)
        places = {*source.sample(numbers, min(len(tokens), 2)), num_shared}
        kinds = dict.fromkeys(places, CheckpointKind.STABLE_PREFIX)
        if has_tail:
            kinds[len(tokens) - 1] = CheckpointKind.PROMPT_TAIL
        frontiers = tuple(
            PromptFrontier(place, kinds[place])
            for place in sorted(kinds)
            if 1 <= place < len(tokens)
        )
        return PreparedPrompt(np.array(tokens, dtype=np.int32), frontiers=frontiers)

    def _tokens(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens))
