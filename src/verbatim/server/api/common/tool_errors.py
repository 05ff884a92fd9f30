"""Errors about tools: a schema that the engine refused, as one of the client's tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from verbatim.base.json_io import JsonMapping
from verbatim.server.problem import Problem
from verbatim.text.tools.tool_grammar import TEXT_PLACE

# The place of a tool's parameters in a schema of calls, and the index among several tools
_PARAMETERS = re.compile(
    r"#(?:/anyOf/\d+(?=/items))?(?:/items)?(?:/anyOf/(\d+))?/properties/arguments"
)


def name_tool(problem: Problem, tools: Sequence[JsonMapping], names: Mapping[str, str]) -> Problem:
    """An error about the schema of calls as one about the parameters of a tool, or about the
    format of a text beside them. `tools`: those whose schemas are compiled, with their places in
    the request as `place`. `names`: the client's field names, and "text" where a text has a
    format."""
    if problem.param != "tools":
        return problem
    why = problem.message.removeprefix("tools: ")
    for ours in ("grammar: ", "json_schema: ", "%json: "):
        why = why.removeprefix(ours)
    found = _PARAMETERS.search(why)
    if found is None and TEXT_PLACE in why:
        where, why = names.get("text", "response_format"), why.replace(TEXT_PLACE, "#")
    elif found is None and (len(tools) > 1 or "text" in names):
        return problem
    else:
        tool = tools[int(found[1] or 0) if found else 0]
        where = f"tools[{tool['place']}].{names.get('tools.parameters', 'function.parameters')}"
        why = f"of the tool {tool['function']['name']!r}, {_PARAMETERS.sub('#', why)}"
    return Problem(problem.code, f"{where}: {why}", where, problem.retry_after)
