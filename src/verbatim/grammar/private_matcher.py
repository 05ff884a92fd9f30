"""A matcher of one text's own, made when the one that many share is used up: it alone decides whether a text became too complex to follow.

llguidance's copies share one lexer, whose states are limited. When they are used up depends on all who share it, and on their pace: so that must
never end a text. What ends it is a function of its own tokens:

    a matcher that shares nothing takes the tokens from the first on, its mask computed after each, as if nobody else had ever been;
    where its lexer is used up after STRETCH tokens or more, a new one takes the tokens up to there, and goes on;
    where it is used up sooner, the text ends.

The shared one has half the limits (`halved`): what passes it, with states that others found before, passes alone as well.

Compiling takes milliseconds, for the largest tenths of a second, and the walk as long as the text's masks took before. So it is done beside the engine, one at
a time; the sequence waits for it, and nobody else does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

STRETCH = 1024  # tokens that a lexer must have lasted for another to be made: what bounds the compiling for one text
SIGNS = (
    "too many states",
    "too many expressions",
    "PoisonError",
)  # of a lexer that can do no more, in llguidance's errors
HALVED = ("max_lexer_states", "step_lexer_fuel")

_BESIDE = ThreadPoolExecutor(
    1, "own-matchers"
)  # one, so that however many wait, they take one processor at most


class Origin(NamedTuple):
    """A matcher at the beginning of a text, quickly copied however long the text is by now; and a token that may come first."""

    inner: Any
    token: int

    def tried(self) -> Any:
        """A copy that took it: an error shows that the lexer, which all copies share, is used up."""
        trial = self.inner.deep_copy()
        trial.consume_token(self.token)
        return trial


class Own(NamedTuple):
    inner: Any
    origin: Origin
    since: int  # tokens taken when its lexer was begun
    mask: bytes | None  # of the next token; None where none may follow, or after an error


def halved(limits: dict[str, Any]) -> dict[str, Any]:
    """The limits of what is shared."""
    return limits | {name: limits[name] // 2 for name in HALVED}


def used_up(inner: Any) -> bool:
    return bool(inner.is_error()) and any(sign in inner.get_error() for sign in SIGNS)


def renewable(inner: Any, since: int | None, taken: int) -> bool:
    """Used up, and that is not the text's end: what was shared (`since` is None), or what has lasted."""
    return used_up(inner) and (since is None or taken - since >= STRETCH)


def renew(
    make: Callable[[], Origin],
    taken: Sequence[int],
    since: int | None,
    wanted: Callable[[], object],
) -> Future[Own]:
    """What follows after these tokens, in a while. `wanted`: None when nobody waits for it any more."""
    return _BESIDE.submit(_walk if since is None else _begin, make, tuple(taken), wanted)


def consumed(inner: Any, origin: Origin, token: int) -> Any:
    """The matcher, behind the token; or one that tells the error. A lexer that is used up in the middle of a token makes llguidance say that the token is wrong."""
    inner.consume_token(token)
    if inner.is_error() and not used_up(inner):
        trial = origin.tried()
        return trial if used_up(trial) else inner
    return inner


def first_token(mask: bytes) -> int:
    """The last of them, where there are several."""
    return max(int.from_bytes(mask, "little").bit_length() - 1, 0)


def masked(inner: Any, origin: Origin | None) -> tuple[Any, bytes | None]:
    """The mask of the next token, and the matcher; after an error no mask, and a matcher that tells the error.

    Where llguidance thinks that there is one way only, it does not ask its lexer, and does not notice that it is used up: then what it says may be
    wrong, without an error (a single token where hundreds may follow). When a token is taken it does notice. So where there is one way, that is tried, at the
    beginning of the text; None: this is the beginning."""
    mask = bytes(inner.compute_bitmask())
    if inner.is_error():
        return inner, None
    if len(mask) - mask.count(0) <= 1:
        trial = (origin or Origin(inner, first_token(mask))).tried()
        if used_up(trial):
            return trial, None
    return inner, mask


def _walk(make: Callable[[], Origin], taken: tuple[int, ...], wanted: Callable[[], object]) -> Own:
    own = _begin(make, (), wanted)
    for count, token in enumerate(taken, 1):
        if own.inner.is_error():
            break
        if wanted() is None:
            raise CancelledError
        own = _looked(consumed(own.inner, own.origin, token), own.origin, own.since)
        if renewable(own.inner, own.since, count):
            own = _begin(make, taken[:count], wanted)
    return own


def _begin(make: Callable[[], Origin], taken: tuple[int, ...], wanted: Callable[[], object]) -> Own:
    if wanted() is None:
        raise CancelledError
    origin = make()
    inner = origin.inner.deep_copy()
    inner.consume_tokens(list(taken))
    return _looked(inner, origin, len(taken))


def _looked(inner: Any, origin: Origin, since: int) -> Own:
    inner, mask = (
        (inner, None) if inner.is_stopped() else masked(inner, origin)
    )  # in an error it is stopped too
    return Own(inner, origin, since, mask)
