"""A crowd of clients: polite ones, ones that leave, read slowly, or send what is no request.

Every answer is compared with the one that its question has alone, every refusal with those that
may happen; anything else is an UnexpectedAnswerError that names protocol and kind. No request may
take longer than PATIENCE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import orjson

from bench.common.load_protocols import CASES, PROTOCOLS, Case, Protocol

PATIENCE_S: Final = 300.0
"""A request that takes longer hangs, however busy the machine is."""
NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
_KINDS: Final[Mapping[str, int]] = {
    "stream": 40,
    "whole": 15,
    "slow": 8,
    "leave": 14,
    "vanish": 6,
    "deadline": 7,
    "malformed": 7,
    "half": 3,
}
_BAD_BODIES: Final = (
    b"",
    b"{",
    b"null",
    b"[1]",
    b"\xff\xfe",
    b'{"messages": 5, "prompt": {}, "input": 7, "text": {}, "max_tokens": 1}',
    b'{"messages": [{"role": "user", "content": 5}], "prompt": 1.5, "input": [5], "max_tokens": 1}',
    b'{"messages": [], "prompt": [], "input": [], "text": [], "max_tokens": 1}',
    b'{"messages": [{"role": "nobody"}], "input": [{"role": 5}], "prompt": [[]], "max_tokens": 1}',
    b'{"temperature": "hot", "sampling_params": {"temperature": -1}, "max_tokens": -7}',
    b"[" * 5000,
    b'{"a": 1e999}',
)
Answers: TypeAlias = dict[tuple[str, Case], str]


class UnexpectedAnswerError(Exception):
    """A wrong answer, a refusal that must not be, or no end."""


def _expect(is_right: bool, *what: object) -> None:
    if not is_right:
        raise UnexpectedAnswerError(*what)


@dataclass
class Report:
    """What happened: how often, and how long it took. Seconds from sending a request."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    total_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def rows(self) -> list[dict[str, Any]]:
        """Milliseconds by protocol; of streams that were read to their end without a pause."""
        return [
            {
                "protocol": name,
                "requests": len(self.total_s[name]),
                "first_ms": _percentiles(self.first_s[name]),
                "total_ms": _percentiles(self.total_s[name]),
            }
            for name in sorted(self.total_s)
        ]

    def lines(self) -> list[str]:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        return [
            counts,
            *(
                f"{row['protocol']:12s} {row['requests']:6d}  first event "
                f"{_text(row['first_ms'])}  whole {_text(row['total_ms'])}"
                for row in self.rows()
            ),
        ]


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        name: 1000 * ordered[round(share * last)]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def _text(percentiles: dict[str, float]) -> str:
    return "/".join(f"{value:.0f}" for value in percentiles.values()) + " ms (p50/p90/p99/max)"


class Client:
    """Sends requests one after the other until it is told to stop."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, seed: int, answers: Answers, report: Report
    ) -> None:
        self._url = url
        self._session = session
        self._random = random.Random(seed)
        self._answers = answers
        self._report = report

    async def run(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            (kind,) = self._random.choices(tuple(_KINDS), tuple(_KINDS.values()))
            protocol = self._random.choice(tuple(PROTOCOLS.values()))
            case = self._random.choice(CASES)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    outcome = await self._ask(kind, protocol, case)
            except TimeoutError:
                raise UnexpectedAnswerError(f"{protocol.name} {kind}: no end in sight") from None
            except (LookupError, TypeError, ValueError, aiohttp.ClientError) as error:
                raise UnexpectedAnswerError(f"{protocol.name} {kind}: {error!r}") from error
            except UnexpectedAnswerError as error:
                raise UnexpectedAnswerError(f"{protocol.name} {kind}", *error.args) from None
            self._report.outcomes[outcome] += 1

    async def _ask(self, kind: str, protocol: Protocol, case: Case) -> str:
        """One request; returns what became of it."""
        if kind == "malformed":
            return await self._malformed(protocol)
        if kind == "half":
            return await self._half(protocol)
        if kind == "vanish":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._random.random() * 0.2):
                    await self._whole(protocol, case)
            return kind
        if kind == "whole":
            return await self._whole(protocol, case)
        return await self._stream(kind, protocol, case)

    async def _whole(self, protocol: Protocol, case: Case) -> str:
        async with self._post(protocol, protocol.payload(case)) as response:
            if response.status != 200:
                return await self._refused(response)
            answer = protocol.whole(orjson.loads(await response.read()))
        _expect(answer == self._answers[protocol.name, case], "a wrong answer")
        return "whole"

    async def _stream(self, kind: str, protocol: Protocol, case: Case) -> str:
        payload = protocol.payload(case) | {"stream": True}
        if kind == "deadline":
            settings = payload.get("sampling_params", payload)
            settings["timeout_s"] = self._random.choice((0.05, 0.3, 1.0))
        leave_after = self._random.randrange(1, 6) if kind == "leave" else None
        right, text, num_events = self._answers[protocol.name, case], "", 0
        sent_s = first_s = time.monotonic()
        async with self._post(protocol, payload) as response:
            if response.status != 200:
                return await self._refused(response, has_deadline=kind == "deadline")
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if num_events == 0:
                    first_s = time.monotonic()
                num_events += 1
                data = line[6:].strip()
                event = None if data == b"[DONE]" else orjson.loads(data)
                error = None if event is None else protocol.error(event)
                if error is not None:
                    _expect(kind == "deadline", error)
                    _expect(right.startswith(text), "a wrong answer before its deadline")
                    return "deadline in stream"
                text += "" if event is None else protocol.piece(event)
                if protocol.is_end(data):
                    _expect(text == right, "a wrong answer")
                    if kind == "stream":
                        self._report.first_s[protocol.name].append(first_s - sent_s)
                        self._report.total_s[protocol.name].append(time.monotonic() - sent_s)
                    return kind
                if leave_after is not None and num_events >= leave_after:
                    _expect(right.startswith(text), "a wrong beginning")
                    return kind
                if kind == "slow":
                    await asyncio.sleep(self._random.random() * 0.1)
        raise UnexpectedAnswerError("the stream ended without its end mark")

    async def _refused(
        self, response: aiohttp.ClientResponse, *, has_deadline: bool = False
    ) -> str:
        """A refusal that may happen to a good request: too many others, or its own deadline."""
        body = orjson.loads(await response.read())
        if response.status == 408:
            _expect(has_deadline, body)
            return "deadline"
        _expect(response.status in (429, 529), (response.status, body))
        _expect(1 <= int(response.headers["Retry-After"]) <= 60)
        await asyncio.sleep(self._random.random())
        return "overloaded"

    async def _malformed(self, protocol: Protocol) -> str:
        body = self._random.choice(_BAD_BODIES)
        headers = {"Content-Type": "application/json"}
        if self._random.random() < 0.2:
            headers["Content-Encoding"] = self._random.choice(("gzip", "zstd", "br"))
        async with self._session.post(
            self._url + protocol.path, data=body, headers=headers
        ) as response:
            answer = orjson.loads(await response.read())
            _expect(400 <= response.status < 500, (response.status, body, answer))
            _expect(answer["error"]["message"], answer)
        return "malformed"

    async def _half(self, protocol: Protocol) -> str:
        """A request that is never finished, on a connection that is torn down."""
        address = urlsplit(self._url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        body = orjson.dumps(protocol.payload(CASES[0]))
        head = f"POST {protocol.path} HTTP/1.1\r\nHost: load\r\nContent-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        writer.write(request[: self._random.randrange(1, len(request))])
        await asyncio.sleep(self._random.random() * 0.1)
        writer.transport.abort()
        return "half"

    def _post(self, protocol: Protocol, payload: dict[str, Any]) -> Any:
        return self._session.post(self._url + protocol.path, json=payload)


async def right_answers(url: str) -> Answers:
    """Every case in every protocol, alone, one after the other."""
    answers = {}
    async with aiohttp.ClientSession(timeout=NO_TIMEOUT) as session:
        for name, protocol in PROTOCOLS.items():
            for case in CASES:
                async with session.post(url + protocol.path, json=protocol.payload(case)) as got:
                    _expect(got.status == 200, (name, await got.text()))
                    answers[name, case] = protocol.whole(orjson.loads(await got.read()))
    _expect(all(answers.values()), "an answer without text compares nothing")
    return answers


async def run_crowd(
    url: str, num_clients: int, seconds: float, answers: Answers, report: Report, *, seed: int = 0
) -> None:
    """Raises an ExceptionGroup of what was wrong."""
    end_s = time.monotonic() + seconds

    async def run_one(index: int) -> None:
        async with aiohttp.ClientSession(timeout=NO_TIMEOUT) as session:
            await Client(url, session, seed + index, answers, report).run(end_s)

    async with asyncio.TaskGroup() as crowd:
        for index in range(num_clients):
            crowd.create_task(run_one(index))
