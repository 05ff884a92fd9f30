"""Detect the tool-call format of a chat template. In: the template source. Out: a name of
call_formats.CALL_FORMATS."""

from __future__ import annotations

# What a template contains, and the format. A template with tools and none of them is one of Hermes.
_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call_start|>", "lfm2"),
    ("List of tools: ", "lfm2"),  # its templates do not write earlier calls
    ("<|tool_call|>", "granite"),
    ("seed:tool_call", "seed"),
    ("<|python_tag|>", "llama3"),
)


def detect_format(template: str) -> str:
    """The name in CALL_FORMATS. json: the template has no tools, so the server describes them in a
    system message.

    >>> detect_format("... <tool_call> ..."), detect_format("... <|tool_call> ...")
    ('hermes', 'gemma4')
    """
    for sign, form in _SIGNS:
        if sign in template:
            return form
    if "tools" in template and '"parameters"' in template and "ipython" in template:
        return "llama3"
    return "hermes" if "tools" in template else "json"
