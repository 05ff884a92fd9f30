"""Python functions as tools: the signature becomes the schema of the parameters, the docstring
their description.

In: a function with annotated parameters, or a tool in OpenAI's form. Out: the tool in OpenAI's
form.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.schema_types import parameters_schema

# "city: the name of the city", also with a type in brackets, as in Google's docstrings
_LINE = re.compile(r"\s*(\w+)(?: \([^)]*\))?: (.+)")


def as_tools(tools: object) -> list[JsonMapping]:
    """The tools of a chat in OpenAI's form."""
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ParameterError("tools", "give a list of functions, or of objects in OpenAI's form")
    return [as_tool(tool, place) for place, tool in enumerate(tools)]


def as_tool(tool: object, place: int) -> JsonMapping:
    """A tool of a request in OpenAI's form; `place` is its index, for errors."""
    if isinstance(tool, Mapping):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ParameterError(
                f"tools[{place}]", 'give {"type": "function", "function": {"name": ...}}'
            )
        return tool
    if not callable(tool) or not str(getattr(tool, "__name__", "")).isidentifier():
        raise ParameterError(
            f"tools[{place}]",
            f"{tool!r:.40} is neither a function with a name nor an object with one",
        )
    return {"type": "function", "function": function_of(tool, f"tools[{place}]")}


def function_of(function: Callable[..., object], where: str = "tools") -> JsonObject:
    """The description of a Python function.

    >>> def weather(city: str, days: int = 1) -> str:
    ...     '''Forecast of a city.'''
    >>> function_of(weather)["parameters"]["required"]
    ['city']
    """
    text = inspect.getdoc(function) or ""
    try:
        schema = parameters_schema(function)
    except (UnsupportedError, NameError, TypeError, ValueError) as error:
        why = str(error).removeprefix("json_schema: ")
        raise ParameterError(where, f"{function.__name__}(): {why}") from None
    described = {found[1]: found[2] for found in map(_LINE.match, text.splitlines()) if found}
    properties: JsonObject = schema["properties"]
    for name, line in described.items():
        if name in properties:
            properties[name] = {**properties[name], "description": line}
    summary = " ".join(text.split("\n\n")[0].split())
    told = {"description": summary} if summary else {}
    return {"name": function.__name__, **told, "parameters": schema}
