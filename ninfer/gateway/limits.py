"""Deadlines and sizes of the HTTP surface: how long and how much a client may keep us waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer.options import ServeOptions

MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Seconds and bytes; tests use small ones.

    max_body_bytes       of the wire and again of the decoded body
    max_header_bytes     of all headers of a request together
    header_timeout_s     from the first byte of a request (or the connection) to its last header
    idle_timeout_s       a kept-alive connection without a request
    body_timeout_s       receipt of a body, plus body_timeout_per_mib_s for each MiB of it
    keep_alive_interval_s   silence on an event stream before a comment is sent
    write_timeout_s      a reader that takes nothing for so long is cut off
    stream_buffer_bytes  a reader that is further behind when the next event comes is cut off
    user_timeout_s       TCP gives up on a peer that acknowledges nothing for so long
    thread_above_bytes   larger bodies are parsed in a thread
    large_above_bytes    larger bodies are parsed two at a time
    failure_linger_s     a dead engine is still reported on /health for so long before the exit
    """

    max_body_bytes: int = 64 * MIB
    max_connections: int = 1024
    max_header_bytes: int = 64 * 1024
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    body_timeout_s: float = 30.0
    body_timeout_per_mib_s: float = 1.0
    keep_alive_interval_s: float = 10.0
    write_timeout_s: float = 60.0
    stream_buffer_bytes: int = 256 * 1024
    user_timeout_s: float = 15.0
    thread_above_bytes: int = 256 * 1024
    large_above_bytes: int = 2 * MIB
    failure_linger_s: float = 2.0


def limits_from(options: ServeOptions) -> GatewayLimits:
    return GatewayLimits(
        max_body_bytes=options.max_request_mib * MIB, max_connections=options.max_connections
    )
