"""Fields that speak to the context cache: who may share a prefix, which conversation this is, and
where a prefix ends that will come again."""

from __future__ import annotations

from typing import Final

from ninfer.contract.cache import CacheMode, CacheRequest
from ninfer.contract.errors import RequestError
from ninfer.gateway.fields import Fields, invalid_type, invalid_value

SESSION_HEADER: Final = "X-Session-Id"
MAX_NAME_CHARACTERS: Final = 1024
_MODES: Final = tuple(mode.value for mode in CacheMode)


def parse_cache_request(fields: Fields, session_header: str | None = None) -> CacheRequest:
    """What a request asks of the cache. The conversation is named by `session_id`, else the
    header, else `prompt_cache_key`. Raises RequestError naming the field or the header."""
    fields.child("prompt_cache_options")
    has_mark(fields)
    salt = _name(fields, "cache_salt")
    if salt == "":
        raise _bad_length(fields.path_of("cache_salt"))
    if session_header is not None and len(session_header) > MAX_NAME_CHARACTERS:
        raise _bad_length(SESSION_HEADER)
    session, prompt_key = _name(fields, "session_id"), _name(fields, "prompt_cache_key")
    mode = fields.choice("cache", _MODES)
    return CacheRequest(
        mode=CacheMode.DEFAULT if mode is None else CacheMode(mode),
        session_key=session or session_header or prompt_key or None,
        salt=salt or "",
    )


def has_mark(fields: Fields) -> bool:
    """Whether an object says that all up to its end will be sent again."""
    control = fields.child("cache_control")
    if control is not None:
        control.string("type")
    breakpoint_ = fields.get("prompt_cache_breakpoint")
    if not isinstance(breakpoint_, bool | dict | None):
        path = fields.path_of("prompt_cache_breakpoint")
        raise invalid_type(path, "a boolean or an object", breakpoint_)
    return control is not None or breakpoint_ is True or isinstance(breakpoint_, dict)


def _name(fields: Fields, name: str) -> str | None:
    value = fields.string(name)
    if value is not None and len(value) > MAX_NAME_CHARACTERS:
        raise _bad_length(fields.path_of(name))
    return value


def _bad_length(path: str) -> RequestError:
    return invalid_value(path, f"must have 1 to {MAX_NAME_CHARACTERS} characters")
