"""Signatures of thinking blocks: what a client sends back with a thought.

A conversation is its client's own, so nothing is verified: the hosted service's signatures, or
none, are taken as well. A thought that was not shown travels inside its signature, so that the next
turn of the conversation still has it.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

from ninfer.gateway.responses.sealed_text import seal, unseal

_SHOWN: Final = "ninfer."
_DIGEST_BYTES: Final = 18


def signature_of(thought: str, *, is_shown: bool) -> str:
    """Never empty. `is_shown`: the client has the text itself."""
    if not is_shown:
        return seal(thought)
    digest = hashlib.sha256(thought.encode()).digest()
    return _SHOWN + base64.b64encode(digest[:_DIGEST_BYTES]).decode("ascii")


def thought_in(signature: str) -> str:
    """The thought that a signature carries; "" for one that carries none."""
    return unseal(signature) or ""
