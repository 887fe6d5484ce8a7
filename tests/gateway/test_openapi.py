"""The OpenAPI document: every route, nothing else, and what it says of bodies is what is taken."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ninfer.gateway.app import Gateway
from ninfer.gateway.openapi.answers import ANSWERS
from ninfer.gateway.openapi.document import openapi_document
from ninfer.gateway.openapi.operations import OPERATIONS
from ninfer.gateway.openapi.requests import REQUESTS
from ninfer.gateway.router import normalise_path
from ninfer.options import ServeOptions
from tests.helpers.fake_engine import CARD
from tests.helpers.gateway_rig import Rig

DOCUMENT = openapi_document()
POSTS = {
    operation.request: operation.path for operation in OPERATIONS if operation.request is not None
}
WITH_FLAG = {"top_logprobs": {"logprobs": True}, "top_logprobs_num": {"return_logprob": True}}
"""Fields that need another one."""


def test_every_route_is_documented_and_every_documented_one_is_there() -> None:
    router = Gateway(ServeOptions(), CARD).router
    routed = {(method, path) for path, methods in router.routes() for method in methods}
    documented = {(item.method, normalise_path(item.path)) for item in OPERATIONS}
    assert documented == routed
    assert len(OPERATIONS) == len(documented)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_document_is_whole() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(schemas) == {*REQUESTS, *ANSWERS}
    for name, schema in schemas.items():
        Draft202012Validator.check_schema(schema)
        assert name in {item.rpartition("/")[2] for item in references(DOCUMENT)}, "unused"
    for reference in references(DOCUMENT):
        assert reference.removeprefix("#/components/schemas/") in schemas
    ids = [op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            named = {item["name"] for item in operation["parameters"] if item["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path))


async def test_it_is_served(rig: Rig) -> None:
    answer = await rig.get("/openapi.json")
    assert answer.json() == DOCUMENT
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", REQUESTS)
async def test_its_example_is_valid_and_taken(rig: Rig, name: str) -> None:
    (example,) = REQUESTS[name]["examples"]
    Draft202012Validator(schema_of(name)).validate(example)
    assert (await rig.post(POSTS[name], example)).status == 200


def schema_of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def limits_of(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """(value, whether it is legal) on both sides of each limit."""
    step = 1 if "integer" in schema["type"] else 0.01
    for key, sign in (("minimum", -1), ("maximum", 1)):
        if key in schema and abs(schema[key]) < 2**53:
            yield schema[key], True
            yield schema[key] + sign * step, False
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"], False
        yield schema["exclusiveMinimum"] + step, True
    if "enum" in schema:
        yield from ((value, True) for value in schema["enum"])
        yield "no such value", False
    yield [{}], "array" in schema["type"]
    yield None, True


def scalar_fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema["properties"].items():
        if {"number", "integer", "string", "boolean"} & set(field.get("type", ())):
            yield name, field


def cases() -> Iterator[tuple[str, tuple[str, ...], Any, bool]]:
    for name, schema in REQUESTS.items():
        if name == "AbortRequest":
            continue
        for field, rule in scalar_fields(schema):
            yield from ((name, (field,), *limit) for limit in limits_of(rule))
    params = REQUESTS["GenerateRequest"]["properties"]["sampling_params"]["anyOf"][0]
    for field, rule in scalar_fields(params):
        where = ("sampling_params", field)
        yield from (("GenerateRequest", where, *limit) for limit in limits_of(rule))


async def test_ranges_and_types_are_those_of_the_server(rig: Rig) -> None:
    wrong = []
    for name, where, value, is_legal in cases():
        (example,) = copy.deepcopy(REQUESTS[name]["examples"])
        example |= WITH_FLAG.get(where[0], {})
        holder = example
        for key in where[:-1]:
            holder = holder.setdefault(key, {})
        if value is None and where[-1] in holder:
            continue  # it is needed
        holder[where[-1]] = value
        answer = await rig.post(POSTS[name], example)
        is_taken = answer.status == 200
        names_it = is_taken or ".".join(where) in answer.body.decode()
        if is_taken != is_legal or not names_it:
            wrong.append((POSTS[name], where, value, answer.status, answer.body[:150]))
    assert wrong == []
