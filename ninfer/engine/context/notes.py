"""Notes: what is kept beside a checkpoint on disk, so that another process knows what it is.

The salt is kept as its digest. A note that cannot be read makes the checkpoint useless, no more.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ninfer.contract.arrays import IntArray
from ninfer.contract.cache import CheckpointKind
from ninfer.contract.units import PAGE_TOKENS
from ninfer.engine.context.identity import RECORD_BYTES, Identity, expanded
from ninfer.engine.context.records import Entry

_ROOT_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Note:
    """`identity` has exactly the checkpoint's tokens."""

    identity: Identity
    kind: CheckpointKind
    is_shared: bool


def note_of(entry: Entry) -> dict[str, object]:
    """For JSON."""
    keys, node = [entry.tail], entry.node
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    keys.reverse()
    is_plain = sum(map(len, keys)) == 4 * entry.frontier
    tokens = b"".join(keys) if is_plain else _records(keys, entry.frontier).tobytes()
    return {
        "salt": node.key.hex(),
        "kind": entry.kind.value,
        "shared": entry.is_shared,
        "plain": is_plain,
        "tokens": base64.b64encode(tokens).decode(),
    }


def read_note(note: Mapping[str, object], frontier: int) -> Note | None:
    """None for what `note_of` did not write of so many tokens."""
    try:
        root = bytes.fromhex(str(note["salt"]))
        kind = CheckpointKind(note["kind"])
        tokens = base64.b64decode(str(note["tokens"]), validate=True)
        is_plain, is_shared = note["plain"], note["shared"]
    except (KeyError, ValueError, binascii.Error):
        return None
    width = 4 if is_plain else RECORD_BYTES
    if len(root) != _ROOT_BYTES or frontier < 1 or len(tokens) != width * frontier:
        return None
    words: IntArray = np.frombuffer(tokens, np.int32)
    records = None if is_plain else words.reshape(frontier, -1)
    ids = words if records is None else records[:, 0]
    return Note(Identity(root, ids, records, 0), kind, bool(is_shared))


def _records(keys: list[bytes], frontier: int) -> IntArray:
    starts = range(0, frontier, PAGE_TOKENS)
    parts = [
        expanded(key, start, min(PAGE_TOKENS, frontier - start))
        for key, start in zip(keys, starts, strict=False)
    ]
    return np.concatenate(parts)
