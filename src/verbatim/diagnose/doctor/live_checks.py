"""Checks of a running model: does a chat turn end, does the output loop, does sampling cost
accuracy. In: an LLM and a seed. Out: Findings.

The checks judge the model's own distribution: the filters and penalties that its files recommend do
not apply. All requests have fixed prompts, seeds and lengths, so equal seeds give equal findings on
every machine with the same numerics version. About 1,300 tokens: seconds for a small model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from verbatim.base.defaults import NO_DEFAULTS, resolve
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.diagnose.doctor.findings import Finding, bad, checks, good, note
from verbatim.diagnose.quiz import BUILT_IN, prompt_ids, run_quiz
from verbatim.diagnose.statistics import wilson
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

# Questions with short answers: a sound chat model ends each within TURN_TOKENS.
SHORT = ("Say hello.", "What is 2 + 2?", "Name a colour.", "Is the sun hot?")
TURN_TOKENS = 64
# Tasks with long answers, where loops appear.
OPEN = (
    "Write a story about a lighthouse.",
    "Explain how rain forms.",
    "Tell me about the history of bread.",
    "How do I learn to play chess?",
)
LOOP_TOKENS = 112  # the loop detector needs at least 64 repeated tokens
GREEDY_LOOPS = 0.75  # share of greedy outputs that loop, from which on the model is at fault
SAMPLED_LOOPS = 0.25  # the same at temperature 1, where noise breaks most loops
QUIZ_TOKENS = 12
QUIZ_SAMPLES = 2
CONTEXT = 2048  # tokens; enough for every request above, and for the texts of text_checks.py


def check_live(llm: LLM, *, seed: int = 0) -> list[Finding]:
    return [*check_turns(llm, seed), *check_loops(llm, seed), *check_quiz(llm, seed)]


def check_encoder_live(llm: LLM) -> list[Finding]:
    """Are the embeddings (of a cross-encoder: the scores) finite, and different for different
    texts?"""
    if llm.loaded.task == "rerank":
        what, ranked = "scores", llm.rerank(SHORT[1], list(OPEN), truncate=True)
        found = np.array([[one.score] for one in sorted(ranked, key=lambda one: one.index)])
    else:
        what, found = "embeddings", llm.embed(list(OPEN), truncate=True)
    evidence = f"{what} of {len(OPEN)} texts"
    if not np.isfinite(found).all():
        remedy = "fetch the file again; a float16 copy of a bfloat16 model can overflow, too"
        return [bad(f"{what} are NaN or infinite", evidence, remedy, check=what)]
    if all(np.array_equal(a, b) for a, b in combinations(found, 2)):
        remedy = "compare the weights and the tokenizer with the published ones"
        return [bad(f"all {what} are equal, whatever the text", evidence, remedy, check=what)]
    return [good("finite, and different for different texts", evidence, check=what)]


def _run(llm: LLM, prompts: Sequence[str], tokens: int, seed: int) -> list[list[Completion]]:
    """Each prompt greedily and at temperature 1, in one batch, without the filters and penalties
    that the model recommends."""
    base = SamplingParams(temperature=0, max_tokens=tokens, on_loop="stop")
    sampled = [base.with_(temperature=1.0, seed=seed + i) for i in range(len(prompts))]
    ids = [prompt_ids(llm, text) for text in prompts]
    settings = [resolve(p, NO_DEFAULTS) for p in [base] * len(prompts) + sampled]
    done = llm.generate(ids * 2, settings)
    raise_error(done)
    return [done[: len(prompts)], done[len(prompts) :]]


@checks("turn ends", guarded=False)
def check_turns(llm: LLM, seed: int = 0) -> Iterator[Finding]:
    """Does a chat turn end by an end-of-sequence token, and not by length?"""
    if not llm.has_template:
        return
    done = [c for each in _run(llm, SHORT, TURN_TOKENS, seed) for c in each]
    ended = sum(c.finish_reason == "stop" for c in done)
    evidence = f"{ended} of {len(done)} short answers ended within {TURN_TOKENS} tokens"
    if not ended:
        last = done[0]
        yield bad(
            "no chat turn ended by itself: answers run to max_tokens",
            f"{evidence}; {SHORT[0]!r} gave {last.text[:60]!r}",
            "compare the end of turn of the template with eos_token_id; if they agree, the"
            " model never learned to draw it",
        )
        return
    if ended < len(done) / 2:
        yield note(
            "most short chat turns did not end by themselves",
            evidence,
            "set max_tokens; a stop string may help",
        )
        return
    yield good("chat turns end by an end-of-sequence token", evidence)


@checks("loops", guarded=False)
def check_loops(llm: LLM, seed: int = 0, prompts: Sequence[str] = OPEN) -> Iterator[Finding]:
    """How often does the output end in a repetition loop, greedily and at temperature 1?"""
    shares, words = [], []
    runs = _run(llm, prompts, LOOP_TOKENS, seed)
    for name, done in zip(("greedy", "temperature 1"), runs, strict=True):
        loops = sum(c.choices[0].loop > 0 for c in done)
        low, high = wilson(loops, len(done))
        shares.append(loops / len(done))
        words.append(f"{name} {loops} of {len(done)} (95 %: {low:.0%} to {high:.0%})")
    evidence = f"loops in {LOOP_TOKENS} tokens: {', '.join(words)}"
    if shares[1] >= SAMPLED_LOOPS:
        yield bad(
            "the output loops even at temperature 1: the distribution is degenerate",
            evidence,
            "check rope settings and quantisation against a float copy of the model",
        )
        return
    if shares[0] >= GREEDY_LOOPS:
        yield bad(
            "almost every greedy output loops",
            evidence,
            "sample (--temperature 0.7 --min-p 0.05), or add --dry-multiplier 0.8; --on-loop"
            " stop ends a loop",
        )
        return
    yield good("few outputs loop", evidence)


@checks("quiz", guarded=False)
def check_quiz(llm: LLM, seed: int = 0) -> Iterator[Finding]:
    """Accuracy of greedy and sampled answers on the built-in questions. A fault only if their
    intervals do not overlap: then the setting matters more than chance explains."""
    params = SamplingParams(temperature=1.0, max_tokens=QUIZ_TOKENS)
    result = run_quiz(llm, BUILT_IN, samples=QUIZ_SAMPLES, params=params, seed=seed, plain=True)
    greedy, sampled = result.methods[:2]
    words = [
        f"{a.method} {a.share:.0%} (95 %: {a.interval[0]:.0%} to {a.interval[1]:.0%})"
        for a in (greedy, sampled)
    ]
    evidence = f"{len(BUILT_IN)} questions: {', '.join(words)}"
    if greedy.interval[0] > sampled.interval[1]:
        yield note(
            "sampling at temperature 1 answers worse than greedy",
            evidence,
            "for facts, use temperature 0 or a small temperature",
        )
        return
    if sampled.interval[0] > greedy.interval[1]:
        yield note(
            "greedy answers worse than sampling: the most likely token misleads",
            evidence,
            "compare the template with the published one",
        )
        return
    yield good("greedy and sampled answers agree within chance", evidence)
