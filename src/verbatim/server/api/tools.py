"""Tools: how a model is told of them, and how its calls are read back out of its text.

In: the request's tools and messages, the model's format (server/api/tool_format.py), then the answer's text piece by piece.
Out: messages for the chat template, and text and calls as they become certain. A call that cannot be read stays text: nothing is lost.

    hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama3   {"name": ..., "parameters": {...}}          any format: an answer that is nothing but such an object, or a list of them
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.server.json_io import sound, spelled, written
from verbatim.server.process.messages import ModelFacts
from verbatim.text.tool_calls import repeats_call

OPEN, CLOSE, MISTRAL = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
PREAMBLE = (
    "You can call these functions:\n{tools}\n"
    'To call one, answer with a JSON object between tags:\n<tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON text, as OpenAI's API carries it
    id: str = field(default_factory=lambda: "call_" + secrets.token_hex(12))

    @property
    def text(self) -> str:
        return f'{{"name": {json.dumps(self.name, ensure_ascii=False)}, "arguments": {self.arguments}}}'


# ---------------------------------------------------------------------------------------------------- to the template


def plain_text(content: Any) -> str:
    """Text parts are joined without anything between them, as OpenAI's are."""
    if isinstance(content, list):
        return "".join(part.get("text", part.get("refusal", "")) for part in content)
    return content or ""


def template_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], facts: ModelFacts
) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates expect them. Where the template knows no tools, they are told in a system message; where it
    knows no earlier calls (it may know tools and not these), they are spelled out as text. So nothing the client sent is dropped."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        made: dict[str, Any] = {
            "role": role,
            "content": plain_text(message.get("content")) + message.get("refusal", ""),
        }
        for key in (
            "name",
            "reasoning_content",
        ):  # for templates that have a place for them; the others refuse them (text/chat_template.py)
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
                made["content"] = None  # a template may tell a call from an answer by that
        elif calls:
            made["content"] += "".join(f"{OPEN}\n{_spell(c['function'])}\n{CLOSE}" for c in calls)
        if "tool_call_id" in message and facts.template_calls:
            made["tool_call_id"] = message["tool_call_id"]
        elif role == "tool" and repeats_call(messages, len(out)):
            made.pop("name", None)  # the call, which is spelled out above it, has said it
        out.append(made)
    if tools and not facts.template_tools:
        _tell(out, tools)
    return out


def _tell(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    text = PREAMBLE.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    if messages and messages[0]["role"] == "system":
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.insert(0, {"role": "system", "content": text})


def _object(arguments: str) -> Any:
    """Arguments as templates want them; those that could not be handed on without loss stay the text that they are."""
    try:
        return sound(arguments)
    except ValueError:
        return arguments


def _spell(function: Mapping[str, Any]) -> str:
    return json.dumps(
        {"name": function["name"], "arguments": _object(function["arguments"])}, ensure_ascii=False
    )


def forced_schema(tools: Sequence[Mapping[str, Any]], name: str | None) -> dict[str, Any]:
    """The schema whose every answer is a valid call: of the named tool, or of any."""
    functions = [
        tool["function"] for tool in tools if name is None or tool["function"]["name"] == name
    ]
    if len(functions) == 1:
        return _call_shape(functions[0], "#")
    return {
        "anyOf": [_call_shape(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]
    }


def _call_shape(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = _moved(
        function.get("parameters") or {"type": "object"}, f"{place}/properties/arguments"
    )
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


BY_NAME = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)  # their members are schemas
VALUES = ("const", "enum", "default", "examples")  # no schemas, whatever they look like


def _moved(schema: Any, place: str) -> Any:
    """A schema that was its own root and now stands at `place`: its references (`#`, `#/$defs/X`) still mean what they meant."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = place + value[1:]
        elif key in BY_NAME and isinstance(value, dict):
            out[key] = {name: _moved(item, place) for name, item in value.items()}
        else:
            out[key] = value if key in VALUES else _moved(value, place)
    return out


def call_or_text(
    tools: Sequence[Mapping[str, Any]], form: str, *, single: bool, text: Any = None
) -> str | None:
    """A grammar whose every answer is either valid calls in the model's format, or text that holds none (or, with `text`, JSON under that
    schema). None: a format whose marks are control tokens cannot be spelled in a grammar."""
    if form == "mistral":
        return None
    body = f"body: %json {json.dumps(forced_schema(tools, None))}\n"
    plain = f"text: %json {json.dumps(text)}\n" if text is not None else "text: TEXT?\n"
    if form == "llama3":
        free = "" if text is not None else "TEXT: /[^{\\[](.|\\n)*/\n"
        return f"start: text | body\n{body}{plain}{free}"
    calls = "calls: call\n" if single else 'calls: call ("\\n" call)*\n'
    call = f'call: "{OPEN}\\n" body "\\n{CLOSE}"\n'
    free = "" if text is not None else f"TEXT: /[^<](.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/\n"
    return f"start: text | calls\n{calls}{call}{body}{plain}{free}"


# ------------------------------------------------------------------------------------------------------- from the text


def read_calls(text: str, names: set[str]) -> list[Call]:
    """Calls in a piece of JSON: an object or a list of objects with a known name and an object of arguments. [] if it is anything else."""
    try:
        data = written(text)
    except ValueError:
        return []
    calls = []
    for item in data if isinstance(data, list) else [data]:
        if (
            not isinstance(item, dict)
            or not isinstance(item.get("name"), str)
            or item["name"] not in names
        ):
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):  # some models write them as a text
            try:
                arguments = written(arguments)
            except ValueError:
                return []
        if not isinstance(arguments, dict):
            return []
        calls.append(Call(item["name"], spelled(arguments)))
    return calls


class ToolParser:
    """push(text) and finish() give ("text", str) and ("call", Call) in order; their texts and the calls' spellings make up the answer."""

    def __init__(
        self,
        form: str,
        names: set[str],
        *,
        forced: bool = False,
        single: bool = False,
        midway: bool = False,
    ) -> None:
        self._open, self._close = (MISTRAL, "") if form == "mistral" else (OPEN, CLOSE)
        self._names = names
        self._single = single
        self._held = ""
        self._at = 0  # where in the answer that begins
        self._inside = False
        self._called = False  # a call has just ended
        self._whole = forced  # hold everything: only the end can tell
        self._begun = forced or midway  # midway: the text goes on from one that was given
        self.calls = 0
        self.spans: list[
            tuple[int, int]
        ] = []  # where in the answer each text stood that was given out

    def push(self, text: str) -> list[tuple[str, Any]]:
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if not start or (len(start) < len(self._open) and self._open.startswith(start)):
                return []  # too early to say what this answer is
            self._begun = True
            self._whole = start[0] in "{[" and not start.startswith(self._open)
        return [] if self._whole else self._scan()

    def finish(self) -> list[tuple[str, Any]]:
        """The answer ended: what is held is a whole call, or text after all."""
        if not self._held:
            return []
        body = self._held.removeprefix(self._open) if self._inside else self._held
        found = (
            self._admit(read_calls(body.strip(), self._names))
            if self._whole or self._inside
            else []
        )
        if not found:
            return [self._text(len(self._held))]
        self._take(len(self._held))
        return found

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        self._at += size
        return taken

    def _text(self, size: int) -> tuple[str, str]:
        self.spans.append((self._at, self._at + size))
        return "text", self._take(size)

    def _scan(self) -> list[tuple[str, Any]]:
        out: list[tuple[str, Any]] = []
        while self._held:
            if self._called:  # the line ends between calls are the format's, not the answer's
                self._take(len(self._held) - len(self._held.lstrip("\n")))
                if not self._held:
                    break
                self._called = False
            if not self._inside:
                at = self._held.find(self._open)
                safe = at if at >= 0 else len(self._held) - _overlap(self._held, self._open)
                if safe:
                    out.append(self._text(safe))
                if at < 0:
                    break
                self._inside = True
            end = self._held.find(self._close) if self._close else -1
            if end < 0:
                break
            found = self._admit(read_calls(self._held[len(self._open) : end].strip(), self._names))
            size = end + len(self._close)
            if found:
                self._take(size)
            out += found or [self._text(size)]
            self._inside, self._called = False, bool(found)
        return out

    def _admit(self, calls: list[Call]) -> list[tuple[str, Any]]:
        """parallel_tool_calls: false means one call an answer; a second one stays text, even one of the same list."""
        if self._single and self.calls:
            return []
        kept = calls[:1] if self._single else calls
        self.calls += len(kept)
        self.spans += [(self._at, self._at)] * (
            len(calls) - len(kept)
        )  # texts of ours: no token is in them
        return [("call", call) for call in kept] + [
            ("text", call.text) for call in calls[len(kept) :]
        ]


def joined(found: Sequence[tuple[str, Any]]) -> tuple[str, list[Call]]:
    """A whole answer's text and calls."""
    return "".join(v for kind, v in found if kind == "text"), [
        v for kind, v in found if kind == "call"
    ]


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of text that a tag could begin with."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0
    )
