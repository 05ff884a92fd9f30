"""One compiled chat template: run it, and find out what it reads and accepts.

In: the Jinja source from a model's files. Out: rendered text, or a ModelError (the template is at
fault) or RequestError (the conversation is). sandbox.py bounds time, memory and access.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ModelError, RequestError, VerbatimError

if TYPE_CHECKING:
    from verbatim.text.templates.template_reads import TemplateReads

PROBE_SECONDS = 0.1  # CPU time of a probe; its conversation is tiny
_PROBE_MESSAGES = [{"role": "user", "content": "Hello"}]
_PROBE_CALL = {
    "id": "probe7d1x",
    "type": "function",
    "function": {"name": "probe", "arguments": {}},
}


class TemplateProgram:
    """A compiled template. `special` holds the values of bos_token, eos_token and the like."""

    def __init__(
        self, name: str, source: str, special: Mapping[str, str], file: str | None = None
    ) -> None:
        if not isinstance(source, str):
            raise ModelError(
                f"the chat template {name!r} is {type(source).__name__}, not text", file=file
            )
        self.name, self.source, self.file = name, source, file
        self._special = special
        self._compiled = self._compile()
        self._missing_content: dict[bool, bool] = {}

    def _compile(self) -> Any:
        from verbatim.text.templates.sandbox import compile_template

        try:
            return compile_template(self.source)
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            raise ModelError(
                f"the chat template {self.name!r} cannot be compiled: {_describe(error)}",
                file=self.file,
            ) from error

    def run(self, values: Mapping[str, object]) -> str:
        """Render with these variables."""
        from verbatim.text.templates.sandbox import render_template

        try:
            return render_template(self._compiled, {**self._special, **values})
        except ModelError:
            raise
        except Exception as error:
            raise self._classify_error(error) from error

    def _probe(self, messages: list[dict[str, Any]]) -> str:
        """Render a small conversation to find out what the template supports."""
        from verbatim.text.templates.sandbox import render_template

        values: dict[str, object] = {"messages": messages, "tools": None, "documents": None}
        values["add_generation_prompt"] = True
        return render_template(self._compiled, {**self._special, **values}, PROBE_SECONDS)

    def _classify_error(self, error: Exception) -> VerbatimError:
        """ModelError if the template cannot render even one plain user message, else RequestError:
        the conversation is at fault."""
        from jinja2.exceptions import SecurityError

        if isinstance(error, SecurityError):
            return ModelError(f"the chat template is refused: {_describe(error)}", file=self.file)
        try:
            self._probe(_PROBE_MESSAGES)
        except Exception:
            return ModelError(
                f"the chat template {self.name!r} fails: {_describe(error)}", file=self.file
            )
        return RequestError(
            f"the model's chat template does not take this conversation: {_describe(error)}",
            param="messages",
        )

    # --------------------------------------------------------------- what the template supports

    @cached_property
    def reads(self) -> TemplateReads:
        """The variables and keys that the template reads, from its source."""
        from verbatim.text.templates.template_reads import find_reads

        try:
            return find_reads(self.source)
        except Exception as error:  # it may just fit the budget of compiling, but not this one
            raise ModelError(
                f"the chat template {self.name!r} cannot be read: {_describe(error)}",
                file=self.file,
            ) from error

    @cached_property
    def accepts_content_parts(self) -> bool:
        """Whether the template handles content as a list of parts. Probed once, on first use."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe-7d1"}]}]
        try:
            text = self._probe(probe)
        except Exception:
            return False
        return "probe-7d1" in text and "'text'" not in text and '"text"' not in text

    def accepts_missing_content(self, missing: bool) -> bool:
        """Whether the template handles a tool call whose content is null, or missing. Probed
        once."""
        if missing not in self._missing_content:
            turn = {"role": "assistant", "tool_calls": [_PROBE_CALL]}
            nothing = turn if missing else {**turn, "content": None}
            try:
                texts = [
                    self._probe([*_PROBE_MESSAGES, each])
                    for each in (nothing, {**turn, "content": ""})
                ]
            except Exception:
                texts = ["None", ""]
            self._missing_content[missing] = texts[0].count("None") == texts[1].count("None")
        return self._missing_content[missing]


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return json.dumps(text, ensure_ascii=False)[1:-1][:300]
