"""Arguments of generate() and chat(): one prompt or many, parameters, a progress bar, and hints for
arguments of other libraries.

In: what the caller wrote. Out: lists of equal length, or an error that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verbatim.base.defaults import GENERATE, GENERATE_TOKENS
from verbatim.base.errors import ParameterError
from verbatim.base.migration_hints import argument, hints
from verbatim.base.params import FIELDS, SamplingParams

Prompt = str | Sequence[int]
# Arguments of other libraries' chat() that would be taken for options of the chat template.
FOREIGN = ("sampling_params", "use_tqdm", "chat_template_kwargs", "stream")


class ProgressBar(Protocol):
    """What tqdm has. `progress=` takes True (tqdm itself), or a function that makes such a bar from
    total=... and desc=...; rich, Jupyter and training loops have adapters with this interface."""

    def update(self, n: int) -> Any: ...
    def close(self) -> None: ...


class NoBar:
    """A progress bar that shows nothing."""

    def update(self, n: int) -> None:
        """Ignore the progress."""

    def close(self) -> None:
        """Do nothing."""


def is_one(prompts: object) -> bool:
    """A string or a list of ids is one prompt. A list of strings or of lists is a batch, and so is
    an empty list."""
    if isinstance(prompts, str):
        return True
    if prompts is None:
        raise ParameterError("prompts", "is missing; give a string or a list of token ids")
    if not isinstance(prompts, Sequence):
        key = next((k for k in ("prompt", "prompt_token_ids") if _has(prompts, k)), None)
        what = f"give its {key!r} alone" if key else "give a string, token ids or a list of them"
        raise ParameterError(
            "prompts", f"{type(prompts).__name__} is neither a prompt nor a list of prompts; {what}"
        )
    return len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence))


def _has(prompt: object, key: str) -> bool:
    return isinstance(prompt, Mapping) and key in prompt


def is_one_chat(messages: object) -> bool:
    return not isinstance(messages, (list, tuple)) or all(
        isinstance(message, Mapping) for message in messages
    )


def one(params: object) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        write = "SamplingParams(**params)" if isinstance(params, Mapping) else "SamplingParams(...)"
        raise ParameterError(
            "params", f"{type(params).__name__} is not a SamplingParams; write {write}"
        )
    return params or SamplingParams()


def each(params: object, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [one(params)] * count
    if not isinstance(params, (list, tuple)):
        return [one(params)]  # raises
    if len(params) != count:
        raise ParameterError(
            "params", f"{len(params)} for {count} prompts; give one for all, or one per prompt"
        )
    return [one(p) for p in params]


def bounded(params: SamplingParams) -> SamplingParams:
    """`params` of generate(), which stops at GENERATE_TOKENS where max_tokens is missing. The
    engine applies it, because it knows what room the prompt leaves."""
    if params.max_tokens is not None or params.min_tokens > GENERATE_TOKENS:
        return params
    return params.with_origins({"max_tokens": GENERATE})


def refuse_unknown(call: str, unknown: Mapping[str, object]) -> None:
    """TypeError for an argument that the call does not have."""
    for name in unknown:
        hint = f"give it in params: SamplingParams({name}=...)" if name in FIELDS else None
        raise argument(call, name, hint)


def refuse_foreign(call: str, template: Mapping[str, object]) -> None:
    """TypeError for a template option that is a sampling parameter elsewhere or here."""
    for name in template:
        if name in FIELDS or name in hints("parameters") or name in FOREIGN:
            refuse_unknown(call, {name: None})


def progress_bar(progress: object, total: int, desc: str) -> ProgressBar:
    if progress is False or progress is None:
        return NoBar()
    if progress is True:
        from tqdm.auto import tqdm

        progress = tqdm
    if not callable(progress):
        raise ParameterError(
            "progress", f"{progress!r:.40} is not True, False or a function like tqdm"
        )
    bar: ProgressBar = progress(total=total, desc=desc)
    return bar
