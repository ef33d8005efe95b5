"""Closes the objects of JSON schemas, as OpenAI's and vLLM's servers do.

By JSON Schema's rules an object may have properties that its schema does not name, and a weak model
goes on naming them. So an object with ``properties`` that says nothing about others has none.
Objects that are combined with other schemas are left alone: each part alone knows a part of the
properties.
"""

from collections.abc import Mapping
from typing import Any

_SAYS_MORE = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"),
    }
)
_COMBINED = frozenset({"allOf", "not", "if", "then", "else", "dependentSchemas"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_OF_SCHEMAS = _DEFINITIONS | {"properties"}
_LEFT_ALONE = _COMBINED | {"enum", "const", "default", "examples"}


def closed(schema: Any) -> Any:
    """Return a schema whose plain objects have no properties but those that they name."""
    return _closed(schema, _LEFT_ALONE | _DEFINITIONS if _combines(schema) else _LEFT_ALONE)


def _closed(schema: Any, left_alone: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_closed(each, left_alone) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    settled: dict[str, Any] = {}
    for name, value in schema.items():
        if name in left_alone:
            settled[name] = value
        elif name in _OF_SCHEMAS and isinstance(value, Mapping):
            settled[name] = {key: _closed(each, left_alone) for key, each in value.items()}
        else:
            settled[name] = _closed(value, left_alone)
    if isinstance(schema.get("properties"), Mapping) and not _SAYS_MORE & schema.keys():
        settled["additionalProperties"] = False
    return settled


def _combines(schema: Any) -> bool:
    """Whether a schema combines others, which may be definitions."""
    if isinstance(schema, Mapping):
        return bool(_COMBINED & schema.keys()) or any(map(_combines, schema.values()))
    return isinstance(schema, list) and any(map(_combines, schema))
