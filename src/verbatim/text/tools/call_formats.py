"""The formats of tool calls: their tags, and the readers of calls that are not one JSON object.

In: the text of a call, and the tools as name -> JSON schema of the parameters. Out: names with
arguments; nothing if any part of the text does not fit, so that the text stays text.

    qwen, seed   <function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>
    glm          NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>
    mistral      [TOOL_CALLS]NAME[ARGS]{...}, repeated for further calls
    gemma, lfm2  see call_values.py

The values of the XML formats have no type: the schema of the parameter decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from verbatim.base.json_io import JsonMapping, keep_pairs, loads_lossless
from verbatim.text.tools.call_values import Call, read_gemma, read_python

Tools = JsonMapping  # name -> JSON schema of the parameters

FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
# A value may contain its own closing tag. It ends at the one that precedes the next key or the end.
PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
)
ARGUMENT = re.compile(
    r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
# Mistral Small 3.2 writes an id before the arguments. Every call gets one of ours instead.
MARKED = re.compile(r"\s*(?:\[TOOL_CALLS\]\s*)?([^\s\[\]{}]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*")
LITERALS = {"True": True, "False": False, "None": None}  # as the chat template writes earlier calls
TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", float: "number"}


def read_xml(body: str, tools: Tools) -> list[Call]:
    """The call of Qwen3-Coder, GLM or Seed-OSS between its tags; [] if it is none."""
    if found := FUNCTION.fullmatch(body):
        name, pattern, rest = found[1].strip(), PARAMETER, found[2]
    else:
        name, tag, rest = body.partition("<arg_key>")
        name, pattern, rest = name.strip(), ARGUMENT, tag + rest
    if name not in tools:
        return []
    pairs, at, rest = [], 0, rest.strip()
    while at < len(rest):
        item = pattern.match(rest, at)
        if item is None:
            return []
        key = item[1].strip()
        pairs.append((key, typed_value(item[2], tools[name], key)))
        at = item.end()
    return [(name, keep_pairs(pairs))]


def read_marked(text: str, tools: Tools) -> list[Call]:
    """Mistral's calls: all of them, or []."""
    calls: list[Call] = []
    at, text = 0, text.rstrip()
    while at < len(text):
        head = MARKED.match(text, at)
        if head is None or head[1] not in tools:
            return []
        try:
            _, at = json.JSONDecoder().raw_decode(text, head.end())
            arguments = loads_lossless(text[head.end() : at])
        except (ValueError, RecursionError):
            return []
        if not isinstance(arguments, dict):
            return []
        calls.append((head[1], arguments))
    return calls


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Where a call stands in the output, and how it is read if it is not JSON."""

    open: str
    close: str  # "": calls end with the output
    read: Callable[[str, Tools], list[Call]] | None = None
    needs_close: bool = False  # only the closing tag shows that a call is complete
    control: bool = False  # the tags are control tokens


_read_functiongemma = partial(read_gemma, quote="<escape>")
HERMES = CallFormat("<tool_call>", "</tool_call>", read_xml, needs_close=True)
CALL_FORMATS = {
    "hermes": HERMES,
    "llama3": HERMES,
    "json": HERMES,
    "mistral": CallFormat("[TOOL_CALLS]", "", read_marked, control=True),
    "gemma4": CallFormat(
        "<|tool_call>", "<tool_call|>", partial(read_gemma, quote='<|"|>'), control=True
    ),
    "functiongemma": CallFormat(
        "<start_function_call>", "<end_function_call>", _read_functiongemma, control=True
    ),
    "lfm2": CallFormat("<|tool_call_start|>", "<|tool_call_end|>", read_python, control=True),
    "granite": CallFormat("<|tool_call|>", "", control=True),
    "seed": CallFormat(
        "<seed:tool_call>", "</seed:tool_call>", read_xml, needs_close=True, control=True
    ),
}


# ------------------------------------------------------------------------------------------- values


def typed_value(text: str, parameters: object, key: str) -> object:
    """The value of a parameter that was written without quotes: a string, or JSON of another type.

    >>> schema = {"properties": {"zip": {"type": "string"}, "n": {"type": ["string", "integer"]}}}
    >>> typed_value("12", schema, "zip"), typed_value("12", schema, "n")
    ('12', 12)
    """
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    types = _types(schema, parameters, set())
    if types == {"string"}:
        return text
    word = text.strip()
    if word in LITERALS and TYPES[type(LITERALS[word])] in types:
        return LITERALS[word]
    try:
        value = loads_lossless(text)
    except ValueError:
        return text
    return text if "string" in types and not _type_of(value) & (types - {"string"}) else value


def _types(schema: object, root: object, seen: set[str], depth: int = 8) -> set[str]:
    """The types that a schema allows, as far as it names them; empty: unknown. Each reference is
    followed once (`seen`), so that many to one schema do not multiply."""
    if not isinstance(schema, dict) or not depth:
        return set()
    named = schema.get("type")
    found = {t for t in (_items(named) or [named]) if isinstance(t, str)}
    for value in [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        found |= _type_of(value)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for member in _items(schema.get(keyword)):
            found |= _types(member, root, seen, depth - 1)
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#/") and target not in seen:
        seen.add(target)
        place = root
        for part in target[2:].split("/"):
            place = place.get(part) if isinstance(place, dict) else None
        found |= _types(place, root, seen, depth - 1)
    return found


def _items(value: object) -> list[object]:
    """A list; empty for any other value, which the client's schema should not have here."""
    return value if isinstance(value, list) else []


def _type_of(value: object) -> set[str]:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"integer", "number"}
    return {TYPES.get(type(value), "object")}
