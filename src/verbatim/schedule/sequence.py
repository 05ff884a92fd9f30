"""A sequence: its known tokens, how many of them are computed, and the blocks that hold them.

Holds the state and builds the sequence's part of a step plan. Only the scheduler changes it; the
engine reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from verbatim.base.params import SamplingParams
from verbatim.base.records import DrawSpec, SeqStep, TokenPrefix
from verbatim.schedule.canvas import Canvas

WAITING, RUNNING, ENDED = 0, 1, 2


class Sequence:
    """One completion being generated. `tokens` are the known ones: the prompt, then the output.

    prompt_len      tokens of the prompt
    limit           the length at which it ends; limit_name says what set it: "max_tokens" or
                    "context"
    ends            ids that end it, with the finish detail to report ("eos", or the stop id);
                    withheld from the draw before min_tokens
    key             noise key of this choice
    reuse           False: no prefix hit for this sequence
    beam            > 0: report this many candidates and wait for extend(), instead of appending
                    the drawn token
    adapter         number of the LoRA adapter; -1: the base model. It is part of the salt
    tenant          whose share of each step and of the running places it uses
    siblings        further choices of the same prompt; they fork from this sequence when all but
                    the last prompt token are computed, or all whole blocks of a canvas' size
    canvas          the block in progress of a diffusion model; None: autoregressive
    """

    __slots__ = (
        *("accepted", "adapter", "beam", "blocks", "cached_tokens", "canvas", "computed"),
        "drafted",
        *("drafts", "frozen_blocks", "hashes", "held", "hidden", "history", "id", "key", "limit"),
        *("limit_name", "min_len", "params", "pending", "preemptions", "prompt_len", "published"),
        *("rank", "released", "reuse", "root", "salt", "scored", "siblings", "spec"),
        *("spec_withheld", "state", "stop_ids", "tenant", "tokens"),
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
        stop_ids: Mapping[int, str] | None = None,
        salt: str = "",
        tenant: str = "",
        hidden: bool = False,
        reuse: bool = True,
        beam: int = 0,
        breakers: tuple[tuple[int, ...], ...] = (),
        siblings: Seq[Sequence] = (),
        adapter: int = -1,
        canvas: Canvas | None = None,
    ) -> None:
        self.id = id
        self.tokens = list(tokens)
        self.params = params
        self.prompt_len = len(self.tokens)
        self.limit = limit
        self.limit_name = limit_name
        self.key = key
        self.stop_ids = dict(stop_ids or {})
        # Position of the first output token, for the sampler: an output_prefix is part of a prompt.
        first_output = self.prompt_len - params.output_prefix
        self.min_len = first_output + params.min_tokens
        self.salt = salt
        self.tenant = tenant
        self.hidden = hidden
        self.reuse = reuse and not hidden
        self.beam = beam
        self.adapter = adapter
        self.siblings = list(siblings)
        self.canvas = canvas

        self.computed = 0
        self.blocks: list[list[int]] = []  # one table per cache group; -1: released
        # `blocks` as plans carry it; None after a change of the tables
        self.frozen_blocks: tuple[tuple[int, ...], ...] | None = None
        self.released: list[int] = []  # per group: entries before this index are -1
        self.hashes: list[bytes] = []  # prefix-cache hashes of full blocks, made on demand
        self.published = 0  # full blocks handed to the prefix cache
        self.root = b""  # hash before the first block
        self.drafts: tuple[int, ...] = ()
        self.held = False  # not scheduled: a beam awaits extend(), or a grammar is being compiled
        self.scored = 0  # prompt positions whose next token has a log-probability
        self.state = WAITING
        self.pending = True  # in no queue: before add() or, as a sibling, before its fork
        self.rank = (0, id)  # order of service: smaller first

        self.cached_tokens = 0
        self.preemptions = 0
        self.drafted = 0
        self.accepted = 0

        # Built once, because every step needs a DrawSpec and only its history and masks change.
        self.history = params.needs_history
        self.spec = DrawSpec(params, key, first_output, beam=beam, breakers=breakers)
        self.spec_withheld = replace(self.spec, withheld=tuple(sorted(self.stop_ids)))

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def span(self) -> int:
        """Positions that must be computed before the next draw."""
        return len(self.tokens) if self.canvas is None else self.canvas.span

    @property
    def capacity(self) -> int:
        """The most positions that are ever computed."""
        if self.canvas is None:
            return max(self.limit - 1, self.prompt_len)
        return self.canvas.capacity

    @property
    def fork_at(self) -> int:
        """Computed positions at which the siblings fork."""
        if self.canvas is None:
            return self.prompt_len - 1
        return self.canvas.final

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def unscored(self) -> bool:
        """Prompt log-probabilities are requested and incomplete. Every prompt position must then be
        computed, because cached blocks hold keys and values but no logits."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt_len - 1

    def draw_spec(self) -> DrawSpec:
        spec = self.spec_withheld if len(self.tokens) < self.min_len else self.spec
        if not self.history:
            return spec
        # dataclasses.replace takes three times as long, for every sequence in every step
        return DrawSpec(
            spec.params,
            spec.key,
            spec.prompt_len,
            TokenPrefix(self.tokens),
            spec.withheld,
            beam=spec.beam,
            breakers=spec.breakers,
        )

    def freeze_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Refresh frozen_blocks from the block tables."""
        self.frozen_blocks = tuple([tuple(table) for table in self.blocks])
        return self.frozen_blocks

    def chunk_length(self, want: int, max_tokens: int) -> int:
        """Tokens to compute in the next step: at most `max_tokens` of the `want` uncomputed tokens,
        plus drafts if all uncomputed tokens fit; with a canvas whole blocks, or 0."""
        if self.canvas is not None:
            want = self.fork_at - self.computed if self.siblings else want
            return self.canvas.rows(self.computed, want, max_tokens)
        if self.siblings:  # stop before the last prompt token: the choices fork there
            return min(want, max_tokens, self.prompt_len - 1 - self.computed)
        if want > max_tokens:
            return max_tokens
        if not self.drafts:
            return want
        known = len(self.tokens)
        k = min(len(self.drafts), max_tokens - want, self.limit - known - 1)
        if known < self.min_len:  # one DrawSpec per step: all its draws withhold the same ids
            k = min(k, self.min_len - known - 1)
        return want + max(k, 0)

    def make_step(self, want: int, n: int) -> SeqStep:
        """The plan to compute `n` tokens: known ones, and drafts when n > want. Uses up the
        drafts."""
        if self.canvas is not None:
            return self._denoising_step(self.canvas, n)
        start, known, drafts = self.computed, len(self.tokens), self.drafts
        self.drafts = ()
        blocks = self.frozen_blocks or self.freeze_blocks()
        draws = 0
        if n < want:
            tokens = tuple(self.tokens[start : start + n])
        else:
            tokens = (self.tokens[-1],) if n == 1 else (*self.tokens[start:], *drafts[: n - want])
            draws = n - want + 1 if known < self.limit else 0
        targets: tuple[int, ...] = ()
        top = 0
        if start < self.prompt_len - 1 and self.unscored:
            targets = tuple(self.tokens[start + 1 : min(start + n + 1, self.prompt_len)])
            top = self.params.prompt_logprobs or 0
        draw = self.draw_spec() if draws else None
        hidden = self.hidden and start < self.prompt_len
        return SeqStep(
            self.id, tokens, start, blocks, draws, draw, targets, top, hidden, self.adapter
        )

    def _denoising_step(self, canvas: Canvas, n: int) -> SeqStep:
        """The next `n` known tokens; with the canvas behind them, its masked positions are
        drawn."""
        start, end = self.computed, self.computed + n
        blocks = self.frozen_blocks or self.freeze_blocks()
        tokens = tuple(self.tokens[start:end])
        if end < canvas.span:
            return SeqStep(
                *(self.id, tokens, start, blocks),
                adapter=self.adapter,
                block=canvas.block,
                causal=canvas.causal,
            )
        shift = 0 if canvas.rules.shift else -1
        picks = tuple(at - start - 1 - shift for at in canvas.masked())
        spec = self.spec_withheld if len(self.tokens) < self.min_len else self.spec
        committed = [canvas.decided[at].token for at in sorted(canvas.decided)]
        history = (*self.tokens, *committed) if self.history else ()
        return SeqStep(
            *(self.id, tokens + tuple(canvas.tokens()), start, blocks),
            draws=len(picks),
            draw=replace(spec, history=history, step=canvas.step),
            adapter=self.adapter,
            shift=shift,
            block=canvas.block,
            causal=canvas.causal,
            picks=picks,
        )
