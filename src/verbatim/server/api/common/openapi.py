"""/openapi.json, generated from the field tables and pydantic models that validate requests."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from verbatim import __version__
from verbatim.server.api.common.field_table import PROTOCOLS, QUERIES
from verbatim.server.api.common.validate import request_model
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


@functools.cache
def document(routes: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> dict[str, Any]:
    """The OpenAPI document. `routes`: (path, method) pairs; `names`: the served model names."""
    _, schemas = models_json_schema(
        [(request_model(route), "validation") for route in PROTOCOLS],
        ref_template="#/components/schemas/{model}",
    )
    components = dict(schemas.get("$defs", {}))
    for title, table in PROTOCOLS.values():
        if "model" not in table:
            continue
        model = components[title]["properties"]["model"]
        spelled = model["anyOf"][0] if "anyOf" in model else model
        spelled.update({"enum": list(names)} if names else {})
    components["Error"] = _error_schema()
    paths: dict[str, Any] = {}
    for path, method in routes:
        plain = path.replace(":path", "")
        paths.setdefault(plain, {})[method.lower()] = _operation(path, plain, method)
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


def _operation(path: str, plain: str, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": method.lower() + plain.translate(str.maketrans("/", "_", "{}")),
        "responses": {
            "200": {
                "description": "the response; text/event-stream when streamed "
                "(Ollama: application/x-ndjson)"
            }
        },
    }
    for status, text in ERROR_STATUS.items():
        operation["responses"][status] = {
            "description": text,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    parameters = (
        []
        if "{id}" not in plain
        else [_parameter("id", "path", {"type": "string", "minLength": 1}, required=True)]
    )
    for name, rule in QUERIES.get(f"{method} {path}", {}).items():
        if name != "metadata[KEY]":  # a family of names, which OpenAPI cannot express
            parameters.append(
                _parameter(
                    name,
                    "query",
                    {"type": "string", "pattern": f"^({rule.pattern})$"},
                    description=rule.help,
                )
            )
    if parameters:
        operation["parameters"] = parameters
    if path in PROTOCOLS and method == "POST":
        schema = {"$ref": f"#/components/schemas/{PROTOCOLS[path][0]}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
        refused = [
            f"`{name}` ({rule.help})"
            for name, rule in PROTOCOLS[path][1].items()
            if rule.kind == "refused"
        ]
        if refused:
            operation["description"] = "Not supported: " + "; ".join(refused)
    return operation


def _parameter(name: str, where: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "in": where, "schema": schema, **more}


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    return {
        "type": "object",
        "properties": {
            "error": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": text,
                            "code": {"type": "string", "enum": sorted(CODES)},
                        },
                        "required": ["message", "type", "param", "code"],
                    },
                    {"type": "string", "description": "on /api/ routes, Ollama's error shape"},
                ]
            }
        },
        "required": ["error"],
    }
