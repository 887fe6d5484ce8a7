"""`text.format` -> what the answer's text must match."""

from __future__ import annotations

from typing import Final

import orjson

from ninfer.contract.chat import Constraint
from ninfer.gateway.fields import Fields, missing

_KINDS: Final = ("text", "json_object", "json_schema")


def parse_text_format(fields: Fields) -> Constraint | None:
    """None for any text. Raises RequestError naming the field."""
    text = fields.child("text")
    if text is None:
        return None
    text.string("verbosity")
    form = text.child("format")
    if form is None:
        return None
    kind = form.choice("type", _KINDS)
    if kind is None:
        raise missing(form.path_of("type"))
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json_object", "", form.path_of("type"))
    form.string("name")
    schema, path = form.child("schema"), form.path_of("schema")
    if schema is None:
        raise missing(path)
    source = orjson.dumps(schema.values).decode()
    return Constraint("json_schema", source, path, is_strict=form.flag("strict"))
