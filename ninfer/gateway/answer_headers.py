"""Headers that every answer has, streams and errors included."""

from __future__ import annotations

from typing import Final

SERVER_NAME: Final = "ninfer"
"""Without versions: they help nobody but attackers. `/version` tells ours."""


def answer_headers(request_id: str) -> dict[str, str]:
    """The request's id, under the names of both API families, and the server's name."""
    return {"x-request-id": request_id, "request-id": request_id, "Server": SERVER_NAME}
