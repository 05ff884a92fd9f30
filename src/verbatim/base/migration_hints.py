"""Names that users of vLLM, transformers and llama.cpp try, and the hint for each.

migration_hints.json has them all: parameters, options, methods and attributes of the library, flags
and commands of the command line. In: a name that this package does not have. Out: a sentence with
the name that it has. An unknown name is an error in any case; here it only gets a better message.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Never


@cache
def hints(kind: str) -> dict[str, str]:
    """Name -> hint, of one kind of names: a key of migration_hints.json.

    >>> hints("parameters")["max_new_tokens"]
    'write max_tokens'
    """
    path = Path(__file__).with_suffix(".json")
    found: dict[str, dict[str, str]] = json.loads(path.read_text("utf-8"))
    return found[kind]


def attribute(owner: object, name: str, kind: str) -> AttributeError:
    """The error for an unknown attribute.

    >>> attribute([], "text", "completion").args[0]
    "'list' object has no attribute 'text'"
    """
    said = f"{type(owner).__name__!r} object has no attribute {name!r}"
    return AttributeError(_with(said, hints(kind).get(name)))


def _with(said: str, hint: str | None) -> str:
    return f"{said}; {hint}" if hint else said


class AnsweringType(type):
    """Metaclass that answers other libraries' names on the class: LLM.from_pretrained(...)."""

    if not TYPE_CHECKING:  # a type checker reports unknown names itself

        def __getattr__(cls, name: str) -> Never:
            said = f"type object {cls.__name__!r} has no attribute {name!r}"
            raise AttributeError(_with(said, hints("methods").get(name)))


def argument(call: str, name: str, hint: str | None = None) -> TypeError:
    """The error for an unknown argument of a call.

    >>> argument("generate", "max_new_tokens").args[0]
    "generate() has no argument 'max_new_tokens'; give it in params: SamplingParams(max_tokens=...)"
    """
    if name == "stream":
        first = "chat_stream(messages" if call.startswith("chat") else "stream(prompt"
        hint = hint or f"use {first}, params)"
    hint = hint or hints("arguments").get(name)
    parameter = hints("parameters").get(name, "")
    if hint is None and parameter.startswith("write "):
        named = parameter.removeprefix("write ").split(",")[0].split(" ")[0]
        value = "" if "=" in named else "=..."
        hint = f"give it in params: SamplingParams({named}{value})"
    hint = hint or parameter or "sampling parameters go into params: SamplingParams(...)"
    return TypeError(f"{call}() has no argument {name!r}; {hint}")
