"""Tool calls and tool results in a conversation. In: messages as clients send them. Out: whether
the name of a result is redundant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def repeats_call(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    """Whether a tool result's `name` equals the name of the call that it answers. Some clients send
    it; dropping it loses nothing."""
    message = messages[index]
    if message.get("role") != "tool":
        return False
    wanted = message.get("tool_call_id")
    for call in (
        call for earlier in messages[:index] for call in _mappings(earlier.get("tool_calls"))
    ):
        function = call.get("function")
        name = function.get("name") if isinstance(function, Mapping) else call.get("name")
        if name == message.get("name") and (not wanted or call.get("id") in (None, wanted)):
            return True
    return False


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return (
        [item for item in value if isinstance(item, Mapping)]
        if isinstance(value, (list, tuple))
        else []
    )
