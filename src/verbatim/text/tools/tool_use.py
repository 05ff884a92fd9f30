"""ToolUse: what the tools of one request do to its output.

In: tools in OpenAI's form, tool_choice, and the model's format. Out: the sampling parameters that
make every call valid, and the parser of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import STRUCTURE
from verbatim.text.tools.call_formats import CALL_FORMATS
from verbatim.text.tools.tool_grammar import call_or_text, forced_schema
from verbatim.text.tools.tool_parser import ToolParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an output may call; none with tool_choice "none"."""

    tools: Sequence[JsonMapping]
    form: str  # a name of CALL_FORMATS
    named: str | None = None  # the function that must be called
    forced: bool = False  # the output consists of calls
    single: bool = False  # at most one call
    text_schema: object = None  # JSON schema of the caller, for a text beside the calls

    def changes(self, values: JsonMapping) -> JsonObject:
        """Sampling parameters beside the given `values`. For forced calls a schema; for strict
        tools, or a text with a schema, a grammar of both, which replaces that schema."""
        if self.forced:
            _check_free("tool_choice", values, STRUCTURE)
            many = self.named is None and not self.single
            return {"json_schema": forced_schema(self.tools, self.named, many=many)}
        given = {} if "skip_special" in values else self._shown_tags()
        schema = values.get("json_schema")
        strict = [i for i, tool in enumerate(self.tools) if tool["function"].get("strict")]
        if not self.tools or not (strict or schema is not None):
            return given
        where = f"tools[{strict[0]}].function.strict" if strict else "json_schema"
        if strict:
            _check_free(where, values, [name for name in STRUCTURE if name != "json_schema"])
        grammar = call_or_text(self.tools, self.form, single=self.single, text=schema)
        if grammar is None:
            raise UnsupportedError(
                where, "not supported with tool_choice auto for this model's tool format"
            )
        return {**given, "json_schema": None, "grammar": grammar}

    def _shown_tags(self) -> JsonObject:
        """Where the tags of a call are control tokens, the parser needs their text."""
        return {"skip_special": False} if self.tools and CALL_FORMATS[self.form].control else {}

    def parser(self, *, midway: bool = False) -> ToolParser | None:
        """A parser for one output; `midway`: it continues a given message. None without tools."""
        if not self.tools:
            return None
        functions = (tool["function"] for tool in self.tools)
        schemas = {function["name"]: function.get("parameters") for function in functions}
        return ToolParser(self.form, schemas, forced=self.forced, single=self.single, midway=midway)


def tool_use(
    tools: Sequence[JsonMapping], choice: str | JsonMapping, form: str, *, single: bool = False
) -> ToolUse:
    """Check tools and tool_choice ("auto", "none", "required", or a function as OpenAI names it).
    An error names the field."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise ParameterError("tools", "two tools have the same name")
    if choice == "none":
        return ToolUse((), form)
    if choice == "auto":
        return ToolUse(tools, form, single=single)
    named = None if isinstance(choice, str) else choice["function"]["name"]
    if not tools:
        raise ParameterError("tool_choice", "requires a call, but the request has no tools")
    if named is not None and named not in names:
        raise ParameterError("tool_choice", "names a function that is not in tools")
    return ToolUse(tools, form, named, forced=True, single=single)


def _check_free(field: str, values: JsonMapping, names: Sequence[str]) -> None:
    """Only one parameter can constrain an output."""
    for name in names:
        if values.get(name) is not None:
            raise ParameterError(field, f"cannot be combined with {name}")
