"""/server_info: what runs here, for whoever looks after it. No keys, nothing of requests."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from aiohttp import web

import ninfer
from ninfer.contract.units import MemoryPlan
from ninfer.gateway.exchange import Exchange
from ninfer.options import specs_of

_LIBRARIES: Final = (
    "aiohttp", "cupy-cuda12x", "cupy-cuda13x", "llguidance", "numpy", "orjson", "tokenizers",
)  # fmt: skip


async def server_info(exchange: Exchange) -> web.StreamResponse:
    """Also while the model is loading; then without what the model brings."""
    card, model, options = exchange.lifecycle.card, exchange.lifecycle.model, exchange.options
    details: Mapping[str, Any] = {} if model is None else model.info
    return exchange.json(
        {
            "version": ninfer.__version__,
            "status": exchange.lifecycle.health.value,
            "model": {**asdict(card), "served_names": exchange.served_names},
            "is_protected": bool(options.api_key or options.api_key_file),
            **details,
            "options": {**public_options(options), **details.get("options", {})},
        }
    )


def model_info(device: str, plan: MemoryPlan, *options: object) -> dict[str, Any]:
    """What a loaded model adds; reads the installed packages, so not on the loop."""
    shown: dict[str, Any] = {}
    for item in options:
        shown |= public_options(item)
    memory = {**asdict(plan), "total_bytes": plan.total_bytes}
    return {"device": device, "memory_plan": memory, "versions": _versions(), "options": shown}


def public_options(options: object) -> dict[str, Any]:
    """The values of an options object but for its secrets."""
    specs = specs_of(type(options))
    return {
        item.name: getattr(options, item.name)
        for item in fields(options)  # type: ignore[arg-type]
        if not specs[item.name].is_secret
    }


def _versions() -> dict[str, str]:
    """Python and the libraries that are there."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
