"""Turn the errors of pydantic into one Problem: the most useful one, in the client's own terms."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from verbatim.base.json_io import JsonObject
from verbatim.base.migration_hints import hints
from verbatim.server.api.common.field_rules import RequestBody, member_model, rules_of
from verbatim.server.api.common.json_body import format_path
from verbatim.server.problem import Problem, invalid, unsupported

Path = list[str | int]
Paths = Sequence[tuple[Path, ErrorDetails]]
SHOULD = "Input should be "  # how pydantic's messages start

TYPE_MISMATCHES = (
    *("string_type", "int_type", "float_type", "bool_type", "list_type", "dict_type"),
    *("model_type", "literal_error"),
)

# A field of another protocol -> the names that may mean the same here, for the error's suggestion.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "think": ("reasoning_effort", "reasoning", "thinking"),
    "thinking": ("reasoning_effort", "reasoning", "think"),
    "enable_thinking": ("reasoning_effort", "reasoning", "thinking", "think"),
    "reasoning_effort": ("reasoning", "thinking", "think"),
    "reasoning": ("reasoning_effort", "thinking", "think"),
    "content": ("prompt", "messages"),
    "texts": ("documents", "input"),
    "input": ("content", "prompt"),
    "name": ("model",),
    "num_predict": ("max_tokens", "max_output_tokens", "n_predict", "options"),
    "n_predict": ("max_tokens", "max_output_tokens", "options"),
    "max_tokens": ("max_output_tokens", "n_predict", "options", "num_predict"),
    "repetition_penalty": ("repeat_penalty", "options"),
    "repeat_penalty": ("repetition_penalty", "options"),
    "repeat_last_n": ("penalty_range", "options"),
    "temperature": ("options",),
    "stop": ("stop_sequences", "options"),
    "response_format": ("text", "output_config", "format", "json_schema"),
    "guided_json": ("json_schema", "output_config", "format"),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    "guided_grammar": ("grammar",),
    "structured_outputs": ("output_config", "format"),
    "use_beam_search": ("num_beams",),
    "lora_request": ("adapter",),
}

# A type that is not supported -> what is there instead
INSTEAD = {
    "allowed_tools": "; list only those tools in tools",
    "item_reference": "; send the item itself, or previous_response_id",
}

# content part types that are not text, in all protocols
MEDIA = (
    *("image_url", "input_image", "image", "image_file", "input_audio", "audio"),
    *("video_url", "input_video", "video", "file", "input_file", "document"),
)


def body_problem(error: ValidationError, data: Any, body: type[RequestBody]) -> Problem:
    """Choose the most useful of pydantic's errors about the data of a body.

    The deepest path wins, because a union reports errors for every branch. At equal depth, an error
    that is not a mere type mismatch wins."""
    paths = [(_path(e, data), e) for e in error.errors(include_url=False)]
    other_kind = _built_in_tool(paths) or _media(paths, data)
    if other_kind is not None:
        return other_kind
    path, chosen = max(paths, key=_rank)
    if chosen["type"].startswith("union_tag_"):  # a missing or unknown role or type
        path.append("role" if "role" in chosen["ctx"]["discriminator"] else "type")
    param = format_path(path)
    if chosen["type"] == "union_tag_invalid":
        expected, got = chosen["ctx"]["expected_tags"], chosen["ctx"]["tag"]
        instead = INSTEAD.get(got, "")
        return invalid(param, f"input should be one of {expected} (got {got!r:.40}){instead}")
    if (why := _refused_member(path, body)) is not None:
        return unsupported(param, f"not supported; {why}")
    if chosen["type"] in ("missing", "union_tag_not_found"):
        return Problem("missing_parameter", f"{param}: is required", param=param)
    if chosen["type"] == "extra_forbidden":
        known = getattr(member_model(body, "options"), "model_fields", ())
        near = suggestion(str(path[1]), known) if path[:-1] == ["options"] else ""
        return Problem("unknown_parameter", f"{param}: unknown field{near}", param=param)
    accepted = _accepted([e for where, e in paths if where == path], chosen)
    instead = INSTEAD.get(str(chosen["input"]), "") if path[-1:] == ["type"] else ""
    return invalid(param, _message(chosen, accepted) + instead)


def _rank(item: tuple[Path, ErrorDetails]) -> tuple[int, bool, bool]:
    """The most useful error is the highest. A type of another kind explains the missing fields."""
    path, error = item
    mismatch = error["type"] in TYPE_MISMATCHES
    return len(path), path[-1:] == ["type"] and error["type"] == "literal_error", not mismatch


def _built_in_tool(paths: Paths) -> Problem | None:
    """A built-in tool: report its type, not the function fields that it lacks."""
    for path, complaint in paths:
        if path[:1] == ["tools"] and path[2:] == ["type"] and isinstance(complaint["input"], str):
            kind = complaint["input"][:64]
            where = format_path(path)
            return unsupported(where, f"{kind!r} tools are not supported; {_message(complaint)}")
    return None


def _media(paths: Paths, data: Any) -> Problem | None:
    for path, _ in paths:
        if (found := _media_at(path, data)) is not None:
            where, kind = found
            message = f"only text input is supported; {where} is {kind}"
            return Problem("unsupported_parameter", message, where)
    return None


def _refused_member(path: Path, body: type[RequestBody]) -> str | None:
    """Why a member of an object is refused; None: it is not."""
    members = member_model(body, str(path[0])) if len(path) == 2 else None
    rule = None if members is None else rules_of(members).get(str(path[1]))
    return rule.help if rule is not None and rule.kind == "refused" else None


def _accepted(errors: Sequence[ErrorDetails], chosen: ErrorDetails) -> str:
    """All that would be accepted at one place: the branches of a union. Empty: say what was
    chosen."""
    kinds = dict.fromkeys(_kind(e) for e in errors if e["type"] in TYPE_MISMATCHES)
    if chosen["type"] in TYPE_MISMATCHES and all(kind.startswith(SHOULD) for kind in kinds):
        return SHOULD + " or ".join(kind.removeprefix(SHOULD) for kind in kinds)
    return ""


def suggestion(name: str, table: Collection[str]) -> str:
    """The field of `table` that an unknown name may have meant, as the end of a sentence."""
    from difflib import get_close_matches

    near = [other for other in OTHER_NAMES.get(name, ()) if other in table]
    # The library's answer to the name, if this route has every field that the answer names
    hint = hints("parameters").get(name, "")
    words = set(re.findall(r"\w+", hint.removeprefix("write "))) - {"or"}
    if not near and hint.startswith("write ") and words <= set(table):
        return f"; {hint}"
    near = near or get_close_matches(name[:64], table, 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _media_at(path: Sequence[str | int], data: Any) -> tuple[str, str] | None:
    """(path, kind) of a non-text part on the path of an error. pydantic only reports that it is not
    a text part."""
    if path[:1] not in (["messages"], ["input"], ["system"]):
        return None
    here = data
    for i, step in enumerate(path):
        part = isinstance(here, list)
        here = here[step] if part else here.get(step)  # None: a missing key, which is the last step
        if part and isinstance(here, dict) and here.get("type") in MEDIA:
            article = "an" if here["type"][0] in "aeiou" else "a"
            return format_path(path[: i + 1]), f"{article} {here['type']}"
        if step == "images" and here:
            return format_path(path[: i + 1]), "a list of images"
    return None


def _path(error: ErrorDetails, data: Any) -> list[str | int]:
    """pydantic's location without union branch names: only steps that exist in the data."""
    out: list[str | int] = []
    here = data
    location = error["loc"]
    for i, step in enumerate(location):
        last = i == len(location) - 1
        if isinstance(here, dict) and not last and _is_tag(here, step, location[i + 1]):
            continue
        if (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        ):
            here = here[step]  # type: ignore[index]
            out.append(step)
        elif error["type"] == "missing" and last:
            out.append(step)
    return out


def _is_tag(here: JsonObject, step: int | str, following: int | str) -> bool:
    """Whether a step of pydantic's location is the tag of a union's branch, and not a field. A part
    {"type": "text", "text": ..} has both; the value of the field shows where the next step is."""
    if not isinstance(step, str) or step != here.get("type"):
        return False
    value = here.get(step)
    inside = isinstance(value, dict) and following in value
    return isinstance(value, str) or (following in here and not inside)


def _kind(error: ErrorDetails) -> str:
    """pydantic's message, without the name of our class."""
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{SHOULD}an object"
    return error["msg"]


def _message(error: ErrorDetails, message: str = "") -> str:
    value = repr(error["input"])
    shown = value if len(value) <= 40 else value[:37] + "..."
    message = message or _kind(error)
    return f"{message[0].lower()}{message[1:]} (got {shown})"
