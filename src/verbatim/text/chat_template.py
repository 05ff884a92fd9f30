"""Messages become a prompt. In: a conversation. Out: the model's prompt string, or its token ids.

The template is the model's own, a Jinja program that came with its files; sandbox.py says how it is kept harmless. Whatever it
does by itself (a default system prompt, for instance) stays. `encode_chat` gives the token ids: those that Hugging Face's
`apply_chat_template(tokenize=True)` gives, except that a control token typed into a message stays text (see control.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.base.errors import ModelError, RequestError, UnsupportedError, VerbatimError
from verbatim.text.control_tokens import ControlFinder, Shield
from verbatim.text.tokenizer import Tokenizer
from verbatim.text.tool_calls import repeats_call

if TYPE_CHECKING:
    from verbatim.text.template_reads import Reads

MAX_DEPTH = 64  # nesting of messages and tools
PROBE_SECONDS = 0.1
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names that templates and clients use for the same thing
ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING)
# Keys that need not be looked at: every template knows the first two; a call's id only says which result is whose, which their order says too;
# and of calls and thoughts it is asked whether the template knows them at all, because models are meant to forget those of earlier turns.
NOT_WATCHED = ("role", "content", "tool_calls", "tool_call_id", *REASONING)
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
_PLAIN_TURN = [{"role": "user", "content": "Hello"}]


class ChatTemplate:
    """A model's chat template, compiled. `named` holds further ones, such as "tool_use", which is taken when tools are given."""

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
        self._compiled = {"default": self._compile("default", source)}  # the others when first used
        self._looked: dict[str, Reads] = {}
        self._takes_parts: dict[str, bool] = {}
        self._takes_nothing: dict[tuple[str, bool], bool] = {}

    # ------------------------------------------------------------------------------------------------------- rendering

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
        """The prompt as a string. `continue_final` leaves the last message open, so that the model goes on writing it."""
        shield = Shield(ControlFinder({}), [self.sources, messages])
        return self._render(
            shield,
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
        shield: Shield,
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
            self._message(shield, name, m, i) for i, m in enumerate(_listed(messages, "messages"))
        ]
        values = {
            **self._special,
            **{
                key: _plain(value, shield, "chat_template_kwargs")
                for key, value in variables.items()
            },
            "messages": chat,
            "tools": None
            if tools is None
            else [_plain(t, shield, "tools") for t in _listed(tools, "tools")],
            "documents": None
            if documents is None
            else [_plain(d, shield, "documents") for d in _listed(documents, "documents")],
            "add_generation_prompt": add_generation_prompt and not continue_final,
        }
        text = self._continue(shield, name, values) if continue_final else self._run(name, values)
        for index, message in enumerate(chat):
            _check_looked_at(message, index, messages)
        return text

    def _check_read(
        self, name: str, variables: Mapping[str, Any], tools: Any, documents: Any
    ) -> None:
        """What the template never takes would be dropped without a word."""
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
                    f"the model's chat template never reads {str(key)[:60]!r}, so it would change nothing; leave it out (it reads: {own[:300]})",
                )

    def _continue(self, shield: Shield, name: str, values: dict[str, Any]) -> str:
        """Render with a mark at the end of the last message, and cut there. A template that trims its messages trims this one too."""
        last = values["messages"][-1] if values["messages"] else {}
        content = last.get("content")
        if not isinstance(content, str):
            raise RequestError("the last message has no text to continue", param="messages")
        mark = shield.fresh()
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

    def _ready(self, name: str) -> Any:
        if name not in self._compiled:
            self._compiled[name] = self._compile(name, self.sources[name])
        return self._compiled[name]

    def _message(self, shield: Shield, name: str, message: Any, index: int) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where} is {type(message).__name__}, not an object with a role", param="messages"
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where} has no role", param="messages")
        self._check_known(name, message, where)
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = [_text_of(part, where) for part in content]
            if not self._reads_parts(name):
                message = {**message, "content": "\n".join(texts)}
        elif content is None:
            message = self._without_content(name, message, where)
        elif not isinstance(content, str):
            raise RequestError(
                f"{where}.content is {type(content).__name__}, not text or a list of parts",
                param="messages",
            )
        plain: dict[str, Any] = _plain(message, shield, where)
        if plain.get("tool_calls") and not self._reads(name).asks_for("tool_calls"):
            raise UnsupportedError(
                f"{where}.tool_calls", "the model's chat template has no place for calls of tools"
            )
        thought = next((plain[key] for key in REASONING if plain.get(key) is not None), None)
        if thought is not None:
            if thought and not any(self._reads(name).asks_for(key) for key in REASONING):
                own = next(key for key in REASONING if plain.get(key) is not None)
                why = "the model's chat template has no place for thoughts; leave it out, or write it into content"
                raise UnsupportedError(f"{where}.{own}", why)
            plain = {"thinking": thought, **plain, "reasoning_content": thought}
        return plain if all(key in NOT_WATCHED for key in plain) else _watched(plain)

    def _without_content(
        self, name: str, message: Mapping[str, Any], where: str
    ) -> Mapping[str, Any]:
        """A call of a tool, or a thought, needs no text beside it. A template that has not thought of that would write the word None into the
        prompt, or fail: it gets an empty text. Whoever says nothing at all is told so."""
        role = message["role"]
        if role not in ROLES or (
            role == "assistant" and self._reads_nothing(name, "content" not in message)
        ):
            return message
        if role == "assistant" and any(message.get(key) for key in ("tool_calls", *REASONING)):
            return {**message, "content": ""}
        raise RequestError(
            f"{where} has no content, and the model's chat template does not take this conversation without it",
            param="messages",
        )

    def _reads_nothing(self, name: str, missing: bool) -> bool:
        """Whether the template has a place for a call of a tool whose content is null, or not there; found out by trying, once."""
        if (name, missing) not in self._takes_nothing:
            call = {
                "id": "probe7d1x",
                "type": "function",
                "function": {"name": "probe", "arguments": {}},
            }
            turn = {"role": "assistant", "tool_calls": [call]}
            nothing = turn if missing else {**turn, "content": None}
            try:
                texts = [
                    self._probe(name, [*_PLAIN_TURN, each])
                    for each in (nothing, {**turn, "content": ""})
                ]
            except Exception:
                texts = ["None", ""]
            self._takes_nothing[name, missing] = texts[0].count("None") == texts[1].count("None")
        return self._takes_nothing[name, missing]

    def _check_known(self, name: str, message: Mapping[str, Any], where: str) -> None:
        """Most templates write any role as it comes, and look at no key that they do not know: a typing error would be dropped without a word,
        or sent to the model as a speaker it has never heard of. So only usual ones pass, and those that the template itself names."""
        role = message["role"]
        if role not in ROLES and role not in self._reads(name).texts:
            raise RequestError(
                f"{where}.role is {role[:40]!r}; known are {', '.join(ROLES)}", param="messages"
            )
        for key in message:
            if key not in KEYS and not (isinstance(key, str) and self._reads(name).asks_for(key)):
                raise RequestError(
                    f"{where} has the key {str(key)[:40]!r}; known are {', '.join(KEYS)}",
                    param="messages",
                )

    @property
    def takes_tools(self) -> bool:
        """Whether there is a place for tools; the caller may else write them into a message."""
        own = self._sound_reads("tool_use" if "tool_use" in self.sources else "default")
        return own is not None and "tools" in own.variables

    @property
    def takes_calls(self) -> bool:
        """The same for calls that the model has made."""
        found = [
            self._sound_reads(name) for name in ("default", "tool_use") if name in self.sources
        ]
        return all(own.asks_for("tool_calls") for own in found if own is not None)

    def _sound_reads(self, name: str) -> Reads | None:
        """None: this one is broken, which costs nothing as long as nobody asks for it."""
        try:
            return self._reads(name)
        except ModelError:
            return None

    def _reads(self, name: str) -> Reads:
        if name not in self._looked:
            from verbatim.text.template_reads import reads_of

            self._ready(name)  # which bounds it, and says what is wrong with it
            try:
                self._looked[name] = reads_of(self.sources[name])
            except Exception as error:  # at the very edge of what is bounded
                raise ModelError(
                    f"the chat template {name!r} cannot be read: {_said(error)}", file=self.file
                ) from error
        return self._looked[name]

    def _reads_parts(self, name: str) -> bool:
        """Whether the template understands content as a list of parts; found out by trying, once, when a list first comes."""
        if name not in self._takes_parts:
            probe = [{"role": "user", "content": [{"type": "text", "text": "probe-7d1"}]}]
            try:
                text = self._probe(name, probe)
            except Exception:
                text = ""
            self._takes_parts[name] = (
                "probe-7d1" in text and "'text'" not in text and '"text"' not in text
            )
        return self._takes_parts[name]

    # --------------------------------------------------------------------------------------------------------- running

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
                f"the chat template {name!r} cannot be compiled: {_said(error)}", file=self.file
            ) from error

    def _execute(self, name: str, values: Mapping[str, Any]) -> str:
        from verbatim.text.sandbox import render_template

        return render_template(self._ready(name), values)

    def _probe(self, name: str, messages: list[dict[str, Any]]) -> str:
        """A small conversation of our own, to find out what the template can do. It has less time than a real one."""
        from verbatim.text.sandbox import render_template

        return render_template(
            self._ready(name), {**self._special, **_values(messages)}, PROBE_SECONDS
        )

    def _run(self, name: str, values: Mapping[str, Any]) -> str:
        try:
            return self._execute(name, values)
        except ModelError:
            raise
        except Exception as error:
            raise self._blame(name, error) from error

    def _blame(self, name: str, error: Exception) -> VerbatimError:
        """Whose mistake? A template that cannot render even one plain user turn is broken; otherwise it is this conversation."""
        from jinja2.exceptions import SecurityError

        if isinstance(error, SecurityError):
            return ModelError(f"the chat template is refused: {_said(error)}", file=self.file)
        try:
            self._probe(name, _PLAIN_TURN)
        except Exception:
            return ModelError(f"the chat template {name!r} fails: {_said(error)}", file=self.file)
        return RequestError(
            f"the model's chat template does not take this conversation: {_said(error)}",
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
    """Token ids of a conversation. The template's control tokens become control ids; typed ones stay text."""
    shield = Shield(tokenizer.finder, [template.sources, messages, tools, documents, variables])
    text = template._render(
        shield,
        messages,
        tools,
        documents,
        add_generation_prompt,
        continue_final,
        template_name,
        variables,
    )
    if not shield.used:
        return tokenizer.encode(text, special=True)
    return tokenizer.encode_parts(
        (shield.uncover(part), control) for part, control in tokenizer.split_control(text)
    )


# ------------------------------------------------------------------------------------------------------------ from files


def template_from_gguf(
    metadata: Mapping[str, Any], tokenizer: Tokenizer | None = None, *, file: str | None = None
) -> ChatTemplate | None:
    """The chat template in a GGUF file's metadata, or None. Further ones are `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    named = {k[len(key) + 1 :]: v for k, v in metadata.items() if k.startswith(key + ".")}
    if source is None:
        source = named.get("default")
    if source is None:
        return None
    return _made(
        source,
        named,
        _special_of(metadata) if tokenizer is None else tokenizer.special_tokens,
        file,
    )


def template_from_directory(
    path: str | Path, tokenizer: Tokenizer | None = None
) -> ChatTemplate | None:
    """The chat template of a model directory, or None: chat_template.jinja (and additional_chat_templates/), chat_template.json, or
    the `chat_template` of tokenizer_config.json, which may be a list of named ones."""
    from verbatim.text.hf_vocab import read_json, special_texts

    folder = Path(path)
    config = read_json(folder / "tokenizer_config.json", missing={})
    special = special_texts(folder, config) if tokenizer is None else tokenizer.special_tokens
    main = folder / "chat_template.jinja"
    if main.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return _made(
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
    return _made(found, named, special, str(file))


def _made(
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


# -------------------------------------------------------------------------------------------------------------- plain data


def _values(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}


def _listed(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{what} is {type(value).__name__}, not a list", param=what)
    return value


def _watched(message: dict[str, Any]) -> dict[str, Any]:
    from verbatim.text.template_reads import Watched

    return Watched(message)


def _check_looked_at(
    message: dict[str, Any], index: int, given: Sequence[Mapping[str, Any]]
) -> None:
    """After rendering: a key that the template did not look at has been dropped, unless it said nothing new."""
    unseen = getattr(message, "unseen", None)
    for key in unseen() if unseen is not None else ():
        if (
            key not in NOT_WATCHED
            and given[index].get(key) is not None
            and not (key == "name" and repeats_call(given, index))
        ):
            why = f"the model's chat template does not look at the {key} of such a message; leave it out, or write it into content"
            raise UnsupportedError(f"messages[{index}].{key}", why)


def _text_of(part: Any, where: str) -> str:
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


def _plain(value: Any, shield: Shield, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types only, with typed control tokens covered. The template sees nothing else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return shield.cover(str(value))
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
        return {shield.cover(str(k)): _plain(v, shield, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, shield, where, depth + 1) for v in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}, which is not JSON", param=where.partition("[")[0]
    )


def _said(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return json.dumps(text, ensure_ascii=False)[1:-1][:300]
