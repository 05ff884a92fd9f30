"""Calls of tools in a conversation, and the results that answer them. In: messages as clients send them. Out: whether a result's name says nothing new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def repeats_call(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    """Whether the name of a tool's result is that of the call which it answers, as some clients send it: the call has said it."""
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
