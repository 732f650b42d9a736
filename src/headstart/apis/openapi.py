"""/openapi.json, generated from the table of routes and the models of their bodies."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headstart.apis.answer_schemas import RouteResponseSchemas, Schema
from headstart.openai.request_model import RequestModel

_NULL: Schema = {"type": "null"}


def request_body_schema(*models: type[RequestModel]) -> Schema:
    """Return the OpenAPI description of a body that is one of `models`."""
    schemas = [_inlined(schema := model.model_json_schema(), schema.get("$defs", {})) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@dataclass(frozen=True, slots=True)
class RouteOperation:
    """A route as /openapi.json describes it; the body is one of `bodies`."""

    method: str
    path: str
    operation_id: str
    summary: str
    answers: RouteResponseSchemas
    bodies: tuple[type[RequestModel], ...] = ()


def openapi_document(title: str, version: str, operations: Iterable[RouteOperation]) -> Schema:
    """Return the OpenAPI document of these operations."""
    paths: Schema = {}
    for operation in operations:
        described: Schema = {"summary": operation.summary, "description": operation.summary}
        described |= {"operationId": operation.operation_id, "responses": response_descriptions(operation.answers)}
        described |= request_body_schema(*operation.bodies) if operation.bodies else {}
        paths.setdefault(operation.path.replace(":path}", "}"), {})[operation.method.lower()] = described
    return {"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": paths}


def response_descriptions(answers: RouteResponseSchemas) -> dict[str, Schema]:
    """Return the OpenAPI description of a route's responses."""
    success = answers.success or {"type": "string", "description": "Text."}
    content: Schema = {"text/plain": {"schema": {"type": "string"}}}
    if answers.success is not None:
        content = {"application/json": {"schema": success}}
    if answers.event is not None:
        content["text/event-stream"] = {"schema": answers.event}
    error = {"application/json": {"schema": answers.error}}
    return {str(answers.status): _described(success, content), "default": _described(answers.error, error)}


def _described(schema: Schema, content: Schema) -> Schema:
    return {"description": schema["description"].split("\n")[0], "content": content}


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
