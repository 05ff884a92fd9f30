"""Tool calls and tool results in a conversation. In: messages as clients send them. Out: which
results have a redundant name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Keys of messages, content parts and tools that mark where another server caches a prompt
CACHE_KEYS = ("cache_control", "prompt_cache_breakpoint")


def redundant_names(messages: Sequence[Mapping[str, object]]) -> set[int]:
    """The indexes of tool results whose `name` equals the name of the call that they answer. Some
    clients send it; dropping it loses nothing. A result without an id may answer every earlier
    call, and a call without an id may be answered by every result.

    Linear in the number of calls and messages: one request may have thousands of both."""
    named: set[str] = set()  # names of all earlier calls
    answered: set[tuple[str, str | None]] = set()  # their names and ids
    found: set[int] = set()
    for index, message in enumerate(messages):
        name, wanted = message.get("name"), message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(name, str):
            if not wanted:
                redundant = name in named
            else:
                redundant = not answered.isdisjoint({(name, None), (name, str(wanted))})
            if redundant:
                found.add(index)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, (list, tuple)) else ():
            if not isinstance(call, Mapping):
                continue
            function, key = call.get("function"), call.get("id")
            name = function.get("name") if isinstance(function, Mapping) else call.get("name")
            if isinstance(name, str):
                named.add(name)
                answered.add((name, None if key is None else str(key)))
    return found
