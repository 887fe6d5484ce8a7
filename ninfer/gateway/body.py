"""Receipt of request bodies: media type, size, deadline, content encodings, JSON.

headers checked -> read within the deadline -> (thread when long) decode -> parse -> check
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from aiohttp import ClientPayloadError, web

from ninfer.contract.abandonment import run_abandonable
from ninfer.contract.errors import RequestError
from ninfer.gateway.content_encoding import decode_body, parse_encodings, too_large
from ninfer.gateway.fields import Fields, invalid_type
from ninfer.gateway.json_text import parse_json
from ninfer.gateway.limits import MIB, GatewayLimits

T = TypeVar("T")
_CHARSETS: Final = ("utf-8", "utf8", "us-ascii", "ascii")
_LARGE_BODIES: Final = ThreadPoolExecutor(2, thread_name_prefix="large-body")
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[T]):
    value: T
    surrogates_replaced: int


async def read_json_body(
    request: web.BaseRequest, limits: GatewayLimits, parse: Callable[[Fields], T]
) -> ParsedBody[T]:
    """Receive the body and hand its top-level object to `parse`.

    `parse` runs in a thread for long bodies and must be pure. Very long ones are parsed two at a
    time: more would only take the interpreter from everything else. Raises RequestError
    with the transport codes, those of `parse_json` and those of `parse`.
    """
    _check_media_type(request)
    encodings = parse_encodings(request.headers.getall("Content-Encoding", ()))
    data = await _receive(request, limits)
    if encodings:
        data = await asyncio.to_thread(decode_body, data, encodings, limits.max_body_bytes)

    def finish() -> ParsedBody[T]:
        text = parse_json(data)
        if not isinstance(text.value, dict):
            raise invalid_type("body", "an object", text.value)
        return ParsedBody(parse(Fields(text.value)), text.surrogates_replaced)

    if len(data) <= limits.thread_above_bytes:
        return finish()
    executor = _LARGE_BODIES if len(data) > limits.large_above_bytes else None
    return await run_abandonable(executor, finish)


def _check_media_type(request: web.BaseRequest) -> None:
    """JSON in UTF-8 or nothing; a browser page must name JSON, which forces a preflight on it."""
    header = request.headers.get("Content-Type")
    media_type = (header or "").partition(";")[0].strip().lower()
    if (request.charset or _CHARSETS[0]).lower() not in _CHARSETS:
        raise RequestError("unsupported_media_type", "The charset of Content-Type must be utf-8.")
    if media_type == "application/json":
        return
    if "Origin" not in request.headers and (not media_type or media_type.endswith("+json")):
        return
    raise RequestError("unsupported_media_type", "Content-Type must be application/json.")


async def _receive(request: web.BaseRequest, limits: GatewayLimits) -> bytes:
    declared = request.content_length or 0
    if declared > limits.max_body_bytes:
        raise too_large(limits.max_body_bytes)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # the answer itself has not begun
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    received = bytearray()
    try:
        async with asyncio.timeout(None) as deadline:
            while True:
                expected_mib = max(declared, len(received)) / MIB
                allowed_s = limits.body_timeout_s + limits.body_timeout_per_mib_s * expected_mib
                deadline.reschedule(start_s + allowed_s)
                chunk = await request.content.readany()
                if not chunk:
                    return bytes(received)
                received += chunk
                if len(received) > limits.max_body_bytes:
                    raise too_large(limits.max_body_bytes)
    except TimeoutError:
        raise RequestError("request_timeout", "The request body did not arrive in time.") from None
    except (web.RequestPayloadError, ClientPayloadError):
        raise RequestError("invalid_http", "The request body's framing is broken.") from None
