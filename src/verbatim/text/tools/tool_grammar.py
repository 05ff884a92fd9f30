"""The schema and the grammar of tool calls: what an output may be where calls are forced, or are
allowed beside text.

In: tools in OpenAI's form and the model's format (tool_format.py). Out: a JSON schema, or a Lark
grammar. Calls in the output are read by tool_parser.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import SCHEMA_PART
from verbatim.text.tools.call_formats import CALL_FORMATS, HERMES

OPEN, CLOSE = HERMES.open, HERMES.close


def compiled_tools(tools: Sequence[JsonMapping], name: str | None) -> list[JsonMapping]:
    """The tools whose schemas the grammar of a forced call has: the named tool or all of them, and
    every strict tool, because a schema that is refused is refused under each tool_choice."""
    return [
        tool
        for tool in tools
        if name in (None, tool["function"]["name"]) or tool["function"].get("strict")
    ]


def forced_schema(
    tools: Sequence[JsonMapping], name: str | None, *, place: str = "#", many: bool = False
) -> JsonObject:
    """A JSON schema, to stand at `place`, that allows only valid calls: of the named tool, or of
    any tool. `many`: a list of them, at least one."""
    if many:
        call = forced_schema(tools, name, place=f"{place}/items")
        return {"type": "array", "items": call, "minItems": 1}
    tools = compiled_tools(tools, name)
    places = [f"{place}/anyOf/{i}" for i in range(len(tools))] if len(tools) > 1 else [place]
    calls = [_call_schema(t["function"], p, name) for t, p in zip(tools, places, strict=True)]
    return {"anyOf": calls} if len(calls) > 1 else calls[0]


def _call_schema(function: JsonMapping, place: str, named: str | None = None) -> JsonObject:
    """The calls of a function. Where only another one may be called there are none, and the schema
    of the arguments is compiled nevertheless."""
    arguments = _rebase_refs(
        function.get("parameters") or {"type": "object"}, f"{place}/properties/arguments"
    )
    properties: JsonObject = {
        "name": {"const": function["name"]},
        "arguments": {**arguments, SCHEMA_PART: True},
    }
    if named not in (None, function["name"]):
        properties["never"] = False
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT_PLACE = "#/$defs/text"  # the place of the schema of a text beside calls


# keywords whose members are schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")  # keywords whose value is never a schema


def _rebase_refs(schema: Any, place: str) -> Any:
    """Rebase the references (`#`, `#/$defs/X`) of a root schema that is now nested at `place`."""
    if isinstance(schema, list):
        return [_rebase_refs(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: JsonObject = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = place + value[1:]
        elif key in BY_NAME and isinstance(value, dict):
            out[key] = {name: _rebase_refs(item, place) for name, item in value.items()}
        else:
            out[key] = value if key in VALUES else _rebase_refs(value, place)
    return out


def call_or_text(
    tools: Sequence[JsonMapping], form: str, *, single: bool, text: Any = None
) -> str | None:
    """A grammar that allows valid calls in the model's format, or text without calls.

    With `text`, the alternative is JSON under that schema. None for formats whose tags are control
    tokens, which a grammar cannot express."""
    if CALL_FORMATS[form].control:
        return None
    if form == "llama3":  # a call has no tags, and several are a list
        options: list[Any] = [
            _call_schema(tool["function"], f"#/anyOf/{i}") for i, tool in enumerate(tools)
        ]
        if not single:
            options.append(forced_schema(tools, None, place=f"#/anyOf/{len(options)}", many=True))
        if text is not None:
            rule = _json_rule("body", {"anyOf": [*options, {"$ref": TEXT_PLACE}], **_text(text)})
            return _lark([("", "", "body")], f"start: body\n{rule}")
        free = "start: TEXT? | body\nTEXT: /[^{\\[](.|\\n)*/\n"
        return _lark([("", "{[", "body")], free + _json_rule("body", {"anyOf": options}))
    documents = [(f"{OPEN}\n", "", "body")]
    if text is None:
        plain = f"text: TEXT?\nTEXT: /[^<](.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/\n"
    else:
        plain = _json_rule("text", {"$ref": TEXT_PLACE, **_text(text)})
        documents.append(("", "", "text"))
    calls = "calls: call\n" if single else 'calls: call ("\\n" call)*\n'
    call = f'call: "{OPEN}\\n" body "\\n{CLOSE}"\n'
    body = _json_rule("body", forced_schema(tools, None))
    return _lark(documents, f"start: text | calls\n{calls}{call}{body}{plain}")


def _text(schema: Any) -> JsonObject:
    """The definition of a text, at the place TEXT_PLACE."""
    if isinstance(schema, dict):
        schema = {**_rebase_refs(schema, TEXT_PLACE), SCHEMA_PART: True}
    return {"$defs": {"text": schema}}


def _json_rule(name: str, schema: JsonObject) -> str:
    return f"{name}: %json {json.dumps(schema)}\n"


def _lark(documents: list[tuple[str, str, str]], rules: str) -> str:
    """A grammar that names the places of its documents, whose schemas the engine then follows
    beyond what a grammar can enforce: (text before, first characters, rule) of each."""
    return f"// documents: {json.dumps(documents)}\n{rules}"
