"""Texts of options -> values. What does not parse is a ValueError with a text for its user."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final


def parse_int(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if value < minimum or (maximum is not None and value > maximum):
            limit = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
            raise ValueError(f"{value} is out of range ({limit})")
        return value

    return parse


def parse_float(minimum: float, maximum: float = float("inf")) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"{value:g} is out of range ({minimum:g} to {maximum:g})")
        return value

    return parse


def parse_cases(text: str) -> tuple[tuple[int, int], ...]:
    """`1024x1,8192x8`: pairs of prompt tokens and sequences."""
    cases = []
    for part in text.split(","):
        prompt, separator, batch = part.partition("x")
        cases.append(
            (parse_int(1, 16_777_216)(prompt), parse_int(1, 256)(batch) if separator else 1)
        )
    return tuple(cases)


def parse_host(text: str) -> str:
    """An empty address would mean every interface; that has to be said (0.0.0.0 or ::)."""
    if not text.strip():
        raise ValueError("an address is needed; 0.0.0.0 or :: listens on all of them")
    if re.fullmatch(r"[A-Za-z0-9._:%-]+", text) is None:
        raise ValueError(f"{text!r} is neither a host name nor an address")
    return text


def parse_name(text: str) -> str:
    """A name of something: an empty one would silently mean another thing."""
    if not text:
        raise ValueError("the name is empty")
    return text


def parse_names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(parse_name(part.strip()) for part in text.split(","))


def parse_keys(text: str) -> tuple[str, ...]:
    """API keys with commas between them. The errors do not show them."""
    keys = parse_names(text)
    if any(re.fullmatch(r"[!-~]{1,1024}", key) is None for key in keys):
        raise ValueError("a key has 1 to 1024 printable ASCII characters, none of them a blank")
    return keys


def parse_origins(text: str) -> tuple[str, ...]:
    """`*`, or origins such as `https://chat.example.org:8443` with commas between them."""
    origins = tuple(origin.lower().rstrip("/") for origin in parse_names(text))
    for origin in origins:
        if re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@]+", origin) is None:
            raise ValueError(f"{origin!r} is not an origin (example: https://chat.example.org)")
    return origins


def parse_output_name(text: str) -> str:
    if text == "-":
        raise ValueError("- does not mean stdout here (./- is a file of that name)")
    return parse_name(text)


def parse_media_hosts(text: str) -> tuple[str, ...]:
    """`images.example.org,.cdn.example.org,files.example.org:8443`."""
    hosts = parse_names(text)
    for host in hosts:
        if re.fullmatch(r"\.?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*(:[1-9][0-9]{0,4})?", host) is None:
            raise ValueError(f"{host!r} is neither HOST, .SUFFIX, HOST:PORT nor .SUFFIX:PORT")
    return hosts


_BYTE_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """`512MiB`, `2g`, `1048576`; binary units."""
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    number = lowered.rstrip("kmgt")
    unit = lowered[len(number) :]
    try:
        value = int(float(number) * _BYTE_UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{text!r} is not a size (examples: 512MiB, 2GiB)") from None
    if value <= 0:
        raise ValueError("a size must be positive")
    return value


def parse_bytes_or_none(text: str) -> int:
    """`parse_bytes`, and 0."""
    return 0 if text.strip() == "0" else parse_bytes(text)


def parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off"}:
        return False
    raise ValueError(f"{text!r} is neither on nor off")
