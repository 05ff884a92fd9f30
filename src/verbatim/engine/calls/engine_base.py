"""EngineBase: what LLM and AsyncEngine share. A model name and options come in; a loaded model with
its EngineCore goes out."""

from __future__ import annotations

import inspect
import logging
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, Unpack

from verbatim.base.config import SETTINGS, EngineConfig, EngineOptions, split_adapter
from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.base.migration_hints import AnsweringType, attribute, hints
from verbatim.engine.core import EngineCore
from verbatim.engine.embed_input import can_embed
from verbatim.engine.loaded_model import LoadedModel, Progress
from verbatim.engine.loading.load_engine import load_for_engine
from verbatim.engine.read_prompt import EncodedText, encoded, format_after, lost_in
from verbatim.text.reasoning.reasoning_format import ReasoningFormat

log = logging.getLogger("verbatim.engine")
P = ParamSpec("P")
Message = Mapping[str, Any]
RENAMED = {"parts": "loaded", "thoughts": "reasoning"}  # deprecated attributes
# Not allowed as template options
RESERVED_OPTIONS = {"tokenizer", "template", "messages", "warnings"}
# A message with one of these needs no content.
CONTENT_SUBSTITUTES = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def with_settings(init: Callable[P, None]) -> Callable[P, None]:
    """Put every engine setting into the signature and the docstring of a constructor, in place of
    its `**settings`: help(LLM) and an editor's hint list them."""
    signature = inspect.signature(init)
    *own, _ = signature.parameters.values()
    types = {name: kind.__forward_arg__ for name, kind in EngineOptions.__annotations__.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [
        inspect.Parameter(name, kind, default=rule.default, annotation=types[name])
        for name, rule in SETTINGS.items()
    ]
    init.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
    init.__annotations__ = {**init.__annotations__, **types}
    del init.__annotations__["settings"]
    lines = [f"{name}: {rule.help}" for name, rule in SETTINGS.items()]
    wrap = partial(textwrap.fill, width=96, initial_indent=" " * 8, subsequent_indent=" " * 12)
    text = "\n".join(wrap(line, break_on_hyphens=False) for line in lines)
    init.__doc__ = (init.__doc__ or "").replace("        settings: see EngineConfig", text)
    return init


class EngineBase(metaclass=AnsweringType):
    """A loaded model: what LLM and AsyncEngine have in common."""

    @with_settings
    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        revision: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        **settings: Unpack[EngineOptions],
    ) -> None:
        """Load a model. Blocks until it is ready.

        model: a path to a .gguf file or a safetensors directory, a catalog name (`smollm2`), or
            `org/name` on the hub
        revision: a branch, tag or commit on the hub
        offline: use only files that are on this machine
        progress: called as progress(task, done, total) while files are fetched and read
        settings: see EngineConfig

        An unknown option is a TypeError that names the right one.
        """
        if not isinstance(model, (str, os.PathLike)):
            raise ParameterError(
                "model", f"{model!r:.40} is not a model; give a name or a path, such as 'smollm2'"
            )
        config = _config(type(self).__name__, settings)
        loaded = load_for_engine(
            model, config, revision=revision, offline=offline, progress=progress
        )
        for line in loaded.warnings:
            log.warning("%s: %s", loaded.name, line)
        self._open(loaded, config)

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, **options: Any) -> Self:
        """An engine for an already loaded model, or for the fakes of verbatim.testing.fakes."""
        self = cls.__new__(cls)
        config = _config(cls.__name__, options)
        named = [split_adapter(entry)[0] for entry in config.adapters]
        if named and named != [adapter.name for adapter in loaded.adapters]:
            raise ParameterError(
                "adapters", "the model was loaded without them; use load_for_engine()"
            )
        self._open(loaded, config)
        return self

    if not TYPE_CHECKING:  # a type checker reports unknown names itself
        from_parts = from_loaded  # deprecated, as RENAMED

        def __getattr__(self, name: str) -> Any:
            if name in RENAMED:
                return getattr(self, RENAMED[name])
            raise attribute(self, name, "methods")

        def __call__(self, *_: object, **__: Any) -> Any:
            raise TypeError("an engine is not a function; use generate(prompt) or chat(messages)")

    def _open(self, loaded: LoadedModel, config: EngineConfig) -> None:
        """Subclasses extend this with their own state: locks, streams, a thread."""
        loaded, config = _prepared(loaded, config)
        self.loaded = loaded
        self.core = EngineCore(loaded, config)
        self.config = self.core.config
        sizes = (config.context, config.kv_memory, config.kv_blocks)
        if shortage := self.core.cache_plan.shortage:
            log.log(logging.WARNING if any(sizes) else logging.INFO, "%s", shortage)
        self._backend_name = loaded.backend.info.name  # a closed backend has no info

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.loaded.name!r}, backend={self._backend_name!r},"
            f" context={self.context})"
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. `encode`, `decode` and `encode_chat` of this object are simpler.

        >>> llm.tokenizer.decode(llm.encode("hi"))
        'hi'
        """
        return self.loaded.tokenizer

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and completion together.

        >>> llm.context > 1000
        True
        """
        return self.core.context

    @property
    def warnings(self) -> tuple[str, ...]:
        """Keys of the model's files that are ignored, or that transformers reads differently.
        Logged when the model is loaded.

        >>> llm.warnings
        ()
        """
        return self.loaded.warnings

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template, which chat() needs.

        >>> llm.has_template
        True
        """
        return self.loaded.template is not None

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """How a reasoning model marks its reasoning, from its chat template; None without any."""
        from verbatim.text.reasoning.reasoning_format import find_format

        if self.loaded.template is None:
            return None
        return find_format(self.loaded.template.sources.values(), self.loaded.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Digest of model, backend and numerics: equal fingerprints promise equal tokens.

        >>> llm.fingerprint[:3]
        'vb-'
        """
        return self.core.fingerprint

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a plain prompt.

        text: the prompt
        parse_special: the literal text of a control token ("<|im_start|>") becomes that token, for
            prompts that are already in the model's chat format; without it, the text stays text

        >>> llm.decode(llm.encode("hi"))
        'hi'
        """
        return encoded(self.loaded.tokenizer, text, special=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without control tokens.

        >>> llm.decode(llm.encode("Paris"))
        'Paris'
        """
        return self.loaded.tokenizer.decode(ids)

    def encode_chat(self, messages: Sequence[Message], /, **template: Any) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template. A control token typed
        by a user stays text.

        messages: a list such as [{"role": "user", "content": "Hello"}]
        template: options of the chat template (tools, enable_thinking, ...); continue_final=True
            leaves a last message of the assistant open

        >>> ids = llm.encode_chat([{"role": "user", "content": "Hello"}])
        >>> "Hello" in llm.decode(ids)
        True
        """
        if self.loaded.template is None:
            raise UnsupportedError(
                "messages",
                f"{self.loaded.name} has no chat template; use generate() with plain text",
            )
        from verbatim.text.control_tokens import strings_in
        from verbatim.text.reasoning.reasoning_switches import idle_switches, no_effect, switches_of
        from verbatim.text.templates.chat_template import encode_chat
        from verbatim.text.tools.function_tools import as_tools

        check_messages(messages)
        for name in RESERVED_OPTIONS & template.keys():
            raise ParameterError(
                "chat_template_kwargs", f"{name!r} is set by the engine; leave it out"
            )
        if template.get("tools"):
            template["tools"] = as_tools(template["tools"])
        tokenizer: Any = self.loaded.tokenizer
        reasons = self.reasoning is not None
        idle = idle_switches(template, switches_of(self.loaded.template), reasons)
        warnings = [no_effect(name, reasons) for name in idle]
        template = {name: value for name, value in template.items() if name not in idle}
        ids = EncodedText(
            encode_chat(tokenizer, self.loaded.template, messages, warnings=warnings, **template)
        )
        ids.warnings = tuple(warnings)
        ids.lost = lost_in(tokenizer, "".join(strings_in([messages, template])))
        ids.reasoning = format_after(ids, self.reasoning, tokenizer)
        return ids

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine (running, waiting, blocks, tokens in and out, ...).

        >>> llm.stats()["requests_running"]
        0
        """
        return self.core.stats()


def check_messages(messages: object) -> None:
    """Check that a conversation is a list of messages with content.

    text/templates/chat_template.py checks the rest."""
    shape = "[{'role': 'user', 'content': 'Hello'}]"
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ParameterError(
            "messages", f"{type(messages).__name__} is not a list of messages, such as {shape}"
        )
    if not messages:
        raise ParameterError("messages", f"the list is empty; give at least one, such as {shape}")
    for index, message in enumerate(messages):
        empty = (
            isinstance(message, Mapping) and "role" in message and message.get("content") is None
        )
        if empty and not any(message.get(name) for name in CONTENT_SUBSTITUTES):
            raise ParameterError("messages", f"messages[{index}] has no content; give it text")


def _config(caller: str, options: Mapping[str, Any]) -> EngineConfig:
    for name in options:
        if name not in SETTINGS:
            from difflib import get_close_matches

            near = get_close_matches(name, SETTINGS, 1, cutoff=0.7)
            known = f"known options: {', '.join(SETTINGS)}"
            hint = hints("options").get(name) or (f"did you mean {near[0]!r}?" if near else known)
            raise TypeError(f"{caller} has no option {name!r}; {hint}")
    return EngineConfig(**options)


def _prepared(loaded: LoadedModel, config: EngineConfig) -> tuple[LoadedModel, EngineConfig]:
    """Apply the setting `pooling`, and the settings of an engine that runs an encoder."""
    if config.pooling is not None:
        if loaded.task == "rerank":
            raise ParameterError("pooling", "has no effect on a cross-encoder; leave it out")
        loaded = replace(loaded, embedding=replace(loaded.embedding, pooling=config.pooling))
    loaded = replace(loaded, file=replace(loaded.file, embeds=can_embed(loaded)))
    if loaded.task != "generate":
        from verbatim.encoder.encoder import encoder_config

        config = encoder_config(config, loaded.context or loaded.backend.spec.context)
    return loaded, config
