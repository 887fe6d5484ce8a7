"""How much media one request may bring, and how long fetching it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20
MEGAPIXEL: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Sizes are those of files as they arrive; pixels those that a header announces.

    max_request_bytes   of all items of a request together
    max_aspect_ratio    longer side by shorter side of a picture; this one is still accepted
    fetch_timeout_s     one remote item with all its redirects, from its start on
    fetches_at_once     of all requests together
    """

    max_items: int = 64
    max_item_bytes: int = 20 * MIB
    max_request_bytes: int = 128 * MIB
    max_item_pixels: int = 64 * MEGAPIXEL
    max_request_pixels: int = 200 * MEGAPIXEL
    max_aspect_ratio: int = 200
    max_redirects: int = 3
    fetch_timeout_s: float = 10.0
    fetches_at_once: int = 16
