"""`oneOf` as `anyOf` of schemas no two of which hold for one value.

    a member of each lists other values             -> it is required
    they exclude each other as they are             -> taken as they are
    a member would tell them apart, were it there   -> it is required
    the others can be denied                        -> each holds and the others do not

A value that is excluded this way may have been valid; whatever is left is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ninfer.frontend.constraints.json_grammar import json_lark
from ninfer.frontend.constraints.schema_cases import KEYWORDS, all_of
from ninfer.frontend.constraints.schema_complement import denied, followed
from ninfer.frontend.constraints.unenforceable import Unenforceable

_MAX_BRANCHES: Final = 20
"""That are compared in pairs; more of them must have a member with other values each."""
_MAX_NAMES: Final = 8
"""Members that are tried."""


def exclusive(schema: Mapping[str, Any], root: Any) -> list[Any]:
    """The schemas of its `oneOf`, changed as far as needed so that they exclude each other. Raises
    Unenforceable when there is no telling."""
    others = {key: value for key, value in schema.items() if key in KEYWORDS and key != "oneOf"}
    branches = list(schema["oneOf"])
    tagged = _tagged(branches, root)
    if tagged is not None:
        return tagged
    if len(branches) > _MAX_BRANCHES:
        raise Unenforceable(
            f"has more than {_MAX_BRANCHES} schemas and no member with other values in each"
        )
    overlaps = list(_overlaps(branches, others, root))
    if not overlaps:
        return branches
    for name in itertools.islice(_shared_names(branches, root), _MAX_NAMES):
        telling = _requiring(branches, name)
        if next(_overlaps(telling, others, root), None) is None:
            return telling
    alone = _each_alone(branches, overlaps, root)
    if alone is None:
        raise Unenforceable("has schemas that may hold for one value")
    return alone


def _tagged(branches: Sequence[Any], root: Any) -> list[Any] | None:
    """Objects, each with other values of one member, which is required then. What is no object
    would keep to all that do not speak of types."""
    if any(_type(branch, root) not in ("object", None) for branch in branches):
        return None
    for name in _shared_names(branches, root):
        seen: set[str] = set()
        for branch in branches:
            values = _values(_properties(branch, root)[name], root)
            if not values or seen & values:
                break
            seen |= values
        else:
            objects = [all_of([branch, {"type": "object"}]) for branch in branches]
            return _requiring(objects, name)
    return None


def _type(branch: Any, root: Any) -> Any:
    branch = followed(branch, root)
    return branch.get("type") if isinstance(branch, dict) else None


def _values(schema: Any, root: Any) -> set[str]:
    """The scalars that are all that a schema lists, as texts; none where it lists others."""
    schema = followed(schema, root)
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if any(isinstance(value, list | dict) for value in values):
        return set()
    return {_spelling(value) for value in values}


def _spelling(value: Any) -> str:
    """One for 1 and 1.0, which are the same number."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value)


def _requiring(branches: Sequence[Any], name: str) -> list[Any]:
    return [all_of([branch, {"required": [name]}]) for branch in branches]


def _overlaps(branches: Sequence[Any], others: Any, root: Any) -> Iterator[tuple[int, int]]:
    for one, other in itertools.combinations(range(len(branches)), 2):
        if _has_values(all_of([others, branches[one], branches[other]]), root):
            yield one, other


def _has_values(schema: Any, root: Any) -> bool:
    try:
        return json_lark(schema, root) is not None
    except Unenforceable:
        return True


def _shared_names(branches: Sequence[Any], root: Any) -> Iterator[str]:
    """Members that every one of several objects describes."""
    described = [_properties(branch, root) for branch in branches]
    for name in described[0]:
        if all(name in properties for properties in described):
            yield name


def _properties(branch: Any, root: Any) -> Mapping[str, Any]:
    branch = followed(branch, root)
    properties: Mapping[str, Any] = branch.get("properties", {}) if isinstance(branch, dict) else {}
    return properties


def _each_alone(
    branches: Sequence[Any], overlaps: Sequence[tuple[int, int]], root: Any
) -> list[Any] | None:
    alone: list[Any] = []
    for index, branch in enumerate(branches):
        parts = [branch]
        for pair in overlaps:
            if index in pair:
                complement = denied(branches[pair[0] if pair[1] == index else pair[1]], root)
                if complement is None:
                    return None
                parts.append(complement)
        alone.append(all_of(parts))
    return alone
