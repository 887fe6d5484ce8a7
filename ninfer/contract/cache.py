"""The context cache's vocabulary: what is kept and why, where it lies, and why it was missed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType

CheckpointId = NewType("CheckpointId", int)
"""Names a checkpoint of one Program; never used twice."""

CHUNK_GRANULE: Final = 128
"""Prefill chunks may be cut at multiples of this many tokens from the prompt's start without
changing a bit on the CPU executor."""


class CheckpointKind(Enum):
    """Why a checkpoint was made; see docs/context-cache.md."""

    STABLE_PREFIX = "stable_prefix"
    TURN_CLOSURE = "turn_closure"
    RESPONSE_REPLAY = "response_replay"
    PROMPT_TAIL = "prompt_tail"
    LONG_ANCHOR = "long_anchor"
    SESSION_END = "session_end"


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class CacheMode(Enum):
    """off: neither reads nor leaves anything in the cache."""

    DEFAULT = "default"
    OFF = "off"


class MissReason(Enum):
    """Why tokens that could have been reused were not."""

    DISABLED = "disabled"
    NO_ENTRY = "no_entry"
    """Nothing with this beginning was ever seen."""
    TOO_SHORT = "too_short"
    """Nothing of this prompt is long enough to keep."""
    NO_STATE_AT_FRONTIER = "no_state_at_frontier"
    """Tokens match further, but no StateImage lies at a frontier within the match."""
    EVICTED = "evicted"
    TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
    """The session's last tokens differ from this prompt inside an earlier answer."""
    HISTORY_EDITED = "history_edited"
    """They differ elsewhere."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """The log probabilities of these tokens were asked for, so they were computed again."""
    NOT_RESTORED = "not_restored"
    """A lower tier had it, but there was no room or its bytes were damaged."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What one request asks of the cache.

    session_key   names the conversation (prompt_cache_key, session header), or None
    salt          part of every identity; keeps tenants apart
    """

    mode: CacheMode = CacheMode.DEFAULT
    session_key: str | None = None
    salt: str = ""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request got from the cache.

    num_tokens         prompt tokens that were not computed again
    kind, tier         of the checkpoint they came from, None without one
    miss               why not more was reused; None when all that is reusable was
    first_difference   position of the first token that differs from the best candidate, or None
    """

    num_tokens: int = 0
    kind: CheckpointKind | None = None
    tier: Tier | None = None
    miss: MissReason | None = None
    first_difference: int | None = None


NO_CACHE_USE: Final = CacheUse()
