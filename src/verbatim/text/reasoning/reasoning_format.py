"""Reasoning models: split an output into the reasoning and the answer.

In: a model's chat templates and a prompt. Out: a ReasoningFormat, which makes the Splitter of an
output. The markers are those of the chat template: a pair of tags such as `<think>` and `</think>`
(tag_splitter.py), or the channels of the harmony format (harmony.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from verbatim.text.reasoning.harmony import CHANNEL, MARKERS, MESSAGE, HarmonySplitter
from verbatim.text.reasoning.tag_splitter import Piece, TagSplitter, spellings

# Opening and closing tag of each format. A model has the format whose closing tag its chat
# template contains.
TAGS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek, SmolLM3, GLM, Granite 3.3, most others
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere: Command R7B, Command A Reasoning
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
# Tags around the answer behind reasoning, where the chat template mentions them.
WRAPPERS = (("<response>", "</response>"), ("<answer>", "</answer>"))  # Granite 3.3; Hunyuan


class Splitter(Protocol):
    """Splits the output of one choice."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        ...

    def push(self, text: str) -> list[Piece]: ...

    def mark(self, marker: str) -> list[Piece]:
        """The output continues with a token of `marker_ids`, whose text this is."""
        ...

    def finish(self) -> list[Piece]:
        """End of the output: what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning, and where the output of one prompt starts.

    open_id: token that begins the opening tag; None where it is ordinary text
    close_ids: the tokens that end reasoning and begin the answer; empty where no tokens spell it
    marker_ids: tokens that are markers, which the splitter needs to see
    special: markers of the harmony format that are tokens, and are recognised by their id
    start: "open" when the prompt ends inside reasoning, "closed" when it ends behind one, ""
    when the model decides
    named: the prompt contains the opening tag, as one that explains how to think does
    wrapper: tags around the answer, which are no part of it
    opener: the text of open_id where it is a control token and only a part of the opening tag"""

    open: str
    close: str
    open_id: int | None = None
    close_ids: tuple[int, ...] = ()
    marker_ids: frozenset[int] = frozenset()
    special: frozenset[str] = frozenset()
    start: Literal["", "open", "closed"] = ""
    named: bool = False
    wrapper: tuple[str, str] | None = None
    opener: str = ""

    @property
    def harmony(self) -> bool:
        return self.open == CHANNEL

    @property
    def told(self) -> bool:
        """Whether the output may start with reasoning. An opening tag of ordinary text counts only
        where the prompt mentions it."""
        return self.start == "open" or self.named or self.open_id is not None

    def after(self, prompt: str) -> ReasoningFormat:
        """The format for an output that follows this prompt text."""
        # with a thinking budget of 0 Seed-OSS' template starts the reasoning with a second tag
        tail = prompt.rstrip().removesuffix("<seed:cot_budget_reflect>")
        if self.harmony:
            return self
        if tail.endswith(tuple(tag.rstrip() for tag in spellings(self.open))):
            return replace(self, start="open")
        if tail.endswith(spellings(self.close)):
            return replace(self, start="closed")
        return replace(self, named=self.open.strip() in prompt)

    def splitter(self) -> Splitter:
        if self.harmony:
            return HarmonySplitter(self.special)
        return TagSplitter(self.open, self.close, self.start, self.wrapper, self.opener)


def find_format(sources: Iterable[str], tokenizer: object) -> ReasoningFormat | None:
    """The reasoning format of a model, from its chat templates; None if it has none."""
    text = "\n".join(source for source in sources if isinstance(source, str))
    if CHANNEL in text and "analysis" in text:
        return _harmony(tokenizer)
    closed = [pair for pair in TAGS if pair[1] in text]
    # Olmo 3 Think's template has the opening tag only.
    pairs = closed or [pair for pair in TAGS if pair[0].strip() in text]
    return _tagged(*pairs[0], text, tokenizer) if pairs else None


def _tagged(open_tag: str, close: str, template: str, tokenizer: Any) -> ReasoningFormat:
    opening = tokenizer.encode(open_tag, special=True)
    closing = tokenizer.encode(close, special=True)
    single = len(opening) == 1 or tokenizer.is_control(opening[0])
    markers = frozenset(i for i in (*opening, *closing) if tokenizer.is_control(i))
    first = opening[0] if single else None
    wrapper = next((pair for pair in WRAPPERS if pair[0] in template), None)
    spelled = b"".join(map(tokenizer.token_bytes, closing)).endswith(close.encode())
    ids = tuple(closing) if spelled else ()
    part = tokenizer.token_bytes(opening[0]).decode("utf-8", "replace")
    opener = part if len(opening) > 1 and tokenizer.is_control(opening[0]) else ""
    return ReasoningFormat(open_tag, close, first, ids, markers, wrapper=wrapper, opener=opener)


def _harmony(tokenizer: Any) -> ReasoningFormat:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, special=True))

    found = {marker: encode(marker) for marker in MARKERS}
    special = {
        marker: ids[0]
        for marker, ids in found.items()
        if len(ids) == 1 and tokenizer.token_bytes(ids[0]) == marker.encode()
    }
    return ReasoningFormat(
        CHANNEL,
        MESSAGE,
        special.get(CHANNEL),
        encode(f"<|end|><|start|>assistant{CHANNEL}final{MESSAGE}"),
        frozenset(special.values()),
        frozenset(special),
    )
