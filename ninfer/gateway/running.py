"""Requests that are being answered, by the names they can be ended by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Abortable(Protocol):
    def abort(self) -> bool:
        """Ask for the end; False when the answer is already complete."""


class RunningRequests:
    """A request may have several names, and two requests the same one: clients choose theirs."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Abortable]] = {}
        self._names: dict[Abortable, list[str]] = {}

    def add(self, request: Abortable, names: Iterable[str]) -> None:
        """Further names may be added later."""
        own = self._names.setdefault(request, [])
        for name in names:
            if name not in own:
                own.append(name)
                self._by_name.setdefault(name, []).append(request)

    def remove(self, request: Abortable) -> None:
        """Idempotent."""
        for name in self._names.pop(request, ()):
            holders = self._by_name[name]
            holders.remove(request)
            if not holders:
                del self._by_name[name]

    def abort(self, name: str) -> int:
        """End every request of that name; returns how many there were."""
        return sum(request.abort() for request in tuple(self._by_name.get(name, ())))

    def abort_all(self) -> int:
        return sum(request.abort() for request in tuple(self._names))
