"""A tool that the demo model knows, as chat requests declare it."""

from __future__ import annotations

from typing import Any, Final

WEATHER_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
        },
    },
}
WEATHER_QUESTION: Final = "How warm is it in Hamburg?"
