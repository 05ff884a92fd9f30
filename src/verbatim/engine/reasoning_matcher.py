"""A matcher for reasoning models: the grammar applies to the answer, not to the reasoning.

In: the matcher of the request's grammar, or None, and a tracker of the reasoning
(reasoning_tracker.py). Out: the masks of a Matcher. While the model thinks, every token is allowed
except an end of sequence and a token that holds both the end of the reasoning and the start of the
answer (with a grammar), and only the closing tag once the reasoning has used its token budget.

Before reasoning, the output may become reasoning or an answer: the masks allow what the grammar
allows and what continues the opening tag. White space before the tag belongs to the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from verbatim.base.errors import UnsupportedError
from verbatim.engine.reasoning_tracker import ReasoningTracker
from verbatim.text.reasoning.harmony import CHANNEL, MESSAGE
from verbatim.text.reasoning.reasoning_format import ReasoningFormat


def check_supported(reasoning: ReasoningFormat, field: str) -> None:
    """A budget needs tokens that close the reasoning, and harmony its markers as tokens."""
    if reasoning.start == "closed":
        return
    missing = [m for m in (CHANNEL, MESSAGE) if reasoning.harmony and m not in reasoning.special]
    if field == "thinking_budget" and not reasoning.close_ids:
        missing.append(reasoning.close)
    if missing:
        raise UnsupportedError(
            field,
            f"is not supported while this model thinks: the tokenizer cannot write its marker "
            f"{missing[0]!r}; switch thinking off in the chat template",
        )


class ReasoningMatcher:
    """The grammar state of one sequence of a reasoning model."""

    def __init__(
        self,
        inner: Any,
        tracker: ReasoningTracker,
        vocab: int,
        end_ids: Sequence[int],
        budget: int | None = None,
        close_ids: Sequence[int] = (),
    ) -> None:
        self._inner, self._tracker = inner, tracker
        self._fresh: Any = None  # the grammar before text that may belong to reasoning
        self._live = True  # the grammar allows the text so far: the output may be an answer
        self._size = (vocab + 7) // 8  # bytes of a mask
        self._ends, self._budget, self._close = frozenset(end_ids), budget, tuple(close_ids)
        self._used = 0  # tokens of the reasoning so far
        self._inside_mask = _changed(b"\xff" * self._size, without=self._ends)

    # --------------------------------------------------------------- the interface of a Matcher

    @property
    def finished(self) -> bool:
        return bool(self._answering and self._inner is not None and self._inner.finished)

    @property
    def accepting(self) -> bool:
        return self._answering and (self._inner is None or self._inner.accepting)

    @property
    def pending(self) -> Future[Any] | None:
        found: Future[object] | None = None if self._inner is None else self._inner.pending
        return found

    def poll_mask(self) -> bool:
        if self._tracker.state == "reasoning" or self._inner is None or not self._live:
            return True
        return bool(self._inner.poll_mask())

    def mask(self) -> bytes | None:
        if self._tracker.state == "reasoning":
            return self._reasoning_mask(self._used, self._tracker)
        if self._inner is None:
            return None
        mask: bytes = self._inner.mask() if self._live else b""
        if self._answering:
            return mask
        allowed, forbidden = self._tracker.opening()
        return _changed(mask.ljust(self._size, b"\0"), allowed, forbidden)

    def masks_along(self, drafts: Sequence[int]) -> tuple[bytes | None, ...]:
        if self._answering and self._inner is not None:
            masks: tuple[bytes | None, ...] = self._inner.masks_along(drafts)
            return masks
        if self._tracker.state == "reasoning":
            tracker, used, found = self._tracker.copy(), self._used, [self.mask()]
            for token in drafts:
                tracker.push(token)
                used += not tracker.calling
                found.append(self._reasoning_mask(used, tracker))
            return tuple(found)
        assert not (drafts and self._tracker.state == "start"), "no drafts before the reasoning"
        return (self.mask(), *(None for _ in drafts))

    def allowed_drafts(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Drafts end before the token that closes the reasoning, and before its budget is used."""
        if self._answering:
            return tuple(drafts if self._inner is None else self._inner.allowed_drafts(drafts))
        if self._tracker.state == "start":
            return ()
        room = len(drafts) if self._budget is None else max(self._budget - self._used, 0)
        tracker, stops = self._tracker.copy(), self._ends if self._inner is not None else ()
        for count, token in enumerate(drafts[:room]):
            tracker.push(token)
            if token in stops or tracker.state == "answer":
                return tuple(drafts[:count])
        return tuple(drafts[:room])

    def forced(self) -> tuple[int, ...]:
        if not self._answering or self._inner is None:
            return ()
        found: tuple[int, ...] = self._inner.forced()
        return found

    def advance(self, token: int) -> None:
        before = self._tracker.state
        self._tracker.push(token)
        if before == "start" and self._tracker.opened:
            self._inner, self._fresh, self._live = self._fresh or self._inner, None, True
            self._used = 1
        elif before == "reasoning":
            self._used += not self._tracker.calling
        elif self._inner is not None:
            self._advance_grammar(token)

    def _advance_grammar(self, token: int) -> None:
        """Consume a token of the answer, or of text that may still become reasoning."""
        undecided = self._tracker.state == "start"
        if undecided and self._fresh is None:
            self._fresh = self._inner.copy()
        if undecided and self._live:
            self._live = allows(self._inner.mask(), token)
        assert self._live or undecided, "the masks allow the grammar or the opening tag"
        if self._live:
            self._inner.advance(token)
        if undecided and self._live and self._inner.finished:
            self._tracker.state = "answer"
        if self._answering:
            self._fresh = None

    def copy(self) -> ReasoningMatcher:
        inner = None if self._inner is None else self._inner.copy()
        twin = ReasoningMatcher(inner, self._tracker.copy(), 0, (), self._budget, self._close)
        twin._size, twin._ends, twin._inside_mask = self._size, self._ends, self._inside_mask
        twin._live, twin._used = self._live, self._used
        twin._fresh = None if self._fresh is None else self._fresh.copy()
        return twin

    # ------------------------------------------------------------------------------------ masks

    @property
    def _answering(self) -> bool:
        return self._tracker.state == "answer"

    def _reasoning_mask(self, used: int, tracker: ReasoningTracker) -> bytes | None:
        """The mask after `used` tokens of reasoning: from the budget on, the closing tokens one by
        one."""
        if self._budget is not None and used >= self._budget:
            at = min(used - self._budget, len(self._close) - 1)
            return _changed(bytes(self._size), (self._close[at],))
        if self._inner is None:
            return None
        crossing = tracker.crossing()
        return _changed(self._inside_mask, without=crossing) if crossing else self._inside_mask


def _changed(mask: bytes, allow: Iterable[int] = (), without: Iterable[int] = ()) -> bytes:
    """The mask with some ids allowed, and others not."""
    bits = bytearray(mask)
    for token in allow:
        bits[token // 8] |= 1 << token % 8
    for token in without:
        bits[token // 8] &= ~(1 << token % 8) & 0xFF
    return bytes(bits)


def allows(mask: bytes, token: int) -> bool:
    """Bit `token` of a grammar mask; ids past its end are not allowed."""
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)
