"""The scheduler: sequences come in, plans go out; results come in, tokens go out. Integers only: no arrays, no text.

The law
-------
A sequence is a list of *known* tokens, of which the first *computed* have their keys and values in the cache. A step
computes some more of them. When computed reaches known, the logits of the last position draw the next token, and known
grows by one.

There is no prefill and no decode. Everything is a move of these two counters:

    a chunk of a long prompt     computed += n, nothing drawn yet
    writing                      computed += 1, one token drawn
    a prefix hit                 computed = 896 for free, because another sequence has computed those blocks
    preemption                   computed = 0, blocks given back; known is kept, so it is computed again later and goes on
    drafts                       k guesses follow the known tokens in one step; those the draws confirm stay: known += 1 … 1 + k
    a fork                       a second sequence with the same known, the same computed and the same blocks, counted twice

What is drawn depends only on a sequence's own tokens and its own noise (promise 1), so none of these moves can change a text.

Order
-----
Sequences are served by rank = arrival + PRIORITY_PLACES * priority: first come first served, and one step of priority is
worth that many places in the queue. The rank never changes, so whoever waits is one day the first: nobody starves.

 1. Running sequences come first, in order of rank. Each may use the step's budget but for one token for each one behind
    it: so everyone who writes gets a token in every step, and a long prompt takes what is left, a chunk at a time. While
    others have a prompt to read too, behind it or waiting, it takes only half of what is left: they begin within a step or two.
    In company its tokens are paid for by their depth (schedule/token_cost.py), so that the step, and with it everybody's next token,
    does not take longer the further the prompt has come. Alone it takes whole chunks.
 2. When blocks run out, the last in rank among the running is preempted. The first in rank is never preempted for another,
    and alone it fits (or was refused when it arrived): it always advances, so there is no livelock.
 3. Then waiting sequences start, in order of rank, while there is budget and their known tokens fit the cache.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from verbatim.base.errors import CapacityError
from verbatim.base.records import (
    CacheGroup,
    Drawn,
    Finish,
    SeqStep,
    StepPlan,
    StepResult,
    TokenEvent,
)
from verbatim.schedule.blocks import prove
from verbatim.schedule.paged_cache import Copies, PagedCache
from verbatim.schedule.prefix import PrefixChain
from verbatim.schedule.sequence import ENDED, RUNNING, WAITING, Sequence
from verbatim.schedule.token_cost import TokenCost

PRIORITY_PLACES = 64
NOTHING_LEFT = (
    "no token is left to draw: bans, the grammar and min_tokens together exclude every id"
)
Reader = Callable[[TokenEvent], bool]  # True: the text ends with this event
_rank = attrgetter("rank")


class Scheduler:
    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        blocks: tuple[int, ...],
        *,
        block_size: int = 16,
        step_tokens: int = 512,
        max_running: int = 256,
        prefix_cache: bool = True,
        use_cache: bool = True,
        prefix_key: bytes | None = None,
        cost: TokenCost | None = None,
        ahead: bool = False,
    ) -> None:
        prefix = PrefixChain(block_size, prefix_key) if prefix_cache and use_cache else None
        self.cache = PagedCache(groups, blocks, block_size, prefix)
        self.block_size = block_size
        self.step_tokens = step_tokens
        self.max_running = min(
            max_running, step_tokens
        )  # so that every running sequence has a place in every step
        self.use_cache = use_cache
        self.cost = cost or TokenCost()
        # The backend begins the position behind a draw before it is asked, if the text holds a block for it.
        self.ahead = ahead and use_cache
        self._plain = len(groups) == 1 and groups[0].window is None
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []  # sorted by rank
        self.waiting: list[Sequence] = []  # sorted by rank
        self._step = 0
        self._arrivals = 0
        self._stuck: tuple[int, int, int] | None = (
            None  # what _standing() was when the first of the waiting last did not fit
        )
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found there

    # ------------------------------------------------------------------------------------------------- in and out

    def add(self, seq: Sequence) -> None:
        """Take a sequence (and its siblings) into the queue. CapacityError if it could never fit the cache, even alone."""
        self.check_capacity(seq)
        self._arrivals += 1
        for member in (seq, *seq.siblings):
            member.rank = (self._arrivals + PRIORITY_PLACES * seq.params.priority, member.id)
            prove(member.id not in self.sequences, f"sequence {member.id} was added twice")
            self.sequences[member.id] = member
            member.pending = member is not seq
        insort(self.waiting, seq, key=_rank)
        if not self.use_cache:  # nothing to share: every choice computes its own prompt, every time
            for sibling in seq.siblings:
                self._wait(sibling)
            seq.siblings = []

    def check_capacity(self, seq: Sequence) -> None:
        for group, pool in zip(self.cache.groups, self.cache.pools, strict=True):
            need = self.cache.needed(group, max(seq.limit - 1, seq.prompt_len))
            if need > pool.total:
                window = f" (sliding window {group.window})" if group.window else ""
                raise CapacityError(
                    f"{seq.prompt_len} prompt tokens and up to {seq.limit - seq.prompt_len} more need {need} cache blocks of "
                    f"{self.block_size} tokens{window}, and the whole cache has {pool.total}; shorten the prompt, "
                    f"lower max_tokens, or give the engine more kv_memory",
                    param="max_tokens",
                )

    def abort(self, seq_id: int) -> bool:
        """Take a sequence out, whatever it is doing; its blocks are back at once."""
        seq = self.sequences.get(seq_id)
        if seq is None:
            return False
        if seq.siblings:  # the others still need their prompt: the eldest takes over
            heir = seq.siblings.pop(0)
            heir.siblings, seq.siblings = seq.siblings, []
            self._wait(heir)
        for elder in self.sequences.values() if seq.pending else ():
            elder.siblings = [s for s in elder.siblings if s is not seq]
        self._end(seq)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` (new, with no tokens of its own) becomes a second reading of `parent`: same tokens, same blocks,
        copied when one writes."""
        if child.id not in self.sequences:
            child.rank = (parent.rank[0], child.id)
            self.sequences[child.id] = child
        child.tokens, child.held = parent.tokens[:], parent.held
        if parent.state != RUNNING or len(self.running) >= self.max_running or not self.use_cache:
            self._wait(child)
            return
        self.cache.share(parent, child)
        child.state, child.pending = RUNNING, False
        insort(self.running, child, key=_rank)

    def extend(self, seq_id: int, token: int) -> None:
        """Give a held sequence (a beam) its next token; it runs again."""
        seq = self.sequences[seq_id]
        prove(seq.held, f"sequence {seq_id} is not held")
        seq.tokens.append(token)
        seq.held = False

    def hold(self, seq_id: int) -> None:
        """It waits for something beside the engine, and has no part in any step until release(). Drafts accepted behind its last token are drawn again then."""
        self.sequences[seq_id].held = True

    def release(self, seq_id: int) -> None:
        self.sequences[seq_id].held = False

    def set_drafts(self, seq_id: int, tokens: Iterable[int]) -> None:
        """Guesses for what follows the known tokens; used by the next plan as far as budget, blocks and limits allow,
        then gone."""
        self.sequences[seq_id].drafts = tuple(tokens)

    # ------------------------------------------------------------------------------------------------------- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed."""
        budget = self.step_tokens
        behind = len(self.running)
        steps: list[SeqStep] = []
        copies: Copies = []
        for seq in self.running[:]:
            behind -= 1
            if (
                seq.held or seq.state != RUNNING
            ):  # waits for its fellow beams, or was preempted by one before it
                continue
            step = self._write_on(seq)
            if step is None:
                step = self._plan_running(
                    seq, len(seq.tokens) - seq.computed, budget - behind, copies
                )
            if step is not None:
                steps.append(step)
                budget -= self._price(step)
        while budget > 0 and self.waiting:
            step = self._admit(budget, alone=not steps)
            if step is None:
                break
            steps.append(step)
            budget -= self._price(step)
        if not steps:
            return None
        if self.ahead:
            self._reach_behind(steps)
        self._step += 1
        return StepPlan(self._step, tuple(steps), tuple(copies))

    def _reach_behind(self, steps: list[SeqStep]) -> None:
        """Who draws one token gets the block of the position behind it now, and not in the next step. Only while a block is left for everybody who
        runs: nobody is preempted for it."""
        for i, step in enumerate(steps):
            if step.draws != 1 or step.end < len(step.blocks[0]) * self.block_size:
                continue
            seq = self.sequences[step.seq_id]
            if seq.beam or step.end + 1 >= seq.limit or self.cache.scarce(len(self.running)):
                continue
            if self.cache.make_room(seq, len(step.tokens) + 1, []):
                seq.frozen = tuple([tuple(table) for table in seq.blocks])
                steps[i] = step._replace(blocks=seq.frozen)

    def _write_on(self, seq: Sequence) -> SeqStep | None:
        """The common case, at a fraction of the cost: one more token of a text whose last block has room and is its own."""
        start, frozen = seq.computed, seq.frozen
        if (
            frozen is None
            or start < seq.prompt_len
            or start + 1 != len(seq.tokens)
            or seq.drafts
            or not self._plain
        ):
            return None
        at, table = start // self.block_size, frozen[0]
        if at >= len(table) or self.cache.pools[0].refs[table[at]] != 1:
            return None
        return SeqStep(seq.id, (seq.tokens[-1],), start, frozen, 1, seq.draw_spec())

    def _plan_running(self, seq: Sequence, want: int, room: int, copies: Copies) -> SeqStep | None:
        """Its next tokens, at most `room`. None if it had to give up its own blocks."""
        n = self._chunk(seq, want, self._share(want, room, seq))
        while not self.cache.make_room(seq, n, copies):
            if n > 1:  # a shorter chunk, before anything is taken from others
                n = max(1, min(n - 1, self.cache.fitting(seq)))
            elif not self._preempt_behind(seq):
                return None
        return self._step_of(seq, want, n)

    def _admit(self, budget: int, *, alone: bool) -> SeqStep | None:
        """Start the first of the waiting, if its known tokens fit beside those who run. `alone`: nobody else advances in
        this step."""
        seq = next((s for s in self.waiting if not s.held), None)
        if seq is None or (not alone and self._stuck == self._standing(seq)):
            return None
        self.cache.reuse_prefix(seq)
        while len(self.running) >= self.max_running or not self.cache.fits(seq, len(self.running)):
            # Where all who run are beams that wait for this one, they give up their blocks; otherwise its turn will come.
            if not (alone and self._preempt_held()):
                prove(bool(self.running), f"sequence {seq.id} does not fit an empty cache")
                self.cache.release_all(seq)
                self._stuck = self._standing(seq)
                return None
        self._start(seq)
        want = len(seq.tokens) - seq.computed
        n = min(self._chunk(seq, want, self._share(want, budget, seq)), self.cache.fitting(seq))
        prove(self.cache.make_room(seq, n, []), f"sequence {seq.id} was admitted and does not fit")
        return self._step_of(seq, want, n)

    def _standing(self, seq: Sequence) -> tuple[int, int, int]:
        """While this does not change, a sequence that did not fit does not fit, and need not be tried in every step."""
        return seq.id, self.cache.available, len(self.running)

    def _start(self, seq: Sequence) -> None:
        self._remove(self.waiting, seq)
        insort(self.running, seq, key=_rank)
        seq.state = RUNNING
        if seq.preemptions == 0:
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
            if self.cache.prefix is not None:
                self.prefix_queries += seq.prompt_len
                self.prefix_hits += seq.cached_tokens
        if seq.siblings and seq.computed >= seq.prompt_len - 1:
            self._fork_siblings(seq)

    def _share(self, want: int, room: int, seq: Sequence) -> int:
        """How many tokens of a long prompt the step may take: as many as `room` pays for at their depth, or half of them where
        others have something to read as well. Alone it need not care how long the step takes."""
        if want == 1:
            return room
        others = [s for s in self.running if s is not seq and not s.held]
        starting = self._someone_could_start()
        if not others and not starting:
            return room
        paid = max(1, room * self.cost.matrices // self.cost.at(seq.computed, self.cache.groups))
        half = (paid + 1) // 2
        if want <= half:
            return paid
        reading = any(len(s.tokens) - s.computed > 1 and s.rank > seq.rank for s in others)
        return half if reading or starting else paid

    def _price(self, step: SeqStep) -> int:
        """What a step takes of the budget, in tokens at the start of a text. A text's next token and its drafts count once each, and so
        does the one token that everybody gets: they have their place however deep they are."""
        n = len(step.tokens)
        if n in (1, step.draws):
            return n
        return -(-n * self.cost.at(step.start, self.cache.groups) // self.cost.matrices)

    def _someone_could_start(self) -> bool:
        first = next((s for s in self.waiting if not s.held), None)
        return (
            first is not None
            and len(self.running) < self.max_running
            and self._stuck != self._standing(first)
        )

    def _chunk(self, seq: Sequence, want: int, room: int) -> int:
        """How many tokens to compute: known ones, and drafts behind them where all that is known fits."""
        if seq.siblings:  # stop one short of the prompt's end, where the others fork off and each draws for itself
            return min(want, room, seq.prompt_len - 1 - seq.computed)
        if want > room:
            return room
        if not seq.drafts:
            return want
        known = len(seq.tokens)
        k = min(len(seq.drafts), room - want, seq.limit - known - 1)
        if known < seq.min_len:  # all draws of one step are on the same side of min_tokens
            k = min(k, seq.min_len - known - 1)
        return want + max(k, 0)

    def _step_of(self, seq: Sequence, want: int, n: int) -> SeqStep:
        start, known, drafts = seq.computed, len(seq.tokens), seq.drafts
        seq.drafts = ()
        if seq.frozen is None:
            seq.frozen = tuple([tuple(table) for table in seq.blocks])
        draws = 0
        if n < want:
            tokens = tuple(seq.tokens[start : start + n])
        else:
            tokens = (seq.tokens[-1],) if n == 1 else (*seq.tokens[start:], *drafts[: n - want])
            draws = n - want + 1 if known < seq.limit else 0
        targets: tuple[int, ...] = ()
        top = 0
        if start < seq.prompt_len - 1 and seq.unscored:
            targets = tuple(seq.tokens[start + 1 : min(start + n + 1, seq.prompt_len)])
            top = seq.params.prompt_logprobs or 0
        draw = seq.draw_spec() if draws else None
        hidden = seq.hidden and start < seq.prompt_len
        return SeqStep(seq.id, tokens, start, seq.frozen, draws, draw, targets, top, hidden)

    # ------------------------------------------------------------------------------------------------- moves

    def _preempt(self, seq: Sequence) -> None:
        self._remove(self.running, seq)
        self.cache.release_all(seq)
        seq.drafts = ()
        seq.preemptions += 1
        self.preemptions += 1
        self._wait(seq)

    def recompute(self) -> None:
        """A planned step was not carried out, or only in part: whoever runs starts again from what is known."""
        for seq in self.running[:]:
            self._preempt(seq)

    def _preempt_behind(self, seq: Sequence) -> bool:
        """Free blocks for `seq`: from a held beam, else from the last in rank. False: `seq` itself was the last, and is
        preempted."""
        if self._preempt_held():
            return True
        last = self.running[-1]
        prove(
            last is not seq or len(self.running) > 1,
            f"sequence {seq.id} does not fit an empty cache",
        )
        self._preempt(last)
        return last is not seq

    def _preempt_held(self) -> bool:
        held = next((s for s in reversed(self.running) if s.held), None)
        if held is not None:
            self._preempt(held)
        return held is not None

    def _fork_siblings(self, seq: Sequence) -> None:
        siblings, seq.siblings = seq.siblings, []
        for child in siblings:
            child.scored = seq.prompt_len  # the eldest has reported the prompt
            self.fork(seq, child)

    def _wait(self, seq: Sequence) -> None:
        seq.state, seq.pending = WAITING, False
        insort(self.waiting, seq, key=_rank)

    def _remove(self, queue: list[Sequence], seq: Sequence) -> None:
        i = bisect_left(queue, seq.rank, key=_rank)
        prove(i < len(queue) and queue[i] is seq, f"sequence {seq.id} is not where its state says")
        del queue[i]

    def _end(self, seq: Sequence) -> None:
        if seq.state == RUNNING:
            self._remove(self.running, seq)
        elif not seq.pending:
            self._remove(self.waiting, seq)
        self.cache.release_all(seq)
        seq.state = ENDED
        del self.sequences[seq.id]

    # ----------------------------------------------------------------------------------------------------- commit

    def commit(
        self, plan: StepPlan, result: StepResult, read: Reader | None = None
    ) -> list[TokenEvent]:
        """Move the counters by what was computed; return one event for each token gained, in order. `read` sees each event as it comes, and says
        whether the text ends there (a stop string): of drafts accepted in the same step, nothing behind it ever was."""
        if plan.step != result.step or len(plan.sequences) != len(result.sequences):
            prove(False, "the result is not of this plan")
        events: list[TokenEvent] = []

        def tell(event: TokenEvent) -> bool:
            events.append(event)
            ends = read is not None and read(event)
            return ends or event.finish is not None

        for step, done in zip(plan.sequences, result.sequences, strict=True):
            if step.seq_id != done.seq_id or len(done.drawn) != step.draws:
                prove(False, f"sequence {step.seq_id}: the result is not of this plan")
            seq = self.sequences.get(step.seq_id)
            if seq is None:  # aborted while the backend was computing
                continue
            if step.targets:
                seq.scored = max(seq.scored, step.start + len(step.targets))
            if step.draws == 0:
                self._advance(seq, step, tell)
            elif seq.beam:
                self._hold(seq, step)
                tell(TokenEvent(seq.id, done.drawn[0]))
            else:
                self._accept(seq, step, done.drawn, tell)
        return events

    def _advance(self, seq: Sequence, step: SeqStep, tell: Reader) -> None:
        """A part of the prompt is computed, nothing drawn."""
        seq.computed = step.start + len(step.tokens)
        self.cache.publish(seq)
        if seq.siblings and seq.computed == seq.prompt_len - 1:
            self._fork_siblings(seq)
        if seq.computed == len(seq.tokens) == seq.limit:  # nothing was asked for beyond the prompt
            self._end(seq)
            tell(TokenEvent(seq.id, None, Finish("length", seq.limit_name)))

    def _hold(self, seq: Sequence, step: SeqStep) -> None:
        """A beam has its candidates; extend() will say how it goes on."""
        seq.computed, seq.held = step.start + len(step.tokens), True
        self.cache.publish(seq)
        if not self.use_cache:
            self.cache.release_all(seq)

    def _accept(self, seq: Sequence, step: SeqStep, drawn: tuple[Drawn, ...], tell: Reader) -> None:
        """Keep the target's own tokens as long as the drafts before them were the same; the rest of the step never happened."""
        tokens, last = seq.tokens, step.draws - 1
        drafts = step.tokens[-last:] if last else ()
        finish, ended = None, False
        for i, draw in enumerate(drawn):
            token = draw.token
            if token < 0:
                seq.drafted, seq.accepted = seq.drafted + last, seq.accepted + i
                self._end(seq)
                tell(TokenEvent(seq.id, None, Finish("error", NOTHING_LEFT)))
                return
            tokens.append(token)
            if token in seq.ends and len(tokens) > seq.min_len:
                finish = Finish("stop", seq.ends[token])
            elif len(tokens) >= seq.limit:
                finish = Finish("length", seq.limit_name)
            ended = tell(TokenEvent(seq.id, draw, finish))
            if ended or seq.held or i == last or drafts[i] != token:
                break
        seq.computed = computed = len(tokens) - 1
        if last:
            seq.drafted += last
            seq.accepted += i
            self.cache.trim(seq)
        if computed // self.block_size > seq.published:
            self.cache.publish(seq)
        if ended:
            self._end(seq)
        elif not self.use_cache:
            self.cache.release_all(seq)

    def forget_prefixes(self) -> int:
        """Empty the prefix cache (what nobody uses at the moment). Returns the blocks freed."""
        return sum(pool.forget_cached() for pool in self.cache.pools)
