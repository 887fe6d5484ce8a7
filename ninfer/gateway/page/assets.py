"""The files of the page, read from the package once, and how each is served."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

INDEX: Final = "index.html"
_FOLDER: Final = "files"
_CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_TAG_LENGTH: Final = 20


@dataclass(frozen=True, slots=True)
class Asset:
    """`etag` as it stands in the header, quotes and all."""

    body: bytes
    content_type: str
    etag: str


def load_assets() -> Mapping[str, Asset]:
    """Every file by its name. Blocks: it reads from the package, which may be an archive."""
    folder = resources.files(__package__).joinpath(_FOLDER)
    return {
        item.name: _asset(item.read_bytes(), kind)
        for item in folder.iterdir()
        if (kind := _CONTENT_TYPES.get(item.name[item.name.rfind(".") :])) is not None
    }


def _asset(body: bytes, content_type: str) -> Asset:
    tag = hashlib.sha256(body).hexdigest()[:_TAG_LENGTH]
    return Asset(body, content_type, f'"{tag}"')
