"""Check the messages of a conversation against what the chat template can show.

In: messages as the client sent them. Out: plain dicts for the template, with typed control tokens
escaped. A role, key or part that the template would ignore is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.base.errors import RequestError, UnsupportedError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.text.control_tokens import ControlEscaper
from verbatim.text.templates.template_program import TemplateProgram
from verbatim.text.tools.redundant_names import CACHE_KEYS, redundant_names

MAX_DEPTH = 64  # nesting levels of messages and tools
REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms in templates and clients
ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
PART_KEYS = {"type", "text", *CACHE_KEYS}  # keys that a template need not read
# Keys that a template need not read in every message. Every template knows role and content. A
# call's id only repeats the order of calls and results. Calls and reasoning are checked once per
# template instead, because templates drop those of earlier turns on purpose.
UNTRACKED_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING)


def prepare_message(
    program: TemplateProgram,
    escaper: ControlEscaper,
    message: object,
    index: int,
    warnings: list[str] | None = None,
) -> JsonObject:
    """Check one message and copy it as plain JSON types that the template may read. `warnings`
    collects the keys of content parts that have no effect; without it they are errors."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is {type(message).__name__}, not an object with a role", param="messages"
        )
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has no role", param="messages")
    _check_role_and_keys(program, message, where)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts = [_part_text(part, where) for part in content]
        for i, part in enumerate(content):
            _check_part_keys(program, part, f"{where}.content[{i}]", warnings)
        if not program.accepts_content_parts:
            message = {**message, "content": "\n".join(texts)}
    elif content is None:
        message = _without_content(program, message, where)
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content is {type(content).__name__}, not text or a list of parts",
            param="messages",
        )
    plain: JsonObject = plain_copy(message, escaper, where)
    if isinstance(plain.get("content"), list):
        parts = plain["content"]
        plain["content"] = [part if part.keys() <= PART_KEYS else _tracked(part) for part in parts]
    if plain.get("tool_calls") and not program.reads.may_read("tool_calls"):
        raise UnsupportedError(
            f"{where}.tool_calls", "the model's chat template does not support tool calls"
        )
    reasoning = next((plain[key] for key in REASONING if plain.get(key) is not None), None)
    if reasoning is not None:
        if reasoning and not any(program.reads.may_read(key) for key in REASONING):
            own = next(key for key in REASONING if plain.get(key) is not None)
            why = "the model's chat template does not support reasoning; "
            raise UnsupportedError(f"{where}.{own}", why + "leave it out, or write it into content")
        # both names, as transformers does
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        if not any(program.reads.may_read(key) for key in ("thinking", "reasoning_content")):
            plain["reasoning"] = reasoning  # a template that reads only this name would drop it
    return plain if all(key in UNTRACKED_KEYS for key in plain) else _tracked(plain)


def _without_content(
    program: TemplateProgram, message: Mapping[str, object], where: str
) -> JsonMapping:
    """A message with tool calls or reasoning needs no content. A template that does not handle
    missing content would print "None" or fail, so it gets an empty string. A message with
    nothing at all is an error."""
    role = message["role"]
    if role not in ROLES or (
        role == "assistant" and program.accepts_missing_content("content" not in message)
    ):
        return message
    if role == "assistant" and any(message.get(key) for key in ("tool_calls", *REASONING)):
        return {**message, "content": ""}
    raise RequestError(
        f"{where} has no content, "
        "and the model's chat template does not take this conversation without it",
        param="messages",
    )


def _check_role_and_keys(program: TemplateProgram, message: JsonMapping, where: str) -> None:
    """Most templates print any role and ignore unknown keys, so a typo would be ignored
    silently or reach the model as an unknown role. Accept only the usual ones and those that
    the template names."""
    role = message["role"]
    if role not in ROLES and role not in program.reads.texts:
        raise RequestError(
            f"{where}.role is {role[:40]!r}; known are {', '.join(ROLES)}", param="messages"
        )
    for key in message:
        if key not in KEYS and not (isinstance(key, str) and program.reads.may_read(key)):
            raise RequestError(
                f"{where} has the key {str(key)[:40]!r}; known are {', '.join(KEYS)}",
                param="messages",
            )


def as_list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{what} is {type(value).__name__}, not a list", param=what)
    return value


def _tracked(message: JsonObject) -> JsonObject:
    from verbatim.text.templates.template_reads import TrackedMessage

    return TrackedMessage(message)


def check_keys_read(
    rendered: Sequence[JsonObject],
    given: Sequence[Mapping[str, object]],
    warnings: list[str] | None,
) -> None:
    """After rendering: a key that the template did not read was ignored. That is an error, unless
    the key is redundant. A name, which some clients send with every message, is only a warning for
    a caller that collects `warnings`."""
    redundant = redundant_names(given)
    named: dict[str, None] = {}  # roles of messages whose name was not read, in order
    for index, message in enumerate(rendered):
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        for place, part in enumerate(parts):
            for key in part.unread_keys() if hasattr(part, "unread_keys") else ():
                if key not in PART_KEYS:
                    raise _unread_part_key(f"messages[{index}].content[{place}]", key)
        unread_keys = getattr(message, "unread_keys", None)
        for key in unread_keys() if unread_keys is not None else ():
            if key in UNTRACKED_KEYS or given[index].get(key) is None:
                continue
            if key == "name" and index in redundant:
                continue
            if key == "name" and warnings is not None:
                named[str(given[index]["role"])] = None
            else:
                raise UnsupportedError(
                    f"messages[{index}].{key}",
                    f"the model's chat template does not read the {key} of such a message; "
                    "leave it out, or write it into content",
                )
    if named and warnings is not None:
        warnings.append(
            "messages[].name: has no effect; the model's chat template does not read the name of "
            f"{' and '.join(named)} messages"
        )


def _part_text(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind == "text" and isinstance(text, str):
        return text
    raise UnsupportedError(
        "messages", f"{where} has a content part of type {str(kind)[:40]!r}; only text is supported"
    )


def _check_part_keys(
    program: TemplateProgram, part: Mapping[str, object], where: str, warnings: list[str] | None
) -> None:
    """A key of a text part that the template cannot read is an error, or a warning if it marks
    where another server caches the prompt."""
    for key in part:
        if key in ("type", "text") or (
            program.accepts_content_parts and program.reads.may_read(key)
        ):
            continue
        if key not in CACHE_KEYS or warnings is None:
            raise _unread_part_key(where, key)
        warnings.append(f"{where}.{key}: has no effect; prefixes are cached without being marked")


def _unread_part_key(where: str, key: object) -> UnsupportedError:
    why = f"{where} has the key {str(key)[:40]!r}, which is not read; a text part has type and text"
    return UnsupportedError("messages", why)


def plain_copy(value: object, escaper: ControlEscaper, where: str, depth: int = 0) -> Any:
    """Copy a value as plain JSON types with typed control tokens escaped. The template gets nothing
    else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return escaper.escape(str(value))
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if depth >= MAX_DEPTH:
        raise RequestError(
            f"{where} is nested deeper than {MAX_DEPTH} levels", param=where.partition("[")[0]
        )
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{where} has a key that is not text", param=where.partition("[")[0])
        pairs = [(escaper.escape(str(key)), item) for key, item in value.items()]
        return {key: plain_copy(item, escaper, where, depth + 1) for key, item in pairs}
    if isinstance(value, (list, tuple)):
        return [plain_copy(v, escaper, where, depth + 1) for v in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}, which is not JSON", param=where.partition("[")[0]
    )
