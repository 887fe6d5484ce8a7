"""Which remote addresses may be asked at all, before any name is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from yarl import URL

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class HostRules:
    """entries   `host`, `.suffix` (any host below it), either with `:port`; None: every host

    An entry without a port allows 80 for http and 443 for https, as an absent list does.
    """

    entries: Sequence[str] | None = None

    def allows(self, url: URL) -> bool:
        """http or https to an allowed host and port, without a user name."""
        port = _PORTS.get(url.scheme)
        if port is None or not url.raw_host or url.user is not None or url.password is not None:
            return False
        host = url.raw_host.lower().rstrip(".")
        if self.entries is None:
            return url.port == port
        return any(_matches(entry, host, url.port, port) for entry in self.entries)


def _matches(entry: str, host: str, port: int | None, usual_port: int) -> bool:
    name, _, port_text = entry.lower().partition(":")
    if port != (int(port_text) if port_text else usual_port):
        return False
    return host.endswith(name) if name.startswith(".") else host == name
