"""Data URLs and base64 in every form that clients send."""

from __future__ import annotations

from base64 import b64encode, encodebytes, urlsafe_b64encode
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.contract.errors import RequestError
from ninfer.gateway.media.inline import decode_base64, decode_data_url, is_data_url

LIMIT = 1000
HEADS = (
    "data:;base64",
    "DATA:image/png;Base64",
    "data:image/png;base64;charset=utf-8",
    " data:image/png;charset=utf-8;base64 ",
    "data:image/svg+xml;a=b;base64",
)


@given(st.binary(max_size=200))
def test_every_form_gives_the_same_bytes(data: bytes) -> None:
    plain, safe = b64encode(data).decode(), urlsafe_b64encode(data).decode()
    wrapped = encodebytes(data).decode().replace("\n", "\r\n")
    for payload in (plain, plain.rstrip("="), safe, wrapped):
        assert decode_base64(payload, "p", LIMIT) == data
        assert decode_data_url(f"data:image/png;base64,{payload}", "p", LIMIT) == data
    for head in HEADS:
        assert is_data_url(head)
        assert decode_data_url(f"{head},{plain}", "p", LIMIT) == data
    assert decode_data_url(f"data:image/png;base64,{quote(plain, safe='')}", "p", LIMIT) == data
    assert decode_data_url(f"data:image/png,{quote(data)}", "p", LIMIT) == data


@pytest.mark.parametrize("payload", ["A", "ab$d", "AAAA=AAA", "é", "AAAAA"])
def test_what_is_not_base64_is_refused(payload: str) -> None:
    with pytest.raises(RequestError) as raised:
        decode_base64(payload, "messages[0].content[1].source.data", LIMIT)
    assert raised.value.code == "invalid_media"
    assert raised.value.param == "messages[0].content[1].source.data"


def test_no_comma_no_data() -> None:
    with pytest.raises(RequestError) as raised:
        decode_data_url("data:image/png;base64", "p", LIMIT)
    assert raised.value.code == "invalid_media"


def test_size_is_limited_before_decoding() -> None:
    right = bytes(LIMIT)
    assert decode_base64(b64encode(right).decode(), "p", LIMIT) == right
    assert decode_data_url("data:," + "%00" * LIMIT, "p", LIMIT) == right
    for text in (
        f"data:;base64,{b64encode(right + b'x').decode()}",
        "data:," + "%00" * (LIMIT + 1),
    ):
        with pytest.raises(RequestError) as raised:
            decode_data_url(text, "p", LIMIT)
        assert raised.value.code == "media_budget_exceeded"
