"""Objects of schemas are closed where that means what their author meant."""

import copy
from typing import Any

import pytest

from ostinato.protocol.schemas import closed

POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (POINT, CLOSED),
        ({"type": "array", "items": POINT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"p": POINT}, "$ref": "#/$defs/p"},
            {"$defs": {"p": CLOSED}, "$ref": "#/$defs/p"},
        ),
        (
            {"type": "object", "properties": {"p": POINT}},
            {"type": "object", "properties": {"p": CLOSED}, "additionalProperties": False},
        ),
        (
            {"type": "object", "properties": {"properties": {"type": "string"}}},
            {
                "type": "object",
                "properties": {"properties": {"type": "string"}},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_an_object_has_the_properties_that_it_names(schema: Any, expected: Any):
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before, "the request itself is not changed"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**POINT, "additionalProperties": True},
        {**POINT, "additionalProperties": {"type": "string"}},
        {**POINT, "patternProperties": {"^y": {}}},
        {**POINT, "anyOf": [{"required": ["x"]}]},
        {"allOf": [POINT, {"type": "object", "properties": {"y": {}}}]},
        {"allOf": [{"$ref": "#/$defs/p"}, {"properties": {"y": {}}}], "$defs": {"p": POINT}},
        {"const": POINT},
        {"enum": [POINT]},
        True,
    ],
)
def test_an_object_that_says_more_or_is_combined_stays_as_it_is(schema: Any):
    assert closed(schema) == schema
