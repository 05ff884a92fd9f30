"""Chat templates. In: a conversation. Out: the model's prompt string, or its token ids.

The template is a Jinja program from the model's files; sandbox.py runs it. Whatever it adds (a
default system prompt, for instance) stays, and the engine adds nothing. `encode_chat` returns the
ids of Hugging Face's `apply_chat_template(tokenize=True)`, except that a control token typed into a
message stays text (control_tokens.py). A value that the template would ignore is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ModelError, RequestError, UnsupportedError, VerbatimError
from verbatim.text.control_tokens import ControlEscaper, ControlFinder
from verbatim.text.tokenizer import Tokenizer
from verbatim.text.tool_calls import repeats_call

if TYPE_CHECKING:
    from verbatim.text.template_reads import TemplateReads

MAX_DEPTH = 64  # nesting levels of messages and tools
PROBE_SECONDS = 0.1  # CPU time of a probe; its conversation is tiny
REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms in templates and clients
ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
# Keys that a template need not read in every message. Every template knows role and content. A
# call's id only repeats the order of calls and results. Calls and reasoning are checked once per
# template instead, because templates drop those of earlier turns on purpose.
UNTRACKED_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING)
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_PROBE_MESSAGES = [{"role": "user", "content": "Hello"}]


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
        self._compiled = {"default": self._compile("default", source)}  # others on first use
        self._reads_cache: dict[str, TemplateReads] = {}
        self._content_parts_cache: dict[str, bool] = {}
        self._missing_content_cache: dict[tuple[str, bool], bool] = {}

    # ------------------------------------------------------------------------------ rendering

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as a string. `continue_final` leaves the last message open for the model to
        continue."""
        escaper = ControlEscaper(ControlFinder({}), [self.sources, messages])
        return self._render(
            escaper,
            messages,
            tools,
            documents,
            add_generation_prompt,
            continue_final,
            template,
            variables,
        )

    def _render(
        self,
        escaper: ControlEscaper,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final: bool,
        template: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        name = self._choose(template, tools)
        for key in variables:
            if key in RESERVED or key in self._special:
                raise RequestError(
                    f"the template variable {key!r} is set by the engine; leave it out",
                    param="chat_template_kwargs",
                )
        self._check_read(name, variables, tools, documents)
        chat = [
            self._message(escaper, name, m, i) for i, m in enumerate(_as_list(messages, "messages"))
        ]
        values = {
            **self._special,
            **{
                key: _plain(value, escaper, "chat_template_kwargs")
                for key, value in variables.items()
            },
            "messages": chat,
            "tools": None
            if tools is None
            else [_plain(t, escaper, "tools") for t in _as_list(tools, "tools")],
            "documents": None
            if documents is None
            else [_plain(d, escaper, "documents") for d in _as_list(documents, "documents")],
            "add_generation_prompt": add_generation_prompt and not continue_final,
        }
        text = self._continue(escaper, name, values) if continue_final else self._run(name, values)
        for index, message in enumerate(chat):
            _check_keys_read(message, index, messages)
        return text

    def _check_read(
        self, name: str, variables: Mapping[str, Any], tools: Any, documents: Any
    ) -> None:
        """Reject tools, documents and variables that the template never reads: it would ignore them
        silently."""
        if tools and "tools" not in self._reads(name).variables:
            raise UnsupportedError("tools", "the model's chat template has no place for tools")
        if documents and "documents" not in self._reads(name).variables:
            raise UnsupportedError(
                "documents",
                "the model's chat template has no place for documents; write them into a message",
            )
        for key in variables:
            if key not in (known := self._reads(name).variables):
                own = ", ".join(sorted(known - {*RESERVED, *self._special})) or "none"
                raise UnsupportedError(
                    "chat_template_kwargs",
                    f"the model's chat template never reads {str(key)[:60]!r}, "
                    f"so it would change nothing; leave it out (it reads: {own[:300]})",
                )

    def _continue(self, escaper: ControlEscaper, name: str, values: dict[str, Any]) -> str:
        """Render with a marker at the end of the last message, and cut there. A template that
        strips its messages strips this one too."""
        last = values["messages"][-1] if values["messages"] else {}
        content = last.get("content")
        if not isinstance(content, str):
            raise RequestError("the last message has no text to continue", param="messages")
        mark = escaper.unused_character()
        last["content"] = f"{content}{mark} "
        text = self._run(name, values)
        at = text.rfind(mark)
        if at < 0:
            raise RequestError(
                "the chat template drops the end of the last message, so it cannot be continued",
                param="messages",
            )
        return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()

    def _choose(self, template: str | None, tools: Any) -> str:
        if template is None:
            return "tool_use" if tools and "tool_use" in self.sources else "default"
        if template not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise RequestError(
                f"there is no chat template named {template[:60]!r}; this model has: {known}",
                param="chat_template",
            )
        return template

    def _compiled_template(self, name: str) -> Any:
        if name not in self._compiled:
            self._compiled[name] = self._compile(name, self.sources[name])
        return self._compiled[name]

    def _message(
        self, escaper: ControlEscaper, name: str, message: Any, index: int
    ) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where} is {type(message).__name__}, not an object with a role", param="messages"
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where} has no role", param="messages")
        self._check_role_and_keys(name, message, where)
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_part_text(part, where) for part in content]
            if not self._accepts_content_parts(name):
                message = {**message, "content": "\n".join(texts)}
        elif content is None:
            message = self._without_content(name, message, where)
        elif not isinstance(content, str):
            raise RequestError(
                f"{where}.content is {type(content).__name__}, not text or a list of parts",
                param="messages",
            )
        plain: dict[str, Any] = _plain(message, escaper, where)
        if plain.get("tool_calls") and not self._reads(name).may_read("tool_calls"):
            raise UnsupportedError(
                f"{where}.tool_calls", "the model's chat template has no place for calls of tools"
            )
        thought = next((plain[key] for key in REASONING if plain.get(key) is not None), None)
        if thought is not None:
            if thought and not any(self._reads(name).may_read(key) for key in REASONING):
                own = next(key for key in REASONING if plain.get(key) is not None)
                why = "the model's chat template has no place for thoughts"
                remedy = "leave it out, or write it into content"
                raise UnsupportedError(f"{where}.{own}", f"{why}; {remedy}")
            plain = {"thinking": thought, **plain, "reasoning_content": thought}
        return plain if all(key in UNTRACKED_KEYS for key in plain) else _tracked(plain)

    def _without_content(
        self, name: str, message: Mapping[str, Any], where: str
    ) -> Mapping[str, Any]:
        """A message with tool calls or reasoning needs no content. A template that does not handle
        missing content would print "None" or fail, so it gets an empty string. A message with
        nothing at all is an error."""
        role = message["role"]
        if role not in ROLES or (
            role == "assistant" and self._accepts_missing_content(name, "content" not in message)
        ):
            return message
        if role == "assistant" and any(message.get(key) for key in ("tool_calls", *REASONING)):
            return {**message, "content": ""}
        raise RequestError(
            f"{where} has no content, "
            "and the model's chat template does not take this conversation without it",
            param="messages",
        )

    def _accepts_missing_content(self, name: str, missing: bool) -> bool:
        """Whether the template handles a tool call whose content is null, or missing. Probed
        once."""
        if (name, missing) not in self._missing_content_cache:
            call = {
                "id": "probe7d1x",
                "type": "function",
                "function": {"name": "probe", "arguments": {}},
            }
            turn = {"role": "assistant", "tool_calls": [call]}
            nothing = turn if missing else {**turn, "content": None}
            try:
                texts = [
                    self._probe(name, [*_PROBE_MESSAGES, each])
                    for each in (nothing, {**turn, "content": ""})
                ]
            except Exception:
                texts = ["None", ""]
            self._missing_content_cache[name, missing] = texts[0].count("None") == texts[1].count(
                "None"
            )
        return self._missing_content_cache[name, missing]

    def _check_role_and_keys(self, name: str, message: Mapping[str, Any], where: str) -> None:
        """Most templates print any role and ignore unknown keys, so a typo would be ignored
        silently or reach the model as an unknown role. Accept only the usual ones and those that
        the template names."""
        role = message["role"]
        if role not in ROLES and role not in self._reads(name).texts:
            raise RequestError(
                f"{where}.role is {role[:40]!r}; known are {', '.join(ROLES)}", param="messages"
            )
        for key in message:
            if key not in KEYS and not (isinstance(key, str) and self._reads(name).may_read(key)):
                raise RequestError(
                    f"{where} has the key {str(key)[:40]!r}; known are {', '.join(KEYS)}",
                    param="messages",
                )

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

    def _reads_or_none(self, name: str) -> TemplateReads | None:
        """None: the template is broken. That is no error until a request uses it."""
        try:
            return self._reads(name)
        except ModelError:
            return None

    def _reads(self, name: str) -> TemplateReads:
        if name not in self._reads_cache:
            from verbatim.text.template_reads import find_reads

            self._compiled_template(name)  # compiling bounds it, and reports its errors
            try:
                self._reads_cache[name] = find_reads(self.sources[name])
            except Exception as error:  # it may just fit the budget of compiling, but not this one
                raise ModelError(
                    f"the chat template {name!r} cannot be read: {_describe(error)}", file=self.file
                ) from error
        return self._reads_cache[name]

    def _accepts_content_parts(self, name: str) -> bool:
        """Whether the template handles content as a list of parts. Probed once, on first use."""
        if name not in self._content_parts_cache:
            probe = [{"role": "user", "content": [{"type": "text", "text": "probe-7d1"}]}]
            try:
                text = self._probe(name, probe)
            except Exception:
                text = ""
            self._content_parts_cache[name] = (
                "probe-7d1" in text and "'text'" not in text and '"text"' not in text
            )
        return self._content_parts_cache[name]

    # -------------------------------------------------------------------------------- running

    def _compile(self, name: str, source: str) -> Any:
        from verbatim.text.sandbox import compile_template

        if not isinstance(source, str):
            raise ModelError(
                f"the chat template {name!r} is {type(source).__name__}, not text", file=self.file
            )
        try:
            return compile_template(source)
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            raise ModelError(
                f"the chat template {name!r} cannot be compiled: {_describe(error)}", file=self.file
            ) from error

    def _execute(self, name: str, values: Mapping[str, Any]) -> str:
        from verbatim.text.sandbox import render_template

        return render_template(self._compiled_template(name), values)

    def _probe(self, name: str, messages: list[dict[str, Any]]) -> str:
        """Render a small conversation to find out what the template supports."""
        from verbatim.text.sandbox import render_template

        return render_template(
            self._compiled_template(name), {**self._special, **_values(messages)}, PROBE_SECONDS
        )

    def _run(self, name: str, values: Mapping[str, Any]) -> str:
        try:
            return self._execute(name, values)
        except ModelError:
            raise
        except Exception as error:
            raise self._classify_error(name, error) from error

    def _classify_error(self, name: str, error: Exception) -> VerbatimError:
        """ModelError if the template cannot render even one plain user message, else RequestError:
        the conversation is at fault."""
        from jinja2.exceptions import SecurityError

        if isinstance(error, SecurityError):
            return ModelError(f"the chat template is refused: {_describe(error)}", file=self.file)
        try:
            self._probe(name, _PROBE_MESSAGES)
        except Exception:
            return ModelError(
                f"the chat template {name!r} fails: {_describe(error)}", file=self.file
            )
        return RequestError(
            f"the model's chat template does not take this conversation: {_describe(error)}",
            param="messages",
        )


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    template_name: str | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation. The template's control tokens become control ids; typed ones
    stay text."""
    escaper = ControlEscaper(
        tokenizer.finder, [template.sources, messages, tools, documents, variables]
    )
    text = template._render(
        escaper,
        messages,
        tools,
        documents,
        add_generation_prompt,
        continue_final,
        template_name,
        variables,
    )
    if not escaper.used:
        return tokenizer.encode(text, special=True)
    return tokenizer.encode_parts(
        (escaper.unescape(part), control) for part, control in tokenizer.split_control(text)
    )


# ------------------------------------------------------------------------------------ from files


def template_from_gguf(
    metadata: Mapping[str, Any], tokenizer: Tokenizer | None = None, *, file: str | None = None
) -> ChatTemplate | None:
    """The chat template in a GGUF file's metadata, or None. Further ones are
    `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    named = {k[len(key) + 1 :]: v for k, v in metadata.items() if k.startswith(key + ".")}
    if source is None:
        source = named.get("default")
    if source is None:
        return None
    return _new_template(
        source,
        named,
        _special_of(metadata) if tokenizer is None else tokenizer.special_tokens,
        file,
    )


def template_from_directory(
    path: str | Path, tokenizer: Tokenizer | None = None
) -> ChatTemplate | None:
    """The chat template of a model directory, or None: chat_template.jinja (and
    additional_chat_templates/), chat_template.json, or the `chat_template` of
    tokenizer_config.json, which may be a list of named ones."""
    from verbatim.text.hf_vocab import read_json, special_texts

    folder = Path(path)
    config = read_json(folder / "tokenizer_config.json", missing={})
    special = special_texts(folder, config) if tokenizer is None else tokenizer.special_tokens
    main = folder / "chat_template.jinja"
    if main.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return _new_template(
            _read_source(main), {m.stem: _read_source(m) for m in more}, special, str(main)
        )
    found, file = config.get("chat_template"), folder / "tokenizer_config.json"
    if found is None and (folder / "chat_template.json").is_file():
        file = folder / "chat_template.json"
        found = read_json(file).get("chat_template")
    if found is None:
        return None
    named: dict[str, Any] = {}
    if isinstance(found, list):
        if not all(
            isinstance(e, dict) and isinstance(e.get("name"), str) and "template" in e
            for e in found
        ):
            raise ModelError(
                "chat_template is a list whose entries are not all {name, template}", file=str(file)
            )
        named = {e["name"]: e["template"] for e in found}
        if "default" not in named:
            raise ModelError(
                f"chat_template has no 'default' among {', '.join(sorted(named))}", file=str(file)
            )
        found = named.pop("default")
    return _new_template(found, named, special, str(file))


def _new_template(
    source: Any, named: Mapping[str, Any], special: Mapping[str, str], file: str | None
) -> ChatTemplate:
    bos, eos = special.get("bos_token", ""), special.get("eos_token", "")
    return ChatTemplate(source, bos, eos, special_tokens=special, named=named, file=file)


def _special_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        at = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if (
            isinstance(tokens, Sequence)
            and isinstance(at, int)
            and 0 <= at < len(tokens)
            and isinstance(tokens[at], str)
        ):
            found[name] = tokens[at]
    return found


def _read_source(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template cannot be read: {error}", file=str(path)) from None


# ------------------------------------------------------------------------------------ plain data


def _values(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}


def _as_list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{what} is {type(value).__name__}, not a list", param=what)
    return value


def _tracked(message: dict[str, Any]) -> dict[str, Any]:
    from verbatim.text.template_reads import TrackedMessage

    return TrackedMessage(message)


def _check_keys_read(
    message: dict[str, Any], index: int, given: Sequence[Mapping[str, Any]]
) -> None:
    """After rendering: a key that the template did not read was ignored. That is an error, unless
    the key is redundant."""
    unread_keys = getattr(message, "unread_keys", None)
    for key in unread_keys() if unread_keys is not None else ():
        if (
            key not in UNTRACKED_KEYS
            and given[index].get(key) is not None
            and not (key == "name" and repeats_call(given, index))
        ):
            raise UnsupportedError(
                f"messages[{index}].{key}",
                f"the model's chat template does not look at the {key} of such a message; "
                "leave it out, or write it into content",
            )


def _part_text(part: Any, where: str) -> str:
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedError(
        "messages",
        f"{where} has a content part of type {str(kind)[:40]!r}; only text is understood here",
    )


def _plain(value: Any, escaper: ControlEscaper, where: str, depth: int = 0) -> Any:
    """Copy a value as plain JSON types with typed control tokens escaped. The template gets nothing
    else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return escaper.escape(str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth >= MAX_DEPTH:
        raise RequestError(
            f"{where} is nested deeper than {MAX_DEPTH} levels", param=where.partition("[")[0]
        )
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{where} has a key that is not text", param=where.partition("[")[0])
        return {
            escaper.escape(str(k)): _plain(v, escaper, where, depth + 1) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(v, escaper, where, depth + 1) for v in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}, which is not JSON", param=where.partition("[")[0]
    )


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return json.dumps(text, ensure_ascii=False)[1:-1][:300]
