"""The prompt of a conversation with tools: messages as the template takes them, and parameters that
make every call valid.

In: the arguments of chat(). Out: a function that renders the prompt, because this takes long, and
SamplingParams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonMapping
from verbatim.base.params import SamplingParams
from verbatim.engine.calls.engine_base import EngineBase, Message
from verbatim.engine.read_prompt import EncodedText
from verbatim.text.templates.chat_template import ChatTemplate
from verbatim.text.tools.function_tools import as_tools
from verbatim.text.tools.tool_format import detect_format
from verbatim.text.tools.tool_messages import template_messages
from verbatim.text.tools.tool_use import ToolUse, tool_use

# Keys of a message that template_messages() reads; it leaves others to the template's checks.
READ = ("role", "content", "name", "reasoning_content", "refusal", "tool_calls", "tool_call_id")
CHOICES = ("auto", "none", "required")


def chat_prompt(
    engine: EngineBase, messages: Sequence[Message], params: SamplingParams, options: JsonMapping
) -> tuple[Callable[[], list[int]], SamplingParams]:
    """chat()'s prompt and parameters. `options`: tools, tool_choice, parallel_tool_calls and those
    of the chat template."""
    template = dict(options)
    tools = template.pop("tools", None)
    tool_choice = template.pop("tool_choice", "auto")
    several = template.pop("parallel_tool_calls", True)
    form = engine.loaded.template
    if form is None or (not tools and tool_choice == "auto"):
        return partial(engine.encode_chat, messages, **template), params
    given = as_tools(tools or ())
    style = detect_format("\n".join(form.sources.values()))
    use = tool_use(given, _choice(tool_choice), style, single=not several)
    use = replace(use, text_schema=params.json_schema)
    values = params.to_mapping()
    if params.json_schema is not None:
        values["json_schema"] = json.loads(str(params.json_schema))
    params = params.with_(**use.changes(values))
    return partial(_render, engine, form, messages, use, template), params


def _choice(given: str | JsonMapping) -> str | JsonMapping:
    """tool_choice in OpenAI's form; the name of a function is enough."""
    if isinstance(given, Mapping):
        function = given.get("function")
        if not isinstance(function, Mapping) or "name" not in function:
            raise ParameterError("tool_choice", 'give {"function": {"name": ...}}')
        return given
    return given if given in CHOICES else {"function": {"name": given}}


def _render(
    engine: EngineBase,
    form: ChatTemplate,
    messages: Sequence[Message],
    use: ToolUse,
    template: JsonMapping,
) -> list[int]:
    takes = {"takes_tools": form.takes_tools, "takes_calls": form.takes_calls}
    made = template_messages(messages, use.tools, **takes)
    for given, message in zip(reversed(messages), reversed(made), strict=False):
        message.update({key: value for key, value in given.items() if key not in READ})
    if use.tools and form.takes_tools:
        template = {**template, "tools": use.tools}
    ids = engine.encode_chat(made, **template)
    assert isinstance(ids, EncodedText)
    ids.tools = use
    return ids
