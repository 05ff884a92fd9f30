"""Read a prompt: text, token ids or an input of `embed` in, valid token ids and warnings out."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.base.errors import ParameterError
from verbatim.engine.embed_input import EmbedInput, cut_text, encode_pair
from verbatim.engine.loaded_model import EngineTokenizer, LoadedModel
from verbatim.text.reasoning.reasoning_format import ReasoningFormat
from verbatim.text.tools.tool_use import ToolUse

TAIL = 64  # last tokens of a prompt that show whether it ends inside reasoning


class EncodedText(list[int]):
    """Token ids of a text that was encoded before its Request is made.

    lost: characters of the text that the vocabulary cannot encode
    plain: the text itself, when its literal control tokens were encoded as plain text
    reasoning: how the model marks its reasoning, in a conversation with a reasoning model
    tools: what the answer of a conversation may call
    warnings: about messages of a conversation, for the client"""

    lost: str = ""
    plain: str = ""
    reasoning: ReasoningFormat | None = None
    tools: ToolUse | None = None
    warnings: tuple[str, ...] = ()


def format_after(
    ids: Sequence[int], reasoning: ReasoningFormat | None, tokenizer: EngineTokenizer
) -> ReasoningFormat | None:
    """The format of reasoning for an output that follows these ids, a rendered conversation."""
    if reasoning is None:
        return None
    # An opening tag of ordinary text counts where the prompt mentions it (ReasoningFormat.told):
    # after() needs the whole prompt.
    shown = ids if reasoning.open_id is None else ids[-TAIL:]
    return reasoning.after(tokenizer.decode(shown, skip_special=False))


def conversation(
    ids: Sequence[int], reasoning: ReasoningFormat | None, tokenizer: EngineTokenizer
) -> EncodedText:
    """The ids of a rendered conversation, as encode_chat() returned them for a receipt."""
    made = EncodedText(ids)
    made.reasoning = format_after(ids, reasoning, tokenizer)
    return made


def read_prompt(
    loaded: LoadedModel, prompt: str | Sequence[int]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The prompt's token ids, and warnings about how it was encoded."""
    if isinstance(prompt, str):
        ids = tuple(loaded.tokenizer.encode_prompt(prompt))
    else:
        ids = _prompt_ids(prompt, loaded.backend.spec.vocab)
    warnings = (*_lost(loaded.tokenizer, prompt), *typed_control(loaded.tokenizer, prompt))
    return ids, (*warnings, *getattr(prompt, "warnings", ()))


def read_embed_input(
    loaded: LoadedModel, given: EmbedInput, context: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The token ids of an input of `embed` or `rerank`, and warnings about how it was encoded."""
    if given.document is not None:
        ids, warnings = encode_pair(loaded, given, context)
        return tuple(ids), tuple(warnings)
    if not given.text:
        raise ParameterError("prompt", "is empty; give at least one character or token")
    found, warned = read_prompt(loaded, given.with_prompt(loaded))
    cut, told = cut_text(loaded, given, found, context)
    return cut, (*warned, *told)


def _prompt_ids(prompt: Sequence[int], vocab: int) -> tuple[int, ...]:
    if isinstance(prompt, (bytes, bytearray)):
        raise ParameterError(
            "prompt", "bytes are neither text nor token ids; decode them, or give a list of ids"
        )
    try:
        ids = tuple(prompt)
    except TypeError:
        raise ParameterError(
            "prompt", f"{type(prompt).__name__} is neither a string nor a list of token ids"
        ) from None
    # The usual case without a line of Python per token: 0.1 instead of 1.6 ms for 2,000 of them
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return ids
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ParameterError("prompt", f"{token!r:.40} is not a token id")
        if not 0 <= token < vocab:
            raise ParameterError(
                "prompt", f"{token} is not a token id of this model (0 to {vocab - 1})"
            )
    return tuple(int(token) for token in ids)


def lost_in(tokenizer: EngineTokenizer, text: str) -> str:
    """Characters of a text that the vocabulary cannot encode. The fakes of verbatim.testing encode
    all of them and have no `lost`."""
    find_lost = getattr(tokenizer, "lost", None)
    return "" if find_lost is None else str(find_lost(text))


def encoded(
    tokenizer: EngineTokenizer, text: str, *, special: bool = False, bare: bool = False
) -> EncodedText:
    """Token ids of a plain prompt. `special`: the literal text of a control token becomes that
    token. `bare`: without the model's prompt prefix and suffix."""
    ids = EncodedText(
        (tokenizer.encode if bare else tokenizer.encode_prompt)(text, special=special)
    )
    ids.lost, ids.plain = lost_in(tokenizer, text), "" if special else text
    return ids


def _lost(tokenizer: EngineTokenizer, prompt: str | Sequence[int]) -> tuple[str, ...]:
    lost = lost_in(tokenizer, prompt) if isinstance(prompt, str) else getattr(prompt, "lost", "")
    if not lost:
        return ()
    named = ", ".join(f"U+{ord(character):04X}" for character in lost)
    it, stands = ("it", "it stands") if len(lost) == 1 else ("them", "they stand")
    return (
        f"prompt: the model's vocabulary cannot write {named}, "
        f"so the model does not read {it} as {stands}",
    )


def typed_control(tokenizer: EngineTokenizer, prompt: str | Sequence[int]) -> tuple[str, ...]:
    """Warn that a literal control token in a prompt stays text: a client that writes prompts in the
    model's chat format would not notice. Call it only for prompts that fit the context."""
    finder = getattr(tokenizer, "finder", None)
    text = prompt if isinstance(prompt, str) else getattr(prompt, "plain", "")
    token = finder.first(text) if finder is not None and text else None
    if token is None:
        return ()
    return (
        f"prompt: the text of the control token {token!r} was read as plain text; "
        "parse_special makes it the token",
    )
