"""The spellings in which protocols name pictures and videos."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields
from ninfer.gateway.media.references import MEDIA_TYPES, MediaReference, parse_media_part

PART = "messages[2].content[0]"
IMAGE_URL = ("image", "image_url.url")


def parse(part: dict[str, Any]) -> MediaReference:
    return parse_media_part(Fields(part, PART))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": "U", "detail": "low"}}, IMAGE_URL),
        ({"type": "image_url", "image_url": "U"}, ("image", "image_url")),
        ({"type": "input_image", "image_url": "U", "detail": "?"}, ("image", "image_url")),
        ({"type": "image", "image": "U"}, ("image", "image")),
        ({"type": "image", "source": {"type": "url", "url": "U"}}, ("image", "source.url")),
        ({"type": "video_url", "video_url": {"url": "U"}}, ("video", "video_url.url")),
        ({"type": "video", "video": "U"}, ("video", "video")),
    ],
)
def test_urls(part: dict[str, Any], expected: tuple[str, str]) -> None:
    assert part["type"] in MEDIA_TYPES
    kind, path = expected
    reference = parse(part)
    assert (reference.kind, reference.text, reference.is_base64) == (kind, "U", False)
    assert reference.path == f"{PART}.{path}"


def test_bare_base64() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    expected = MediaReference("image", f"{PART}.source.data", "AAAA", is_base64=True, part=PART)
    assert parse({"type": "image", "source": source}) == expected


@pytest.mark.parametrize(
    ("part", "code", "path"),
    [
        ({"type": "image_url"}, "missing_required_parameter", "image_url"),
        ({"type": "image_url", "image_url": {}}, "missing_required_parameter", "image_url.url"),
        ({"type": "image_url", "image_url": 5}, "invalid_type", "image_url"),
        ({"type": "image_url", "image_url": {"url": []}}, "invalid_type", "image_url.url"),
        ({"type": "input_image", "file_id": "f"}, "unsupported_value", "file_id"),
        ({"type": "image", "source": {"type": "file"}}, "unsupported_value", "source"),
        ({"type": "image", "source": {"type": "x"}}, "invalid_value", "source.type"),
        ({"type": "image", "source": {}}, "invalid_value", "source.type"),
        ({"type": "image", "source": "U"}, "invalid_type", "source"),
        ({"type": "image", "source": {"type": "url"}}, "missing_required_parameter", "source.url"),
    ],
)
def test_errors_name_the_field(part: dict[str, Any], code: str, path: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse(part)
    assert (raised.value.code, raised.value.param) == (code, f"{PART}.{path}")
