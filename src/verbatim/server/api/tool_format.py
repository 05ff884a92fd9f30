"""Detect the tool-call format of a chat template. In: the template source. Out: one of FORMATS."""

from __future__ import annotations

FORMATS = ("hermes", "mistral", "llama3", "json")


def detect_format(template: str) -> str:
    """hermes: <tool_call>...</tool_call> (Hermes, Qwen, GLM); mistral: [TOOL_CALLS]...; llama3:
    {"name", "parameters"}; json: the template has no tools, so the server describes them in a
    system message.

    >>> detect_format("... <tool_call> ...")
    'hermes'
    """
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or (
        "tools" in template and '"parameters"' in template and "ipython" in template
    ):
        return "llama3"
    return "hermes" if "tools" in template else "json"
