"""Format and size from the first bytes, compared with what Pillow shows."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from ninfer.gateway.media.exif import swaps_sides
from ninfer.gateway.media.image_header import (
    ImageHeaderError,
    read_image_header,
    sniff_image,
)
from tests.helpers.pictures import picture, png_chunk, png_header

KINDS = ("png", "jpeg", "webp", "gif", "bmp")
SIZES = ((1, 1), (24, 16), (27, 257), (300, 2))


def shown_size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        shown = ImageOps.exif_transpose(image)
        assert shown is not None
        return shown.size


def read_size(data: bytes) -> tuple[int, int]:
    header = read_image_header(data)
    assert header is not None
    return header.width, header.height


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_size_is_the_one_that_is_shown(kind: str, size: tuple[int, int]) -> None:
    data = picture(kind, *size)
    header = read_image_header(data)
    assert header is not None
    assert (header.format, header.width, header.height) == (kind, *size)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_orientation_exchanges_the_sides(kind: str, orientation: int) -> None:
    data = picture(kind, 24, 16, orientation=orientation)
    assert read_size(data) == shown_size(data)
    assert read_size(data) == ((24, 16) if orientation < 5 else (16, 24))


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}])
def test_both_kinds_of_webp(options: dict[str, bool]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (301, 17)).save(file, "webp", **options)
    assert read_size(file.getvalue()) == (301, 17)


def test_progressive_jpeg_with_a_comment_and_filling() -> None:
    file = io.BytesIO()
    Image.new("L", (40, 30)).save(file, "jpeg", progressive=True, comment=b"\xff\xc0 no frame")
    data = file.getvalue()
    assert read_size(data) == (40, 30)
    assert read_size(data[:2] + b"\xff\xff\xff" + data[2:]) == (40, 30)


def test_picture_upside_down_in_memory() -> None:
    header = b"BM" + struct.pack("<IHHIIiiHH", 54, 0, 0, 54, 40, 12, -7, 1, 24)
    assert read_size(header) == (12, 7)
    old = b"BM" + struct.pack("<IHHIIHHHH", 26, 0, 0, 26, 12, 9, 5, 1, 24)
    assert read_size(old) == (9, 5)


def test_huge_announcement_costs_nothing() -> None:
    assert read_size(png_header(2**31 - 1, 2**31 - 1)) == (2**31 - 1, 2**31 - 1)


@pytest.mark.parametrize(
    "data",
    [
        png_header(0, 5),
        png_header(5, 5)[:20],
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IDAT", b"1234567890abc"),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xe0",
        b"\xff\xd8\xff\xda\x00\x02",
        b"GIF89a\x01",
        b"GIF89a\x00\x00\x01\x00",
        b"BM" + bytes(60),
        b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(20),
        b"RIFF\x00\x00\x00\x00WEBPVP8L" + bytes(20),
        b"RIFF\x00\x00\x00\x00WEBPVP8X" + bytes(4),
        b"RIFF\x00\x00\x00\x00WEBPANIM" + bytes(20),
    ],
)
def test_damaged_headers_are_errors(data: bytes) -> None:
    with pytest.raises(ImageHeaderError):
        read_image_header(data)


def test_files_made_to_be_slow_are_refused() -> None:
    with pytest.raises(ImageHeaderError, match="too many"):
        read_image_header(png_header(5, 5) + png_chunk(b"tEXt", b"") * 110_000)
    with pytest.raises(ImageHeaderError, match="too many"):
        read_image_header(b"\xff\xd8" + b"\xff" * 200_000)


@pytest.mark.parametrize("data", [b"", b"%PDF-1.7", b"<svg/>", b"RIFF\0\0\0\0WAVE", b"II*\0\0\0"])
def test_other_files_are_no_pictures(data: bytes) -> None:
    assert sniff_image(data) is None
    assert read_image_header(data) is None


@given(
    start=st.sampled_from(
        [picture(kind, 24, 16, orientation=6) for kind in ("jpeg", "png", "webp")]
    ),
    cut=st.integers(0, 400),
    noise=st.binary(max_size=40),
)
def test_damage_ends_in_a_size_or_its_error(start: bytes, cut: int, noise: bytes) -> None:
    try:
        header = read_image_header(start[:cut] + noise)
    except ImageHeaderError:
        return
    assert header is None or header.width >= 1 <= header.height


@given(st.binary(max_size=80))
def test_damaged_notes_turn_nothing_but_never_fail(noise: bytes) -> None:
    assert swaps_sides(b"Exif\0\0II*\0" + noise) in (True, False)
