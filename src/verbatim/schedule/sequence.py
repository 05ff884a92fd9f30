"""A sequence: its known tokens, how many of them are computed, and the blocks that hold them. Plain state, moved by the
scheduler only."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec

WAITING, RUNNING, ENDED = 0, 1, 2


class Sequence:
    """One text being written. `tokens` are the known ones: the prompt, then what was drawn.

    prompt_len      tokens that were given
    limit           the length at which it ends, and limit_name what set it: "max_tokens" or "context"
    ends            ids that end it, with the word to report ("eos", or the stop id); neither drawn nor obeyed before min_tokens
    key             noise key of this choice
    reuse           False: never start from another's prefix
    beam            > 0: report this many candidates and wait for extend(), instead of taking the drawn token
    siblings        further choices of the same prompt; they fork off when all but its last token is computed
    """

    __slots__ = (
        "accepted",
        "beam",
        "blocks",
        "cached_tokens",
        "computed",
        "drafted",
        "drafts",
        "ends",
        "frozen",
        "held",
        "hidden",
        "history",
        "id",
        "key",
        "limit",
        "limit_name",
        "min_len",
        "names",
        "params",
        "pending",
        "preemptions",
        "prompt_len",
        "published",
        "rank",
        "released",
        "reuse",
        "root",
        "salt",
        "scored",
        "siblings",
        "spec",
        "spec_withheld",
        "state",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        tokens: Seq[int],
        params: SamplingParams,
        *,
        limit: int,
        limit_name: str = "max_tokens",
        key: int = 0,
        ends: Mapping[int, str] | None = None,
        salt: str = "",
        hidden: bool = False,
        reuse: bool = True,
        beam: int = 0,
        breakers: tuple[tuple[int, ...], ...] = (),
        siblings: Seq[Sequence] = (),
    ) -> None:
        self.id = id
        self.tokens = list(tokens)
        self.params = params
        self.prompt_len = len(self.tokens)
        self.limit = limit
        self.limit_name = limit_name
        self.key = key
        self.ends = dict(ends or {})
        self.min_len = self.prompt_len + params.min_tokens
        self.salt = salt
        self.hidden = hidden
        self.reuse = reuse and not hidden
        self.beam = beam
        self.siblings = list(siblings)

        self.computed = 0
        self.blocks: list[
            list[int]
        ] = []  # one table a cache group; -1: released, behind the window
        self.frozen: tuple[tuple[int, ...], ...] | None = (
            None  # the tables as plans carry them, None when stale
        )
        self.released: list[int] = []  # a group: entries before this index are -1
        self.names: list[bytes] = []  # prefix names of full blocks, as far as made
        self.published = 0  # full blocks that the prefix cache has been told of
        self.root = b""
        self.drafts: tuple[int, ...] = ()
        self.held = False  # a beam that has its candidates and waits for the others; or a text whose structure needs a while
        self.scored = 0  # prompt positions whose successor is scored already
        self.state = WAITING
        self.pending = False  # a sibling that has not forked off yet: in no queue
        self.rank = (0, id)  # order of service: smaller first

        self.cached_tokens = 0
        self.preemptions = 0
        self.drafted = 0
        self.accepted = 0

        # Everything the sampler may know, made once: it changes only with the history, the drafts' masks and min_tokens.
        self.history = params.needs_history
        self.spec = DrawSpec(params, key, self.prompt_len, beam=beam, breakers=breakers)
        self.spec_withheld = replace(self.spec, withheld=tuple(sorted(self.ends)))

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def unscored(self) -> bool:
        """Prompt log-probabilities are asked for and not all there: every prompt position must be computed, none taken
        from the cache."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    def draw_spec(self) -> DrawSpec:
        spec = self.spec_withheld if len(self.tokens) < self.min_len else self.spec
        return replace(spec, history=tuple(self.tokens)) if self.history else spec
