"""Tools of a chat request: into the prompt, and into a grammar of calls.

In: the request's tools and messages, the model's format (tool_format.py). Out: messages for the
chat template, the schema of a call that is forced or allowed, and errors that name the tool. Calls
in the output are text/tools/tool_parser.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.base.json_io import JsonMapping, JsonObject, loads_strict
from verbatim.base.params import SCHEMA_PART
from verbatim.server.problem import Problem
from verbatim.server.process.messages import ModelFacts
from verbatim.text.tools.call_formats import CALL_FORMATS, HERMES
from verbatim.text.tools.redundant_names import redundant_names

OPEN, CLOSE = HERMES.open, HERMES.close
PREAMBLE = (
    "You can call these functions:\n{tools}\n"
    "To call one, answer with a JSON object between tags:\n"
    '<tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>'
)


# ------------------------------------------------------------------------- to the template


def plain_text(content: Any) -> str:
    """Content as one string. Text parts are joined without a separator, as OpenAI does."""
    if isinstance(content, list):
        return "".join(part.get("text", part.get("refusal", "")) for part in content)
    return content or ""


def template_messages(
    messages: Sequence[JsonMapping], tools: Sequence[JsonMapping], facts: ModelFacts
) -> list[JsonObject]:
    """OpenAI messages in the form that chat templates expect.

    If the template does not support tools, a system message describes them. If it does not support
    earlier calls, they are rendered as text. So nothing that the client sent is dropped."""
    out: list[JsonObject] = []
    redundant = redundant_names(messages)
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        made: JsonObject = {
            "role": role,
            "content": plain_text(message.get("content")) + message.get("refusal", ""),
        }
        # Templates that do not read these keys reject them (text/templates/chat_template.py).
        for key in ("name", "reasoning_content"):
            if key in message:
                made[key] = message[key]
        calls = message.get("tool_calls") or []
        if calls and facts.template_calls:
            made["tool_calls"] = [
                {
                    "id": c["id"],
                    "type": "function",
                    "function": {
                        "name": c["function"]["name"],
                        "arguments": _object(c["function"]["arguments"]),
                    },
                }
                for c in calls
            ]
            if message.get("content") is None:
                made["content"] = None  # some templates detect calls by content None
        elif calls:
            made["content"] += "".join(
                f"{OPEN}\n{_call_json(c['function'])}\n{CLOSE}" for c in calls
            )
        if "tool_call_id" in message and facts.template_calls:
            made["tool_call_id"] = message["tool_call_id"]
        elif len(out) in redundant:
            del made["name"]  # the rendered call already has the name
        out.append(made)
    if tools and not facts.template_tools:
        _add_tools_preamble(out, tools)
    return out


def _add_tools_preamble(messages: list[JsonObject], tools: Sequence[JsonMapping]) -> None:
    text = PREAMBLE.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system", "content": text})


def _object(arguments: str) -> Any:
    """Arguments as a JSON value for the template; the original text if parsing would lose data."""
    try:
        return loads_strict(arguments)
    except ValueError:
        return arguments


def _call_json(function: JsonMapping) -> str:
    return json.dumps(
        {"name": function["name"], "arguments": _object(function["arguments"])}, ensure_ascii=False
    )


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


# The place of a tool's parameters in a schema of calls, and the index among several tools
_PARAMETERS = re.compile(
    r"#(?:/anyOf/\d+(?=/items))?(?:/items)?(?:/anyOf/(\d+))?/properties/arguments"
)
_TEXT = "#/$defs/text"  # the place of the schema of a text beside calls


def name_tool(problem: Problem, tools: Sequence[JsonMapping], names: Mapping[str, str]) -> Problem:
    """An error about the schema of calls as one about the parameters of a tool, or about the
    format of a text beside them. `tools`: those whose schemas are compiled, with their places in
    the request as `place`. `names`: the client's field names, and "text" where a text has a
    format."""
    if problem.param != "tools":
        return problem
    why = problem.message.removeprefix("tools: ")
    for ours in ("grammar: ", "json_schema: ", "%json: "):
        why = why.removeprefix(ours)
    found = _PARAMETERS.search(why)
    if found is None and _TEXT in why:
        where, why = names.get("text", "response_format"), why.replace(_TEXT, "#")
    elif found is None and (len(tools) > 1 or "text" in names):
        return problem
    else:
        tool = tools[int(found[1] or 0) if found else 0]
        where = f"tools[{tool['place']}].{names.get('tools.parameters', 'function.parameters')}"
        why = f"of the tool {tool['function']['name']!r}, {_PARAMETERS.sub('#', why)}"
    return Problem(problem.code, f"{where}: {why}", where, problem.retry_after)


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
            rule = _json_rule("body", {"anyOf": [*options, {"$ref": _TEXT}], **_text(text)})
            return _lark([("", "", "body")], f"start: body\n{rule}")
        free = "start: TEXT? | body\nTEXT: /[^{\\[](.|\\n)*/\n"
        return _lark([("", "{[", "body")], free + _json_rule("body", {"anyOf": options}))
    documents = [(f"{OPEN}\n", "", "body")]
    if text is None:
        plain = f"text: TEXT?\nTEXT: /[^<](.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/\n"
    else:
        plain = _json_rule("text", {"$ref": _TEXT, **_text(text)})
        documents.append(("", "", "text"))
    calls = "calls: call\n" if single else 'calls: call ("\\n" call)*\n'
    call = f'call: "{OPEN}\\n" body "\\n{CLOSE}"\n'
    body = _json_rule("body", forced_schema(tools, None))
    return _lark(documents, f"start: text | calls\n{calls}{call}{body}{plain}")


def _text(schema: Any) -> JsonObject:
    """The definition of a text, at the place _TEXT."""
    if isinstance(schema, dict):
        schema = {**_rebase_refs(schema, _TEXT), SCHEMA_PART: True}
    return {"$defs": {"text": schema}}


def _json_rule(name: str, schema: JsonObject) -> str:
    return f"{name}: %json {json.dumps(schema)}\n"


def _lark(documents: list[tuple[str, str, str]], rules: str) -> str:
    """A grammar that names the places of its documents, whose schemas the engine then follows
    beyond what a grammar can enforce: (text before, first characters, rule) of each."""
    return f"// documents: {json.dumps(documents)}\n{rules}"
