"""Compressed bodies: every encoding, stacked, cut, corrupted and unfolding beyond the limit."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import RequestError
from ninfer.gateway.content_encoding import decode_body, parse_encodings
from tests.helpers.compression import zstd_compress


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd": ("zstd", zstd_compress),
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
}
LIMIT = 10_000
case = pytest.mark.parametrize(("name", "encode"), ENCODERS.values(), ids=ENCODERS.keys())


@case
@given(data=st.binary(max_size=500))
def test_round_trip(name: str, encode: Callable[[bytes], bytes], data: bytes) -> None:
    assert decode_body(encode(data), (name,), LIMIT) == data


@case
def test_the_limit_is_exact(name: str, encode: Callable[[bytes], bytes]) -> None:
    assert len(decode_body(encode(b"a" * LIMIT), (name,), LIMIT)) == LIMIT
    for size in (LIMIT + 1, 50_000_000):
        with pytest.raises(RequestError) as caught:
            decode_body(encode(b"a" * size), (name,), LIMIT)
        assert caught.value.code == "request_too_large"


@case
def test_truncated_and_corrupt_streams(name: str, encode: Callable[[bytes], bytes]) -> None:
    data = encode(bytes(range(256)) * 4)
    for broken in (b"", data[:-1], data[: len(data) // 2], b"\x00\x01" + data[2:], data + b"!"):
        with pytest.raises(RequestError) as caught:
            decode_body(broken, (name,), LIMIT)
        assert caught.value.code == "invalid_request_encoding"


@pytest.mark.parametrize("name", ["zstd", "gzip"])
def test_joined_frames_are_one_body(name: str) -> None:
    encode = ENCODERS[name][1]
    assert decode_body(encode(b"ab") + encode(b"cd"), (name,), LIMIT) == b"abcd"
    with pytest.raises(RequestError) as caught:
        decode_body(encode(b"a" * 6000) * 2, (name,), LIMIT)
    assert caught.value.code == "request_too_large"


def test_stacked_encodings_are_undone_from_the_last() -> None:
    data = zstd_compress(gzip.compress(b"hello"))
    assert decode_body(data, parse_encodings(["gzip, zstd"]), LIMIT) == b"hello"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ()),
        ([""], ()),
        (["identity"], ()),
        ([" GZIP "], ("gzip",)),
        (["identity, zstd , identity, deflate"], ("zstd", "deflate")),
        (["gzip", "", "zstd"], ("gzip", "zstd")),
    ],
)
def test_header(lines: list[str], expected: tuple[str, ...]) -> None:
    assert parse_encodings(lines) == expected


@pytest.mark.parametrize(
    "lines", [["br"], ["gzip, br"], ["gzip,gzip,gzip"], ["gzip", "gzip,gzip"], ["gzip;q=1"]]
)
def test_unknown_or_too_many_encodings(lines: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_encodings(lines)
    assert caught.value.code == "unsupported_content_encoding"
