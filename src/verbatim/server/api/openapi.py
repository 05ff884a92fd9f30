"""/openapi.json, generated from the field tables and pydantic models that validate requests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from verbatim import __version__
from verbatim.base.json_io import JsonObject
from verbatim.server.api.common.request_context import FORM
from verbatim.server.api.common.route import ApiRoute
from verbatim.server.problem import CODES

ERROR_STATUS = {
    "400": "the request is not valid; `param` names the field",
    "401": "the API key is missing or wrong",
    "403": "the Host header is not allowed",
    "404": "the model or object does not exist",
    "408": "the time limit was exceeded",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "too many requests; see Retry-After",
    "500": "a server error",
    "503": "the server is starting, restarting or draining; see Retry-After",
}
STREAMED = "the response; text/event-stream when streamed (Ollama: application/x-ndjson)"


@functools.cache
def document(routes: Sequence[ApiRoute], names: tuple[str, ...]) -> JsonObject:
    """The OpenAPI document. `names`: the served model names."""
    bodies = [route.body for route in routes if route.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    components = dict(schemas.get("$defs", {}))
    for body in bodies:
        if "model" not in body.model_fields:
            continue
        model = components[body.__name__]["properties"]["model"]
        spelled = model["anyOf"][0] if "anyOf" in model else model
        spelled.update({"enum": list(names)} if names else {})
    components["Error"] = _error_schema()
    paths: JsonObject = {}
    for route in routes:
        paths.setdefault(route.shown_path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Verbatim",
            "version": __version__,
            "description": "The same tokens, always. Unknown and refused fields get a 400 "
            "that names the field.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: ApiRoute) -> JsonObject:
    plain = route.shown_path
    operation: JsonObject = {
        "operationId": route.method.lower() + plain.translate(str.maketrans("/", "_", "{}")),
        "responses": {"200": {"description": STREAMED}},
    }
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, text in ERROR_STATUS.items():
        operation["responses"][status] = {"description": text, "content": error}
    parameters = []
    if "{id}" in plain:
        schema: JsonObject = {"type": "string", "minLength": 1}
        parameters = [_parameter("id", "path", schema, required=True)]
    for name, rule in route.queries.items():
        if name != "metadata[KEY]":  # a family of names, which OpenAPI cannot express
            schema = {"type": "string", "pattern": f"^({rule.pattern})$"}
            parameters.append(_parameter(name, "query", schema, description=rule.help))
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {FORM if route.is_form else "application/json": {"schema": schema}},
        }
        refused = [
            f"`{name}` ({rule.help})"
            for name, rule in route.fields.items()
            if rule.kind == "refused"
        ]
        if refused:
            operation["description"] = "Not supported: " + "; ".join(refused)
    return operation


def _parameter(name: str, where: str, schema: JsonObject, **more: Any) -> JsonObject:
    return {"name": name, "in": where, "schema": schema, **more}


def _error_schema() -> JsonObject:
    text = {"type": ["string", "null"]}
    code = {"type": "string", "enum": sorted(CODES)}
    members = {"message": {"type": "string"}, "type": {"type": "string"}}
    error = _object({**members, "param": text, "code": code})
    ollama = {"type": "string", "description": "on /api/ routes, Ollama's error shape"}
    return _object({"error": {"anyOf": [error, ollama]}})


def _object(members: JsonObject) -> JsonObject:
    return {"type": "object", "properties": members, "required": list(members)}
