"""Structured output: (json_schema | regex | grammar | choice, tokenizer) -> masks, one for each token drawn.

    structure = compile_structure(params, tokenizer)     # off the engine's thread: up to PATIENCE seconds
    matcher = structure.start()                          # one for each sequence
    matcher.mask() -> bytes                              # bit i of byte i // 8, lowest first: may id i come next?
    matcher.look() -> bool                               # False: that takes a while, beside the engine (own.py); look again later
    matcher.advance(token);  matcher.finished            # finished: nothing but an end token could follow
    matcher.usable(drafts) -> (ids, ...)                 # the first of them, as far as the structure can follow
    matcher.masks_along(usable) -> (mask, ...)           # for the draws of a step with these drafts
    matcher.forced() -> (ids, ...)                       # what must come next: drafts that cost no guess

llguidance does the parsing (extra `grammar`); it is imported when first used. End tokens are allowed exactly where the text so
far is complete. Everything that could be hostile is bounded: the size and depth of what is given, the states and
steps of the parser, and the time to compile. What cannot be honoured is refused by name, never ignored. What was compiled lately is kept.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from verbatim.base.errors import OverloadedError, ParameterError, UnsupportedError
from verbatim.base.params import STRUCTURE, SamplingParams
from verbatim.grammar.compile_pool import Busy, CompilePool, PoolBusy, TooExpensive, never_busy
from verbatim.grammar.grammar_cache import Kept, digest
from verbatim.grammar.private_matcher import (
    Origin,
    Own,
    consumed,
    first_token,
    halved,
    masked,
    renew,
    renewable,
    used_up,
)
from verbatim.grammar.translate import choice_text, first_line, refusal

PATIENCE = 10.0  # seconds from arrival to the end of both compiles: twice the timeout of the pool
MAX_TEXT = 256 * 1024  # characters of a schema, grammar or all choices together
MAX_REGEX = 16 * 1024
AT_ONCE = 0.005  # seconds that a step of the engine may wait for scouts to be compiled;
BESIDE = 0.1  # what takes longer is made beside it, up to this: what takes longer still gets none
PLAIN = 64 * 1024  # characters; a shorter list of choices compiles within 40 ms and needs no worker

# Half of llguidance's defaults or less: one step stays within milliseconds, one matcher within some 50 MB.
LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class GrammarTokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def is_control(self, token: int) -> bool: ...
    def encode(self, text: str, *, special: bool = False) -> list[int]: ...


class Structure:
    """One compiled structure; start() gives a matcher for each sequence that must follow it.

    llguidance's copies share one lexer. The number of its states is limited: what one answer's text used up, another's would miss; and a failure inside it in one
    copy ends them all. So a matcher that finds it so gets one of its own (own.py), and nothing new is begun with what is `spent`.

    Guesses are walked by scouts: copies of a second one, compiled when the first guess is looked for. What wrong guesses use up, no answer misses; the scouts'
    own end only ends guessing. A structure that takes more than BESIDE to compile has none, and its answers no drafts."""

    def __init__(
        self, make: Callable[[dict[str, Any]], Any], field: str, eos_ids: Sequence[int]
    ) -> None:
        """`make`: compile it, with these limits."""
        self._make, self.field = make, field
        self.spent = False
        self._scouts: Origin | None = None
        self._scouting: bool | None = None  # None: nobody has looked for guesses yet
        self._eos = frozenset(eos_ids)
        began = time.thread_time()
        shared = self._make(halved(LIMITS))
        self._first = self._first_mask(shared)  # kept, so that no step of the engine waits for it
        self._origin = Origin(shared, first_token(self._first))
        self.seconds = time.thread_time() - began

    def _first_mask(self, shared: Any) -> bytes:
        """Raises where no text can follow it, or the very first step is too much."""
        if shared.is_error():
            raise refusal(self.field, shared.get_error())
        probe, mask = masked(shared.deep_copy(), None)
        if used_up(probe):  # what that means, one that shares nothing says
            probe, mask = masked(self._make(LIMITS), None)
        if "NoExtension" in probe.get_error() or not any(mask or b"?"):
            raise ParameterError(self.field, "no text can satisfy it")
        if mask is None:
            raise too_complex(self.field, probe)
        return mask

    def own(self) -> Origin:
        """A matcher that shares nothing."""
        return Origin(self._make(LIMITS), self._origin.token)

    @property
    def size(self) -> int:
        """Bytes, as far as we can tell: measured on many kinds, a millisecond of compiling leaves 80 to 170 KB, and its scouts as much again."""
        return int(100_000 + 200_000_000 * self.seconds) * (2 if self.seconds <= BESIDE else 1)

    def scout(self) -> Origin | None:
        """One from the beginning, to walk guesses with; None where there is none: not yet, not for this structure, or no more."""
        if self._scouting is None:
            self._scouting = self.seconds <= BESIDE
            if self.seconds <= AT_ONCE:
                self._make_scouts()
            elif self._scouting:
                # llguidance leaves Python's lock to others meanwhile; no daemon, so that Python's end waits for it
                threading.Thread(target=self._make_scouts).start()
        return self._scouts if self._scouting else None

    def _make_scouts(self) -> None:
        self._scouts = Origin(self._make(halved(LIMITS)), self._origin.token)

    @property
    def scouted(self) -> bool:
        return bool(self._scouting) and self._scouts is not None

    def end_scouting(self) -> None:
        """They have used up what they share."""
        self._scouting, self._scouts = False, None

    def start(self) -> Matcher:
        return Matcher(self, self._origin, self._eos, self._first)


class Matcher:
    """Where one sequence stands in its structure."""

    def __init__(
        self, structure: Structure, origin: Origin, eos: frozenset[int], mask: bytes | None
    ) -> None:
        self._structure, self._origin, self._inner, self._eos = (
            structure,
            origin,
            origin.inner.deep_copy(),
            eos,
        )
        self._mask = mask
        self._since: int | None = (
            None  # tokens taken when a lexer of its own was begun; None: it shares the structure's
        )
        self.renewal: Future[Own] | None = (
            None  # one of its own, or the next one, that is being made
        )
        self._ahead: tuple[tuple[int, ...], tuple[bytes | None, ...]] = (
            (),
            (),
        )  # drafts and the masks along them
        self._taken: list[int] = []
        self._ended = False
        self._scouts: Origin | None = None  # where its scout began
        self._scout: Any = None
        self._scouted = 0  # of the tokens taken, those that the scout has gone along

    @property
    def finished(self) -> bool:
        """The text is complete and nothing may follow it. The engine ends the sequence here, with or without an end token. While a renewal is needed it is not
        known, and False."""
        return self._ended or bool(
            self.renewal is None and self._inner.is_stopped() and not self._inner.is_error()
        )

    @property
    def accepting(self) -> bool:
        """The text so far is a whole answer; more may still follow."""
        return self._ended or bool(self._inner.is_accepting())

    def mask(self) -> bytes:
        """The ids that may come next. Waits for a renewal."""
        while not self.look():
            assert self.renewal is not None
            self.renewal.exception()
        if self._mask is None:
            self._mask = bytes(self._inner.compute_bitmask())
            self._check()
        return self._mask

    def look(self) -> bool:
        """Find what may come next, unless nothing may. False: not known yet, and the sequence has to wait for the renewal. Raises where the text became too complex."""
        if self.renewal is not None:
            if not self.renewal.done():
                return False
            (self._inner, self._origin, self._since, self._mask), self.renewal = (
                self.renewal.result(),
                None,
            )
            self._check()
        if self._mask is not None or self.finished:
            return True
        if not self._inner.is_error():
            self._inner, self._mask = masked(self._inner, self._origin)
        if self._mask is not None:
            return True
        if not renewable(self._inner, self._since, len(self._taken)):
            self._check()
        if self._since is None:
            self._structure.spent = True
        self.renewal = renew(self._structure.own, self._taken, self._since, ref(self))
        return False

    def masks_along(self, drafts: Sequence[int]) -> tuple[bytes | None, ...]:
        """The mask here and after each draft, 1 + len(drafts), as usable() found them. None where a draft completes the text: nothing is
        drawn behind it."""
        if not drafts:
            return (self.mask(),)
        tokens, masks = self._ahead
        assert tuple(drafts) == tokens[: len(drafts)], (
            "drafts of a structure are those that usable() let pass"
        )
        return masks[: 1 + len(drafts)]

    def advance(self, token: int) -> None:
        """Take a token that the mask allows (an end token included)."""
        assert not self.finished or token in self._eos, "a finished structure takes no more tokens"
        assert self.renewal is None, "while a renewal is made, nothing is drawn"
        complete = self.accepting if self._mask is None else _allows(self._mask, token)
        self._mask = None
        if token in self._eos and complete:
            self._ended = True
            return
        self._taken.append(token)
        self._inner = consumed(self._inner, self._origin, token)
        if not renewable(self._inner, self._since, len(self._taken)):
            self._check()

    def usable(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """Of these drafts the first ones that the structure allows and that can be followed: a guess that runs into a limit must not end an
        answer which may go another way. What is wrong at this very place is told by mask(). The masks on the way are kept for the step."""
        try:
            masks: list[bytes | None] = [self.mask()]
        except UnsupportedError:
            self._mask = None
            return ()
        here = self._here()
        if here is None:
            return ()
        scout = here.deep_copy()
        for token in drafts:
            if masks[-1] is None or token in self._eos or not _allows(masks[-1], token):
                break
            scout.consume_token(token)
            scout, mask = (scout, None) if scout.is_stopped() else masked(scout, self._scouts)
            if self._lost(scout):
                break
            masks.append(mask)
        self._ahead = tuple(drafts[: len(masks) - 1]), tuple(masks)
        return self._ahead[0]

    def forced(self) -> tuple[int, ...]:
        """Tokens that the structure leaves no choice about, as the tokenizer writes them; often empty."""
        scout = None if self.finished else self._here()
        if scout is None:
            return ()
        found = tuple(scout.compute_ff_tokens())
        return () if self._lost(scout) else found

    def _here(self) -> Any:
        """A scout at this point of the text, to look ahead with; None where there is none."""
        if self._scout is None or not self._structure.scouted:
            self._scouts, self._scouted = self._structure.scout(), 0
            self._scout = None if self._scouts is None else self._scouts.inner.deep_copy()
        if self._scout is not None and self._scouted < len(self._taken):
            self._scout.consume_tokens(self._taken[self._scouted :])
            self._scouted = len(self._taken)
        return None if self._scout is None or self._lost(self._scout) else self._scout

    def _lost(self, scout: Any) -> bool:
        """It can go no further. Where that is because all scouts together have used up what they share, none goes on."""
        if not scout.is_error():
            return False
        if used_up(scout):
            self._structure.end_scouting()
        return True

    def copy(self) -> Matcher:
        """For a fork of the sequence, or to look ahead."""
        twin = Matcher(self._structure, self._origin, self._eos, self._mask)
        twin._inner, twin._taken, twin._ended = (
            self._inner.deep_copy(),
            list(self._taken),
            self._ended,
        )
        return twin

    def _check(self) -> None:
        if self._inner.is_error():
            raise too_complex(self._structure.field, self._inner)


def too_complex(field: str, inner: Any) -> UnsupportedError:
    return UnsupportedError(
        field,
        f"became too complex to follow at this point of the text: {first_line(inner.get_error())}",
    )


def compile_structure(
    params: SamplingParams,
    tokenizer: GrammarTokenizer,
    *,
    engine_busy: Busy = never_busy,
    deadline: float | None = None,
) -> Structure | None:
    """The request's structure, or None if it has none. Raises ParameterError (the structure is wrong)
    or UnsupportedError (it is not offered, or too expensive); OverloadedError if it was not compiled
    before `deadline`, on the clock of time.monotonic. All name the field. `engine_busy`: compiles run
    one at a time while it is true. Call it off the engine's thread."""
    for field in STRUCTURE:
        value = getattr(params, field)
        if value is not None:
            limit = MAX_REGEX if field == "regex" else MAX_TEXT
            size = sum(map(len, value)) if field == "choice" else len(value)
            if size > limit:
                raise ParameterError(field, f"{size} characters are more than {limit}")
            lib = _llguidance(field)
            ours = _tokenizer(lib, tokenizer)  # once per model, so outside the request's time
            deadline = time.monotonic() + PATIENCE if deadline is None else deadline
            kept = _KEPT.setdefault(tokenizer, Kept())
            try:
                make = partial(_compile, field, value, lib, ours, tokenizer, engine_busy, deadline)
                structure: Structure = kept.get(digest(field, value), deadline, make)
                return structure
            except TooExpensive as reason:
                raise UnsupportedError(field, f"{reason}; make it simpler") from None
            except PoolBusy:
                raise busy(field) from None
    return None


def busy(field: str) -> OverloadedError:
    """The structure was not compiled in time. Says nothing about the structure: a retry may succeed."""
    why = f"could not be compiled within {PATIENCE:g} seconds beside what else runs here"
    return OverloadedError(
        f"{field}: {why}; try again, or make it simpler", param=field, retry_after=2.0
    )


def prepare(tokenizer: GrammarTokenizer) -> None:
    """Build now what every structure of this model needs: over a large vocabulary llguidance holds Python's lock for some tenths of a second, in which
    no answer goes on. Without llguidance, or an end token, nothing happens: the request that asks will be told."""
    with contextlib.suppress(UnsupportedError):
        _tokenizer(_llguidance("structure"), tokenizer)


def _compile(
    field: str,
    value: Any,
    lib: Any,
    ours: Any,
    tokenizer: GrammarTokenizer,
    engine_busy: Busy,
    deadline: float,
) -> Structure:
    """Compile in a worker process, which may be killed; then, what passed, in this process."""
    pool = the_pool()
    with pool.slot(deadline, engine_busy):
        if field == "choice" and sum(map(len, value)) <= PLAIN:
            written = choice_text(value)
        else:
            written = pool.translate(field, value, deadline)
        return Structure(partial(_matcher, lib, ours, written), field, tokenizer.eos_ids)


def _matcher(lib: Any, ours: Any, written: str, limits: dict[str, Any]) -> Any:
    return lib.LLMatcher(ours, written, log_level=0, limits=lib.LLParserLimits(**limits))


def the_pool() -> CompilePool:
    """One pool per process, shared by all engines in it."""
    global _pool
    with _BUILDING:
        _pool = _pool or CompilePool(LIMITS)
    return _pool


_pool: CompilePool | None = None
_KEPT: WeakKeyDictionary[GrammarTokenizer, Kept] = WeakKeyDictionary()


# -------------------------------------------------------------------------------------------------------- llguidance


def _llguidance(field: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            field,
            "structured output needs llguidance, which is not installed; "
            "install the extra 'grammar': pip install '.[grammar]' in the checkout",
        ) from None
    return llguidance


class _Wrapper:
    """Our tokenizer as llguidance's LLTokenizer wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = ref(
            tokenizer
        )  # which keeps what is built for it, not the other way round
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.eos_ids[0]
        # Without this mark, a control token's literal text could be drawn as if it were text.
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in ids]

    def __call__(self, text: str) -> list[int]:
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else tokenizer.encode(text)


_BUILT: WeakKeyDictionary[GrammarTokenizer, Any] = WeakKeyDictionary()
_BUILDING = threading.Lock()


def _tokenizer(lib: Any, tokenizer: GrammarTokenizer) -> Any:
    """llguidance's view of a tokenizer, built once (a trie over the vocabulary)."""
    with _BUILDING:
        found = _BUILT.get(tokenizer)
        if found is None:
            if not tokenizer.eos_ids:
                raise UnsupportedError(
                    "structure",
                    "this model has no end-of-sequence token to end a structured answer with",
                )
            found = lib.LLTokenizer(
                _Wrapper(tokenizer), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_ids)
            )
            _BUILT[tokenizer] = found
        return found


def _allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> (token % 8) & 1)
