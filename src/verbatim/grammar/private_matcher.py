"""Private llguidance matcher for one sequence, built when the shared lexer reaches its state limit.

Copies of an llguidance matcher share one lexer with a limited number of states. When it is
exhausted depends on all sequences that share it, so that must never end a completion. Invariant:
whether a completion ends as too complex depends on its own tokens alone.

    A private matcher replays the tokens from the first, computing the mask after each.
    If its lexer is exhausted after MIN_LEXER_TOKENS tokens or more, a new lexer replaces it.
    If its lexer is exhausted sooner, the completion ends.

The shared lexer has half the limits (`shared_limits`): what passes there also passes alone. A
rebuild takes milliseconds to tenths of a second, plus the time of the masks. It runs in one
background thread; only the sequence that needs it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

MIN_LEXER_TOKENS = 1024  # per private lexer; bounds the number of compiles per completion
# Substrings of llguidance's error messages for an exhausted lexer.
EXHAUSTED_ERRORS = ("too many states", "too many expressions", "PoisonError")
HALVED_LIMITS = ("max_lexer_states", "step_lexer_fuel")

# One thread: rebuilds take at most one CPU, however many sequences wait.
_REBUILD_THREAD = ThreadPoolExecutor(1, "private-matchers")


class InitialMatcher(NamedTuple):
    """A matcher in its initial state, which is cheap to copy, and a valid first token."""

    inner: Any
    token: int

    def probe(self) -> Any:
        """A copy that consumed the first token; an error shows that the lexer is exhausted."""
        trial = self.inner.deep_copy()
        trial.consume_token(self.token)
        return trial


class PrivateMatcher(NamedTuple):
    inner: Any
    origin: InitialMatcher
    lexer_start: int  # number of tokens when its lexer was created
    mask: bytes | None  # allowed next tokens; None when finished, or after an error


def shared_limits(limits: dict[str, Any]) -> dict[str, Any]:
    """The parser limits of a matcher whose lexer is shared."""
    return limits | {name: limits[name] // 2 for name in HALVED_LIMITS}


def lexer_exhausted(inner: Any) -> bool:
    return bool(inner.is_error()) and any(sign in inner.get_error() for sign in EXHAUSTED_ERRORS)


def can_rebuild(inner: Any, lexer_start: int | None, taken: int) -> bool:
    """The lexer is exhausted, and a new one may replace it: it was shared (`lexer_start` is None),
    or it lasted MIN_LEXER_TOKENS."""
    return lexer_exhausted(inner) and (
        lexer_start is None or taken - lexer_start >= MIN_LEXER_TOKENS
    )


def rebuild(
    make: Callable[[], InitialMatcher],
    taken: Sequence[int],
    lexer_start: int | None,
    wanted: Callable[[], object],
) -> Future[PrivateMatcher]:
    """Build a private matcher that has consumed these tokens. Cancelled once `wanted()` returns
    None: the sequence is gone."""
    return _REBUILD_THREAD.submit(
        _replay if lexer_start is None else _new_lexer, make, tuple(taken), wanted
    )


def consume(inner: Any, origin: InitialMatcher, token: int) -> Any:
    """The matcher after the token, or a copy that shows the real error: a lexer that is exhausted
    in the middle of a token makes llguidance report an invalid token."""
    inner.consume_token(token)
    if inner.is_error() and not lexer_exhausted(inner):
        trial = origin.probe()
        return trial if lexer_exhausted(trial) else inner
    return inner


def first_token(mask: bytes) -> int:
    """The highest token id that the mask allows."""
    return max(int.from_bytes(mask, "little").bit_length() - 1, 0)


def compute_mask(inner: Any, origin: InitialMatcher | None) -> tuple[Any, bytes | None]:
    """(matcher, mask of the next token); after an error (a matcher that shows the error, None).

    With a single allowed byte llguidance does not run its lexer, so it misses that the lexer is
    exhausted and may return a wrong mask without an error (one token where hundreds are allowed).
    Consuming a token does detect it. So such a mask is verified with a probe from the initial
    state; `origin` None: this matcher is in the initial state."""
    mask = bytes(inner.compute_bitmask())
    if inner.is_error():
        return inner, None
    if len(mask) - mask.count(0) <= 1:
        trial = (origin or InitialMatcher(inner, first_token(mask))).probe()
        if lexer_exhausted(trial):
            return trial, None
    return inner, mask


def _replay(
    make: Callable[[], InitialMatcher], taken: tuple[int, ...], wanted: Callable[[], object]
) -> PrivateMatcher:
    private = _new_lexer(make, (), wanted)
    for count, token in enumerate(taken, 1):
        if private.inner.is_error():
            break
        if wanted() is None:
            raise CancelledError
        private = _with_mask(
            consume(private.inner, private.origin, token), private.origin, private.lexer_start
        )
        if can_rebuild(private.inner, private.lexer_start, count):
            private = _new_lexer(make, taken[:count], wanted)
    return private


def _new_lexer(
    make: Callable[[], InitialMatcher], taken: tuple[int, ...], wanted: Callable[[], object]
) -> PrivateMatcher:
    if wanted() is None:
        raise CancelledError
    origin = make()
    inner = origin.inner.deep_copy()
    inner.consume_tokens(list(taken))
    return _with_mask(inner, origin, len(taken))


def _with_mask(inner: Any, origin: InitialMatcher, lexer_start: int) -> PrivateMatcher:
    # A matcher in an error state counts as stopped too.
    inner, mask = (inner, None) if inner.is_stopped() else compute_mask(inner, origin)
    return PrivateMatcher(inner, origin, lexer_start, mask)
