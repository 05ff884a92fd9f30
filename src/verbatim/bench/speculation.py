"""Speculation curve of `verbatim bench`: cost of a step by number of drafts, and tokens per step.

Speculation never changes the output, so one plain run suffices: the completion is generated once,
then each proposer and draft length is simulated along it, counting steps ("passes"). The cost of a
step with k drafts is measured on the backend.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from verbatim.base.json_io import JsonObject
from verbatim.base.params import SamplingParams
from verbatim.base.records import (
    DrawSpec,
    SeqResult,
    SeqStep,
    State,
    StateRows,
    StepPlan,
    StepResult,
)
from verbatim.bench.measure import answer

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM
    from verbatim.speculate.proposer import Proposer

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # drafts per pass
GREEDY = SamplingParams(temperature=0)
_LINE = (
    "The lighthouse keeper climbed the stairs at dusk and wrote down the weather, the ships that "
    "passed, and the colour of the sea."
)
_CODE = (
    "def total(items, rate):\n    s = 0\n    for item in items:\n"
    "        s = s + item.price * item.count\n    return s + s * rate"
)
PROMPTS = {
    "copy": f"Repeat the following text exactly, word for word:\n\n{_LINE}",
    "code": f"Rename the function total to price and write the whole code again:\n\n{_CODE}",
    "list": "Count from 1 to 30, one number on each line, in the form 'number N'.",
    "chat": "Explain in three sentences why the sky is blue.",
}


@dataclass(frozen=True, slots=True)
class Walk:
    """One completion, one proposer, one draft length."""

    tokens: int
    passes: int
    drafted: int
    accepted: int
    rows: tuple[int, ...]  # drafts per pass

    @property
    def tokens_a_pass(self) -> float:
        return self.tokens / self.passes


def walk(
    proposer: Proposer,
    prompt: Sequence[int],
    output: Sequence[int],
    limit: int,
    states: Sequence[State] | None = None,
) -> Walk:
    """Simulate decoding along a known completion: each pass drafts, accepts the longest correct
    prefix, and gains one token of the target's own. `states`: the target's, of all positions."""
    from verbatim.speculate.proposer import Observer, SeqView

    known, at, drafted, accepted, rows, seen = list(prompt), 0, 0, 0, [], 0
    while at < len(output):
        max_drafts = len(output) - at - 1
        draft: tuple[int, ...] = ()
        if limit and max_drafts:
            if states is not None and isinstance(proposer, Observer):
                new = SeqResult(0, hidden=cast("StateRows", states[seen : len(known) - 1]))
                proposer.observe(StepPlan(0, (SeqStep(0, (), seen, ()),)), StepResult(0, (new,)))
                seen = len(known) - 1
            view = SeqView(0, known, len(prompt), GREEDY, 0, max_drafts)
            found = proposer.propose([view], min(limit, max_drafts)).get(0)
            draft = found.tokens[: min(limit, max_drafts)] if found else ()
        correct = 0
        while correct < len(draft) and draft[correct] == output[at + correct]:
            correct += 1
        rows.append(len(draft))
        drafted += len(draft)
        accepted += correct
        known += output[at : at + correct + 1]
        at += correct + 1
    if states is not None:
        proposer.finish(SeqView(0, known, len(prompt), GREEDY, 0, 0))
    return Walk(len(output), len(rows), drafted, accepted, tuple(rows))


def final_states(llm: LLM, tokens: Sequence[int]) -> list[State]:
    """What a draft layer reads of the target. The engine must be idle: its KV blocks are
    overwritten."""
    backend, size = llm.loaded.backend, llm.core.scheduler.step_tokens
    blocks = _first_blocks(llm, len(tokens))
    found: list[State] = []
    for start in range(0, len(tokens), size):
        step = SeqStep(0, tuple(tokens[start : start + size]), start, blocks, hidden=True)
        states = backend.execute(StepPlan(0, (step,))).sequences[0].states
        found.extend(() if states is None else states)
    return found


def _first_blocks(llm: LLM, positions: int) -> tuple[tuple[int, ...], ...]:
    backend = llm.loaded.backend
    count = -(-positions // backend.block_size)
    return tuple(tuple(range(count)) for _ in backend.spec.groups)


@contextmanager
def _reading(blocks: tuple[tuple[int, ...], ...], proposer: Proposer) -> Iterator[Proposer]:
    """A proposer that reads the target's KV cache finds that of final_states()."""
    from verbatim.speculate.assistant_proposer import AssistantProposer

    if not isinstance(proposer, AssistantProposer):
        yield proposer
        return
    tables, proposer.tables = proposer.tables, lambda _: blocks
    try:
        yield proposer
    finally:
        proposer.tables = tables


def pass_seconds(llm: LLM, context: int, lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """Seconds of a step that verifies k drafts at this context length, per k. The engine must be
    idle: its first KV blocks are overwritten."""
    backend = llm.loaded.backend
    blocks = _first_blocks(llm, context + max(lengths) + 1)
    ids = [i for i in range(llm.tokenizer.vocab_size) if not llm.tokenizer.is_control(i)]
    tokens = tuple(ids[(7919 * i) % len(ids)] for i in range(context + max(lengths) + 1))
    draw = DrawSpec(GREEDY, 0, context)
    step = llm.core.scheduler.step_tokens
    for start in range(0, context, step):
        piece = tokens[start : min(start + step, context)]
        backend.execute(StepPlan(0, (SeqStep(0, piece, start, blocks),)))
    out: dict[int, list[float]] = {k: [] for k in lengths}
    for turn in range(repeats + 1):  # the first round is the warm-up
        for k in lengths:
            drafts = tokens[context : context + 1 + k]
            verified = SeqStep(0, drafts, context, blocks, draws=1 + k, draw=draw)
            began = time.perf_counter()
            backend.execute(StepPlan(0, (verified,)))
            if turn:
                out[k].append(time.perf_counter() - began)
    return {k: statistics.median(times) for k, times in out.items()}


def texts(llm: LLM, tokens: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and completion (without speculation) of each task, as token ids."""
    out = {}
    for name, text in PROMPTS.items():
        params = GREEDY.with_(max_tokens=tokens, speculate="off")
        done = answer(llm, text, params)
        out[name] = (done.prompt_ids, done.token_ids)
    return out


def curve(llm: LLM, mode: str, repeats: int, tokens: int = 128) -> JsonObject:
    """The data of `bench --speculate`: per draft length the cost of a pass, and per task the
    tokens per pass and seconds per token."""

    def proposer() -> Proposer:
        return llm.core.drafting.proposers(mode)[-1]

    written = texts(llm, tokens)
    costs = pass_seconds(llm, 128 if llm.context > 256 else 8, LENGTHS, repeats)
    full = [costs[k] for k in LENGTHS]
    tasks: JsonObject = {}
    for name, (prompt, output) in written.items():
        rows = []
        states = final_states(llm, [*prompt, *output]) if mode in ("mtp", "head") else None
        for k in LENGTHS:
            with _reading(_first_blocks(llm, len(prompt) + len(output)), proposer()) as own:
                done = walk(own, prompt, output, k, states)
            spent = sum(_between(full, r) for r in done.rows)
            spent += done.drafted * proposer().token_cost
            rates = {"tokens_a_pass": done.tokens_a_pass, "seconds_a_token": spent / done.tokens}
            counts = {"accepted": done.accepted, "drafted": done.drafted}
            rows.append({"drafts": k, **rates, **counts})
        tasks[name] = rows
    each = proposer().token_cost
    return {
        "proposer": mode,
        "pass_seconds": [
            {"drafts": k, "seconds": costs[k], "break_even": (costs[k] + k * each) / costs[0]}
            for k in LENGTHS
        ],
        "tasks": tasks,
    }


def _between(costs: Sequence[float], drafts: int) -> float:
    """Cost of a pass with this many drafts, interpolated between the measured lengths."""
    for i in range(1, len(LENGTHS)):
        low, high = LENGTHS[i - 1], LENGTHS[i]
        if drafts <= high:
            return costs[i - 1] + (costs[i] - costs[i - 1]) * (drafts - low) / (high - low)
    return costs[-1]
