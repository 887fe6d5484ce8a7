"""philox: counter-based random words, a pure function of key and counter (Philox4x32-10).

    ten rounds of (c0, c1, c2, c3)
               -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))
    the key words grow by the Weyl constants between rounds

Shapes     counter: four words, the first two may be arrays [n] -> words [n, 4]
Dtypes     words are 32-bit values held in uint64
Units      key 64 bits: key word 0 is its low half
Effects    none; nothing is consumed, so order and batch cannot shift a draw
Tolerance  EXACT
Source     Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3; Random123 test vectors
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ninfer.ops.checks import fail

_OP = "philox"
_ROUNDS: Final = 10
_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_MASK: Final = 0xFFFFFFFF

Words: TypeAlias = NDArray[np.integer[Any]]


def words(key: int, counter: tuple[int | Words, int | Words, int, int]) -> NDArray[np.uint64]:
    """Four random words for each counter. `key` is taken modulo 2^64 (a negative seed is fine).

    At least one of the first two counter words is an array.
    """
    if not all(_is_word(word) for word in counter):
        fail(_OP, "a counter word is outside 32 bits")
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    mask, shift = np.uint64(_MASK), np.uint64(32)
    for index in range(_ROUNDS):
        k0 = np.uint64((key + index * _WEYL_0) & _MASK)
        k1 = np.uint64(((key >> 32) + index * _WEYL_1) & _MASK)
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
    return np.stack((c0, c1, c2, c3), axis=-1)


def token_uniforms(
    seed: int, position: int, token_ids: NDArray[np.integer[Any]], purpose: int
) -> NDArray[np.float64]:
    """[n] one number in (0, 1) for each token: lane `token & 3` of counter
    (position, token >> 2, purpose, 0), as (word + 0.5) * 2^-32."""
    blocks = token_ids >> 2
    first, span = int(blocks.min()), int(blocks.max() - blocks.min()) + 1
    if span < token_ids.size:
        # Most of a vocabulary: compute each block of four once.
        lanes = words(seed, (position, np.arange(first, first + span), purpose, 0))
        lanes = lanes[blocks - first, token_ids & 3]
    else:
        lanes = words(seed, (position, blocks, purpose, 0))
        lanes = lanes[np.arange(token_ids.size), token_ids & 3]
    uniforms: NDArray[np.float64] = (lanes.astype(np.float64) + 0.5) * 2.0**-32
    return uniforms


def _is_word(word: int | Words) -> bool:
    if isinstance(word, int):
        return 0 <= word <= _MASK
    return bool(word.min() >= 0 and word.max() <= _MASK)
