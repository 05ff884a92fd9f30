"""The grammar state of a sequence. In: the tokens of its output. Out: token masks.

    matcher = structure.start()                       # one matcher per sequence
    matcher.poll_mask() -> bool                       # False: `pending` computes it, poll again
    matcher.mask() -> bytes                           # bit i % 8 of byte i // 8: id i is allowed
    matcher.advance(token);  matcher.finished         # finished: only an end token could follow
    matcher.allowed_drafts(drafts) -> (ids, ...)      # the longest prefix the grammar accepts
    matcher.masks_along(drafts) -> (mask, ...)        # masks of a step that verifies these drafts
    matcher.forced() -> (ids, ...)                    # tokens that the grammar fully determines

compiler.py makes a Structure; llguidance parses. Invariant: an end token is allowed exactly where
the output so far is a complete document. Where a grammar is wider than its JSON schema
(uniqueItems, not), a DocumentCheck filters every mask. Its work on one mask has no small bound, so
with `submit` it is done by another thread; when it is done changes no mask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import ref

from verbatim.base.errors import ParameterError, UnsupportedError
from verbatim.grammar.document_check import CheckState, DocumentCheck
from verbatim.grammar.private_matcher import (
    InitialMatcher,
    PrivateMatcher,
    can_rebuild,
    compute_mask,
    consume,
    first_token,
    lexer_exhausted,
    rebuild,
    shared_limits,
)
from verbatim.grammar.translate import first_line, refusal

INLINE_COMPILE = 0.005  # seconds; a draft matcher that compiles faster is compiled during the step
MAX_DRAFT_COMPILE = 0.1  # seconds; up to this it compiles in a thread, above it there are no drafts

# At most half of llguidance's defaults: a mask takes milliseconds, a matcher at most about 50 MB.
LIMITS = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class Structure:
    """One compiled grammar; start() returns a matcher for one sequence.

    Copies of an llguidance matcher share one lexer with a limited number of states, and an error in
    one copy affects all. When the shared lexer is exhausted, a sequence gets a private matcher
    (private_matcher.py) and the cache compiles the grammar again for new requests.

    Drafts are checked on copies of a second matcher, compiled when drafts are first requested. So
    wrong drafts never use up the lexer of a completion; when the draft lexer is exhausted, only
    drafting ends. A grammar that takes longer than MAX_DRAFT_COMPILE gets no drafts."""

    def __init__(
        self,
        make: Callable[[dict[str, Any]], Any],
        field: str,
        eos_ids: Sequence[int],
        check: DocumentCheck | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """`make(limits)` compiles the grammar under these parser limits. `check`: what the grammar
        does not enforce. `warnings`: about the structure, for the client."""
        self._make, self.field, self.check, self.warnings = make, field, check, warnings
        self.exhausted = False
        self._draft_origin: InitialMatcher | None = None
        self._drafting: bool | None = None  # None: no drafts were requested yet
        self._eos = frozenset(eos_ids)
        began = time.thread_time()
        shared = self._make(shared_limits(LIMITS))
        self._first = self._first_mask(shared)  # computed here, so that no engine step waits for it
        self._origin = InitialMatcher(shared, first_token(self._first))
        self.seconds = time.thread_time() - began

    def _first_mask(self, shared: Any) -> bytes:
        """The mask of the first token. Raises if no output can match, or if it is too complex."""
        if shared.is_error():
            raise refusal(self.field, shared.get_error())
        probe, mask = compute_mask(shared.deep_copy(), None)
        if lexer_exhausted(probe):  # the shared limits are halved: try again with the full limits
            probe, mask = compute_mask(self._make(LIMITS), None)
        if "NoExtension" in probe.get_error() or not any(mask or b"?"):
            raise ParameterError(self.field, "no text can satisfy it")
        if mask is None:
            raise too_complex(self.field, probe)
        if self.check is None:
            return mask
        mask, reason = self.check.filter(mask, CheckState())
        if not any(mask):
            raise ParameterError(self.field, f"no text can satisfy it ({reason})")
        return mask

    def private_matcher(self) -> InitialMatcher:
        """A matcher with its own lexer and the full limits."""
        return InitialMatcher(self._make(LIMITS), self._origin.token)

    @property
    def size(self) -> int:
        """Estimated bytes. Measured over many grammars: 80 to 170 KB per millisecond of compile
        time, and the same again for the draft matcher."""
        matchers = 2 if self.seconds <= MAX_DRAFT_COMPILE else 1
        return int(100_000 + 200_000_000 * self.seconds) * matchers

    def draft_matcher(self) -> InitialMatcher | None:
        """The initial matcher for drafts; None while it compiles, or if this grammar has none."""
        if self._drafting is None:
            self._drafting = self.seconds <= MAX_DRAFT_COMPILE
            if self.seconds <= INLINE_COMPILE:
                self._make_draft_matcher()
            elif self._drafting:
                # llguidance releases the GIL. Not a daemon thread: interpreter exit must wait.
                threading.Thread(target=self._make_draft_matcher).start()
        return self._draft_origin if self._drafting else None

    def _make_draft_matcher(self) -> None:
        self._draft_origin = InitialMatcher(self._make(shared_limits(LIMITS)), self._origin.token)

    @property
    def has_draft_matcher(self) -> bool:
        return bool(self._drafting) and self._draft_origin is not None

    def end_drafting(self) -> None:
        """The draft lexer is exhausted: no more drafts for this grammar."""
        self._drafting, self._draft_origin = False, None

    def start(self) -> Matcher:
        return Matcher(self, self._origin, self._eos, self._first)


class Matcher:
    """The grammar state of one sequence."""

    def __init__(
        self, structure: Structure, origin: InitialMatcher, eos: frozenset[int], mask: bytes | None
    ) -> None:
        self._structure, self._origin, self._eos = structure, origin, eos
        self._inner = origin.inner.deep_copy()
        self._mask = mask
        self._check_state = CheckState()
        # Number of tokens when the private lexer was created; None: the lexer is the shared one.
        self._lexer_start: int | None = None
        self.rebuilding: Future[PrivateMatcher] | None = None  # the private matcher in the making
        self._checking: Future[bytes] | None = None  # the next mask, while it is filtered
        # Runs the work of a document check in another thread; None: poll_mask() does it.
        self.submit: Callable[[Callable[[], Any]], Future[Any]] | None = None
        # Drafts, and the mask before each of them and after the last.
        self._draft_masks: tuple[tuple[int, ...], tuple[bytes | None, ...]] = ((), ())
        self._tokens: list[int] = []
        self._ended = False
        self._draft_origin: InitialMatcher | None = None
        self._draft_matcher: Any = None
        self._draft_position = 0  # tokens that the draft matcher has consumed

    @property
    def finished(self) -> bool:
        """The output is complete and nothing may follow it: the engine ends the sequence here, with
        or without an end token. False while a rebuild is pending."""
        return self._ended or bool(
            self.rebuilding is None and self._inner.is_stopped() and not self._inner.is_error()
        )

    @property
    def pending(self) -> Future[Any] | None:
        """What poll_mask() waits for; None: the mask is computed at once."""
        return self._checking or self.rebuilding

    @property
    def accepting(self) -> bool:
        """The output so far is a complete document; more may follow."""
        check = self._structure.check
        return self._ended or bool(
            self._inner.is_accepting() and (check is None or check.accepts(self._check_state))
        )

    def mask(self) -> bytes:
        """The token ids that may come next. Waits for what is pending."""
        while not self.poll_mask():
            assert self.pending is not None
            self.pending.exception()
        if self._mask is None:
            self._mask = bytes(self._inner.compute_bitmask())
            self._check()
        return self._mask

    def poll_mask(self) -> bool:
        """Compute the next mask, unless the output is finished. False: a private matcher is being
        built, or the document checked, and the sequence must wait for `pending`. Raises
        UnsupportedError if the output is too complex."""
        if self.pending is not None and not self.pending.done():
            return False
        if self._checking is not None:
            checked, self._checking = self._checking, None
            self._mask = checked.result()
        if self.rebuilding is not None:
            rebuilt, self.rebuilding = self.rebuilding.result(), None
            self._inner, self._origin, self._lexer_start, mask = rebuilt
            self._check()
            self._filter(mask)
        if not (self._mask or self._checking or self.finished or self._inner.is_error()):
            self._inner, mask = compute_mask(self._inner, self._origin)
            self._filter(mask)
        if self._mask is not None or self._checking is not None or self.finished:
            return self._checking is None
        if not can_rebuild(self._inner, self._lexer_start, len(self._tokens)):
            self._check()
        if self._lexer_start is None:
            self._structure.exhausted = True
        make = self._structure.private_matcher
        self.rebuilding = rebuild(make, self._tokens, self._lexer_start, ref(self))
        return False

    def masks_along(self, drafts: Sequence[int]) -> tuple[bytes | None, ...]:
        """1 + len(drafts) masks, before the first draft and after each, from allowed_drafts().
        None where a draft completes the document: no token is drawn after it."""
        if not drafts:
            return (self.mask(),)
        tokens, masks = self._draft_masks
        assert tuple(drafts) == tokens[: len(drafts)], (
            "drafts under a grammar must come from allowed_drafts()"
        )
        return masks[: 1 + len(drafts)]

    def advance(self, token: int) -> None:
        """Consume a token that the mask allows (end tokens included)."""
        assert not self.finished or token in self._eos, "a finished matcher accepts no more tokens"
        assert self.pending is None, "no token is drawn before its mask is known"
        complete = self.accepting if self._mask is None else _allows(self._mask, token)
        self._mask = None
        if token in self._eos and complete:
            self._ended = True
            return
        self._tokens.append(token)
        if self._structure.check is not None:
            self._check_state = self._structure.check.after(token, self._check_state)
        self._inner = consume(self._inner, self._origin, token)
        if not can_rebuild(self._inner, self._lexer_start, len(self._tokens)):
            self._check()
        if self._structure.check is not None and self.finished and not self.accepting:
            # Only a number can end the document without a closing byte, so it is checked here.
            raise self._dead_end("its value is not allowed")

    def allowed_drafts(self, drafts: Sequence[int]) -> tuple[int, ...]:
        """The longest prefix of `drafts` that the grammar accepts within its limits. A draft that
        exceeds a limit is cut off here, because the completion may continue without it. The masks
        along the drafts are kept for masks_along()."""
        try:
            masks: list[bytes | None] = [self.mask()]
        except UnsupportedError:
            self._mask = None
            return ()
        here = self._here()
        if here is None:
            return ()
        draft_matcher, check, state = here.deep_copy(), self._structure.check, self._check_state
        for token in drafts:
            if masks[-1] is None or token in self._eos or not _allows(masks[-1], token):
                break
            draft_matcher.consume_token(token)
            mask = None
            if not draft_matcher.is_stopped():
                draft_matcher, mask = compute_mask(draft_matcher, self._draft_origin)
            if self._draft_failed(draft_matcher):
                break
            if check is not None and mask is not None:
                state = check.after(token, state)
                if check.has_work(mask, state):
                    if self.submit is not None:
                        break  # no step waits for a check
                    try:
                        mask, _ = check.filter(mask, state)
                    except UnsupportedError:
                        break
                if not any(mask):  # the sequence reports it, if it writes this token
                    break
            masks.append(mask)
        self._draft_masks = tuple(drafts[: len(masks) - 1]), tuple(masks)
        return self._draft_masks[0]

    def forced(self) -> tuple[int, ...]:
        """The tokens that the grammar fully determines from here, as tokenized; often empty."""
        draft_matcher = None if self.finished else self._here()
        if draft_matcher is None:
            return ()
        found = tuple(draft_matcher.compute_ff_tokens())
        return () if self._draft_failed(draft_matcher) else found

    def _here(self) -> Any:
        """The draft matcher, advanced to the end of the output; None if there is none."""
        if self._draft_matcher is None or not self._structure.has_draft_matcher:
            self._draft_origin, self._draft_position = self._structure.draft_matcher(), 0
            origin = self._draft_origin
            self._draft_matcher = None if origin is None else origin.inner.deep_copy()
        if self._draft_matcher is not None and self._draft_position < len(self._tokens):
            self._draft_matcher.consume_tokens(self._tokens[self._draft_position :])
            self._draft_position = len(self._tokens)
        found = self._draft_matcher
        return None if found is None or self._draft_failed(found) else found

    def _draft_failed(self, draft_matcher: Any) -> bool:
        """Whether the draft matcher failed. Ends drafting if its lexer is exhausted."""
        if not draft_matcher.is_error():
            return False
        if lexer_exhausted(draft_matcher):
            self._structure.end_drafting()
        return True

    def copy(self) -> Matcher:
        """For a fork of the sequence."""
        twin = Matcher(self._structure, self._origin, self._eos, self._mask)
        twin._inner, twin._tokens = self._inner.deep_copy(), list(self._tokens)
        twin._ended, twin._check_state = self._ended, self._check_state
        twin.submit = self.submit
        return twin

    def _filter(self, mask: bytes | None) -> None:
        """Set the mask without the tokens that the document check rejects, or begin to compute it
        in another thread."""
        check = self._structure.check
        if check is None or mask is None or not check.has_work(mask, self._check_state):
            self._mask = mask
        elif self.submit is None:
            self._mask = self._filtered(mask)
        else:
            self._checking = self.submit(partial(self._filtered, mask))

    def _filtered(self, mask: bytes) -> bytes:
        """The mask without tokens that the document check rejects. Raises UnsupportedError if none
        is left: the text so far is not the start of a valid document."""
        check = self._structure.check
        assert check is not None
        mask, reason = check.filter(mask, self._check_state)
        if not any(mask):
            raise self._dead_end(reason)
        return mask

    def _dead_end(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            self._structure.field,
            f"the text so far cannot become a valid document ({reason}); try another seed, or say "
            "in the prompt what the schema requires",
        )

    def _check(self) -> None:
        if self._inner.is_error():
            raise too_complex(self._structure.field, self._inner)


def too_complex(field: str, inner: Any) -> UnsupportedError:
    return UnsupportedError(
        field,
        f"became too complex to follow at this point of the text: {first_line(inner.get_error())}",
    )


def _allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> (token % 8) & 1)
