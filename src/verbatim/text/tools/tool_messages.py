"""Tools and calls in the messages for a chat template.

In: messages and tools in OpenAI's form. Out: messages as the template takes them: what it does not
support is written into the text, so that nothing of a request is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verbatim.base.json_io import JsonMapping, JsonObject, loads_strict
from verbatim.text.tools.call_formats import HERMES
from verbatim.text.tools.redundant_names import redundant_names

OPEN, CLOSE = HERMES.open, HERMES.close
PREAMBLE = (
    "You can call these functions:\n{tools}\n"
    "To call one, answer with a JSON object between tags:\n"
    '<tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>'
)


def plain_text(content: Any) -> str:
    """Content as one string. Text parts are joined without a separator, as OpenAI does."""
    if isinstance(content, list):
        return "".join(part.get("text", part.get("refusal", "")) for part in content)
    return content or ""


def tool_call(call_id: str, function: str, arguments: object) -> JsonObject:
    """A call in OpenAI's form."""
    called = {"name": function, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": called}


def template_messages(
    messages: Sequence[JsonMapping],
    tools: Sequence[JsonMapping],
    *,
    takes_tools: bool,
    takes_calls: bool,
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
        if calls and takes_calls:
            made["tool_calls"] = [
                tool_call(c["id"], c["function"]["name"], _object(c["function"]["arguments"]))
                for c in calls
            ]
            if message.get("content") is None:
                made["content"] = None  # some templates detect calls by content None
        elif calls:
            made["content"] += "".join(
                f"{OPEN}\n{_call_json(c['function'])}\n{CLOSE}" for c in calls
            )
        if "tool_call_id" in message and takes_calls:
            made["tool_call_id"] = message["tool_call_id"]
        elif len(out) in redundant:
            del made["name"]  # the rendered call already has the name
        out.append(made)
    if tools and not takes_tools:
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
