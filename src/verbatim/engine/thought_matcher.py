"""A matcher for reasoning models: the grammar applies to the answer, not to the thought.

In: the matcher of the request's grammar, or None, and the model's thought format. Out: the masks
of a Matcher. While the model thinks, every token is allowed except an end of sequence (with a
grammar), and only the closing tag once the thought has used its token budget. White space before
the opening tag belongs to the format (text/tag_splitter.py), so a thought may start behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from verbatim.base.errors import UnsupportedError
from verbatim.text.thoughts import ThoughtFormat

State = Literal["start", "thought", "answer"]


def check_supported(thoughts: ThoughtFormat, field: str) -> None:
    """A grammar or a budget needs a thought that starts and ends at a token.

    Where the opening tag is text and the prompt does not mention it, the model was not told to
    think: a grammar applies from the first token."""
    told = thoughts.start == "open" or thoughts.named or thoughts.open_id is not None
    if thoughts.start == "closed" or not (told or field == "thinking_budget"):
        return
    tag = None if thoughts.answer_ids else thoughts.close
    if thoughts.start != "open" and thoughts.open_id is None:
        tag = thoughts.open
    if tag is not None:
        raise UnsupportedError(
            field,
            f"is not supported while this model thinks: its marker {tag!r} is not one token; "
            "switch thinking off in the chat template",
        )


class ThoughtMatcher:
    """The grammar state of one sequence of a reasoning model."""

    def __init__(
        self,
        inner: Any,
        thoughts: ThoughtFormat,
        vocab: int,
        end_ids: Sequence[int],
        budget: int | None = None,
        is_space: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self._inner, self._thoughts = inner, thoughts
        self._fresh: Any = None  # the grammar before white space that may precede a thought
        self._is_space = is_space
        self._vocab, self._ends, self._budget = vocab, frozenset(end_ids), budget
        self._state: State = "start"
        if thoughts.start:
            self._state = "thought" if thoughts.start == "open" else "answer"
        self._tokens: list[int] = []  # of the thought so far
        self._thinking = None if inner is None else self._all_but_ends()

    # --------------------------------------------------------------- the interface of a Matcher

    @property
    def finished(self) -> bool:
        return bool(self._state == "answer" and self._inner is not None and self._inner.finished)

    @property
    def accepting(self) -> bool:
        return self._state == "answer" and (self._inner is None or self._inner.accepting)

    @property
    def rebuilding(self) -> Future[Any] | None:
        found: Future[Any] | None = None if self._inner is None else self._inner.rebuilding
        return found

    def poll_mask(self) -> bool:
        return self._state == "thought" or self._inner is None or bool(self._inner.poll_mask())

    def mask(self) -> bytes | None:
        if self._state == "thought":
            return self._thought_mask(len(self._tokens))
        if self._inner is None:
            return None
        mask: bytes = self._inner.mask()
        if self._state == "answer" or self._thoughts.open_id is None:
            return mask
        return _with(mask.ljust(self._size, b"\0"), self._thoughts.open_id)

    def masks_along(self, drafts: Sequence[int]) -> tuple[bytes | None, ...]:
        if self._state == "answer" and self._inner is not None:
            masks: tuple[bytes | None, ...] = self._inner.masks_along(drafts)
            return masks
        if self._state == "thought":
            used = len(self._tokens)
            return tuple(self._thought_mask(used + i) for i in range(1 + len(drafts)))
        assert not (drafts and self._state == "start"), "nothing is drafted before the thought"
        return (self.mask(), *(None for _ in drafts))

    def allowed_drafts(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Drafts end before the tokens that close the thought, and before its budget is used."""
        if self._state == "answer":
            found = drafts if self._inner is None else self._inner.allowed_drafts(drafts)
            return tuple(found)
        if self._state == "start":
            return ()
        used = len(self._tokens)
        room = len(drafts) if self._budget is None else max(self._budget - used, 0)
        stops = {self._thoughts.answer_ids[-1], *(self._ends if self._inner is not None else ())}
        end = next((i for i, token in enumerate(drafts[:room]) if token in stops), room)
        return tuple(drafts[:end])

    def forced(self) -> tuple[int, ...]:
        if self._state != "answer" or self._inner is None:
            return ()
        found: tuple[int, ...] = self._inner.forced()
        return found

    def advance(self, token: int) -> None:
        if self._state == "thought":
            self._tokens.append(token)
            answer = self._thoughts.answer_ids
            if tuple(self._tokens[-len(answer) :]) == answer:
                self._state = "answer"
        elif self._state == "start" and token == self._thoughts.open_id:
            self._state = "thought"
            self._tokens.append(token)
            self._inner, self._fresh = self._fresh or self._inner, None
        else:
            self._advance_answer(token)

    def _advance_answer(self, token: int) -> None:
        space = self._state == "start" and self._is_space(token)
        if self._inner is not None:
            if space and self._fresh is None:
                self._fresh = self._inner.copy()
            self._inner.advance(token)
        if not space or (self._inner is not None and self._inner.finished):
            self._state, self._fresh = "answer", None

    def copy(self) -> ThoughtMatcher:
        inner = None if self._inner is None else self._inner.copy()
        twin = ThoughtMatcher(
            inner, self._thoughts, self._vocab, tuple(self._ends), self._budget, self._is_space
        )
        twin._state, twin._tokens = self._state, list(self._tokens)
        twin._fresh = None if self._fresh is None else self._fresh.copy()
        return twin

    # ------------------------------------------------------------------------------------ masks

    @property
    def _size(self) -> int:
        return (self._vocab + 7) // 8

    def _thought_mask(self, used: int) -> bytes | None:
        """The mask after `used` tokens of thought: from the budget on, the closing tokens one by
        one."""
        if self._budget is not None and used >= self._budget:
            close = self._thoughts.close_ids
            return _with(bytes(self._size), close[min(used - self._budget, len(close) - 1)])
        return self._thinking

    def _all_but_ends(self) -> bytes:
        """Every id of the vocabulary except the ends of a sequence."""
        bits = bytearray(b"\xff" * self._size)
        for token in self._ends:
            bits[token // 8] &= ~(1 << token % 8) & 0xFF
        return bytes(bits)


def _with(mask: bytes, token: int) -> bytes:
    """The mask with one more id allowed."""
    bits = bytearray(mask)
    bits[token // 8] |= 1 << token % 8
    return bytes(bits)
