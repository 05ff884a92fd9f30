"""/openapi.json, made from the tables and models that check the requests: what it promises is what the code does."""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from verbatim import __version__
from verbatim.server.api.api_errors import CODES
from verbatim.server.api.field_table import PROTOCOLS, QUERIES
from verbatim.server.api.validate import request_model

ERROR_STATUS = {
    "400": "a mistake in the request; `param` names the field",
    "401": "no key, or a wrong one",
    "403": "the Host header is not allowed",
    "404": "no such model or object",
    "408": "too slow",
    "413": "body too large",
    "415": "not application/json",
    "429": "too many requests; see Retry-After",
    "500": "a fault of ours",
    "503": "starting, restarting or draining; see Retry-After",
}


@functools.cache
def document(routes: tuple[tuple[str, str], ...], names: tuple[str, ...]) -> dict[str, Any]:
    """`routes`: (path, method) of every route. `names`: the models of this server, which a request may name."""
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
        "info": {"title": "Verbatim", "version": __version__, "description": "The same tokens, always. Unknown and refused fields are 400s that name them."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }  # fmt: skip


def _operation(path: str, plain: str, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{plain.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {
            "200": {
                "description": "the answer; text/event-stream (Ollama: application/x-ndjson) when streamed"
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
        if name != "metadata[KEY]":  # a family of names, which OpenAPI cannot spell
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
            operation["description"] = "Refused by name: " + "; ".join(refused)
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
                    {"type": "string", "description": "on /api/ routes, as Ollama spells it"},
                ]
            }
        },
        "required": ["error"],
    }
