"""Bounds for JSON schemas, so that a model that knows nothing still ends its answers.

`bounded` tightens a schema: every value of the result is a value of the original. Answers are validated against the
original. Where a keyword gives another subschema a meaning beyond "and" and "or" (oneOf, not, if), nothing is changed.
"""

from typing import Any

MAX_LENGTH = 6  # characters of a string
MAX_ITEMS = 3
NUMBER = {"minimum": -999, "maximum": 999}
SCALAR = {"anyOf": [{"type": "integer", **NUMBER}, {"type": "boolean"}, {"type": "string", "maxLength": MAX_LENGTH}]}
DELICATE = ("oneOf", "not", "if", "unevaluatedItems", "unevaluatedProperties", "contains", "dependentSchemas")
FIXED = ("const", "enum", "$ref", "format", "pattern")  # the value is finite, or bounded elsewhere


def bounded(schema: Any) -> Any:
    """Return a schema whose values are bounded where that is possible, else the schema itself."""
    if schema is True or schema == {}:
        return SCALAR
    if not isinstance(schema, dict) or any(keyword in schema for keyword in DELICATE):
        return schema
    result = dict(schema)
    for keyword in ("allOf", "anyOf", "prefixItems"):
        if isinstance(schema.get(keyword), list):
            result[keyword] = [bounded(member) if keyword != "allOf" else member for member in schema[keyword]]
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(keyword), dict):
            result[keyword] = {name: bounded(member) for name, member in schema[keyword].items()}
    for keyword in ("items", "additionalProperties", "additionalItems"):
        if isinstance(schema.get(keyword), dict | bool):
            result[keyword] = bounded(schema[keyword])
    if not any(keyword in schema for keyword in FIXED):
        _bound_values(result)
    return result


def _bound_values(schema: dict[str, Any]) -> None:
    """Set the keywords of one level; they hold for values of their own type only."""
    schema["maxLength"] = min(schema.get("maxLength", 10**9), max(schema.get("minLength", 0), MAX_LENGTH))
    schema["maxItems"] = min(schema.get("maxItems", 10**9), max(schema.get("minItems", 0), MAX_ITEMS))
    if not {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} & schema.keys():
        schema |= NUMBER
    if "items" not in schema:
        schema["items"] = SCALAR
    is_alone = not {"allOf", "anyOf", "$ref"} & schema.keys()
    if is_alone and "additionalProperties" not in schema:
        schema["additionalProperties"] = SCALAR
    if is_alone and not schema.get("properties") and "maxProperties" not in schema:
        schema["maxProperties"] = max(schema.get("minProperties", 0), len(schema.get("required", ())), 2)
