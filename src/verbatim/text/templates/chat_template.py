"""Chat templates. In: a conversation. Out: the model's prompt string, or its token ids.

The template is a Jinja program from the model's files; sandbox.py runs it. Whatever it adds (a
default system prompt, for instance) stays, and the engine adds nothing. `encode_chat` returns the
ids of Hugging Face's `apply_chat_template(tokenize=True)`, except that a control token typed into a
message stays text (control_tokens.py). A value that the template would ignore is an error; a name
is a warning where the caller collects them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ModelError, RequestError, UnsupportedError
from verbatim.base.json_io import JsonMapping
from verbatim.text.control_tokens import ControlEscaper, ControlFinder
from verbatim.text.templates.chat_messages import (
    REASONING,
    as_list,
    check_keys_read,
    plain_copy,
    prepare_message,
)
from verbatim.text.templates.template_program import TemplateProgram
from verbatim.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verbatim.text.templates.template_reads import TemplateReads

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """A compiled chat template. `named` holds further ones, such as "tool_use", which is used when
    tools are given."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        special_tokens: Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
        file: str | None = None,
    ) -> None:
        self.source = source
        self.file = file
        self.sources: dict[str, str] = {"default": source, **(named or {})}
        self._special = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._programs = {"default": self._compile("default")}  # others on first use

    def _compile(self, name: str) -> TemplateProgram:
        return TemplateProgram(name, self.sources[name], self._special, self.file)

    def _program(self, name: str) -> TemplateProgram:
        if name not in self._programs:
            self._programs[name] = self._compile(name)
        return self._programs[name]

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        warnings: list[str] | None = None,
        escaper: ControlEscaper | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as a string. `continue_final` leaves the last message open for the model to
        continue. `warnings` collects sentences about names that the template does not read; without
        it they are errors. `escaper`: placeholders for control tokens in the messages."""
        escaper = escaper or ControlEscaper(ControlFinder({}), [self.sources, messages])
        program = self._program(self._choose(template, tools))
        for key in variables:
            if key in RESERVED or key in self._special:
                raise RequestError(
                    f"the template variable {key!r} is set by the engine; leave it out",
                    param="chat_template_kwargs",
                )
        self._check_read(program, variables, tools, documents)
        chat = [
            prepare_message(program, escaper, m, i, warnings)
            for i, m in enumerate(as_list(messages, "messages"))
        ]
        values = {k: plain_copy(v, escaper, "chat_template_kwargs") for k, v in variables.items()}
        values["messages"] = chat
        for name, given in (("tools", tools), ("documents", documents)):
            listed = () if given is None else as_list(given, name)
            copies = [plain_copy(item, escaper, name) for item in listed]
            values[name] = None if given is None else copies
        values["add_generation_prompt"] = add_generation_prompt and not continue_final
        text = _continue(program, escaper, values) if continue_final else program.run(values)
        check_keys_read(chat, messages, warnings)
        return text

    def _check_read(
        self,
        program: TemplateProgram,
        variables: Mapping[str, object],
        tools: object,
        documents: object,
    ) -> None:
        """Reject tools, documents and variables that the template never reads: it would ignore them
        silently."""
        if tools and "tools" not in program.reads.variables:
            raise UnsupportedError("tools", "the model's chat template does not support tools")
        if documents and "documents" not in program.reads.variables:
            raise UnsupportedError(
                "documents",
                "the model's chat template does not support documents; write them into a message",
            )
        for key in variables:
            if key not in (known := program.reads.variables):
                own = ", ".join(sorted(known - {*RESERVED, *self._special})) or "none"
                raise UnsupportedError(
                    "chat_template_kwargs",
                    f"the model's chat template never reads {str(key)[:60]!r}, "
                    f"so it would change nothing; leave it out (it reads: {own[:300]})",
                )

    def _choose(self, template: str | None, tools: object) -> str:
        if template is None:
            return "tool_use" if tools and "tool_use" in self.sources else "default"
        if template not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise RequestError(
                f"there is no chat template named {template[:60]!r}; this model has: {known}",
                param="chat_template",
            )
        return template

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads tools; if not, the caller may write them into a message."""
        own = self._reads_or_none("tool_use" if "tool_use" in self.sources else "default")
        return own is not None and "tools" in own.variables

    @property
    def takes_calls(self) -> bool:
        """Whether the template reads the tool calls of earlier assistant messages."""
        found = [
            self._reads_or_none(name) for name in ("default", "tool_use") if name in self.sources
        ]
        return all(own.may_read("tool_calls") for own in found if own is not None)

    @property
    def reads_reasoning(self) -> bool:
        """Whether the template reads the reasoning of earlier assistant messages."""
        own = self._reads_or_none("default")
        return own is not None and any(own.may_read(key) for key in REASONING)

    def reads(self, variable: str) -> bool:
        """Whether a template reads this variable."""
        found = [self._reads_or_none(name) for name in self.sources]
        return any(variable in own.variables for own in found if own is not None)

    def _reads_or_none(self, name: str) -> TemplateReads | None:
        """What the template reads; None if it is broken: no error until a request uses it."""
        try:
            return self._program(name).reads
        except ModelError:
            return None


def _continue(program: TemplateProgram, escaper: ControlEscaper, values: dict[str, Any]) -> str:
    """Render with a marker at the end of the last message, and cut there. A template that
    strips its messages strips this one too."""
    last = values["messages"][-1] if values["messages"] else {}
    content = last.get("content")
    if not isinstance(content, str):
        raise RequestError("the last message has no text to continue", param="messages")
    mark = escaper.unused_character()
    last["content"] = f"{content}{mark} "
    text = program.run(values)
    at = text.rfind(mark)
    if at < 0:
        raise RequestError(
            "the chat template drops the end of the last message, so it cannot be continued",
            param="messages",
        )
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[JsonMapping],
    *,
    tools: Sequence[JsonMapping] | None = None,
    documents: Sequence[JsonMapping] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    template_name: str | None = None,
    warnings: list[str] | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation. The template's control tokens become control ids; typed ones
    stay text. `warnings` as in render()."""
    escaper = ControlEscaper(
        tokenizer.finder, [template.sources, messages, tools, documents, variables]
    )
    text = template.render(
        messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final=continue_final,
        template=template_name,
        warnings=warnings,
        escaper=escaper,
        **variables,
    )
    if not escaper.used:
        return tokenizer.encode(text, special=True)
    return tokenizer.encode_parts(
        (escaper.unescape(part), control) for part, control in tokenizer.split_control(text)
    )
