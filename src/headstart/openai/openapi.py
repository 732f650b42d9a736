"""Request bodies for /openapi.json, generated from the models that validate them."""

from typing import Any

from headstart.openai.request_model import RequestModel

Schema = dict[str, Any]
_NULL: Schema = {"type": "null"}


def request_body(*models: type[RequestModel]) -> Schema:
    """Return the OpenAPI description of a body that is one of `models`."""
    schemas = [_inlined(schema := model.model_json_schema(), schema.get("$defs", {})) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: Schema) -> Any:
    """Return a schema without references, titles and empty defaults; every optional property may be null."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]] | {key: schema[key] for key in schema if key != "$ref"}
    kept: Schema = {key: _inlined(value, definitions) for key, value in schema.items() if key not in ("$defs", "title")}
    if not isinstance(kept.get("default", 0), str | int | float):
        del kept["default"]
    if "properties" in kept:
        required = kept.get("required", ())
        properties = kept["properties"].items()
        kept["properties"] = {name: one if name in required else _nullable(one) for name, one in properties}
    return kept


def _nullable(schema: Schema) -> Schema:
    """Return a schema that takes null as well."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != _NULL]
    if len(kinds) > 1:
        return schema | {"anyOf": [*kinds, _NULL]}
    if kinds:
        schema = kinds[0] | {key: value for key, value in schema.items() if key != "anyOf"}
    if "enum" in schema:
        schema = schema | {"enum": [*schema["enum"], None]}
    return schema | {"type": [schema["type"], "null"]}
