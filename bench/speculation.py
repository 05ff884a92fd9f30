"""Speculation speed-up on real prompts: 20 copy tasks, 40 mixed chat turns and 20 tasks of writing
code, with and without drafts.

    python bench/speculation.py [--model smollm2] [--tokens 96] [--rounds 3] [--mode auto]
                                [--batches 1,4,16] [--sets copy,chat,code] [--head PATH]
                                [--backend cpu] [--turn 0.006]

Two engines decode the same prompts, one plain and one speculative, in turns of a few steps; each
has a clock that runs only while it steps. On a shared machine the speed of a core changes within
a second by more than the effect measured here; in turns this short both engines see the same
speed. A prompt's ratio is its plain time over its speculative time, the median of the rounds.
Prompts are in the prefix cache, but with a head, which reads states of computed positions: there
each round computes them again. In a batch of n, n prompts of the set run concurrently, each
with its own time. The output of both engines must be equal. The last line is JSON. On a GPU, whose
steps overlap, a turn of 0.1 seconds loses less at its ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from prompts import CHAT, CODE, COPY

from verbatim import LLM, SamplingParams
from verbatim.base.records import Completion

# Seconds between turns: the thread pool of the engine that stopped spins for a moment before it
# sleeps.
PAUSE = 0.0005


class Passes:
    """Tokens of completions, and the steps of their sequences."""

    tokens = count = 0

    def add(self, side: Side) -> None:
        for _, done in side.done.values():
            self.tokens += done.usage.output_tokens
            self.count += done.usage.output_tokens - done.usage.accepted_tokens


class Side:
    """One engine, and its clock."""

    def __init__(self, llm: LLM, mode: str, tokens: int, turn: float) -> None:
        self.core, self.encode = llm.core, llm.encode_chat
        self.params = SamplingParams(temperature=0, max_tokens=tokens, speculate=mode)
        self.clock, self.seconds = 0.0, turn
        self.done: dict[str, tuple[float, Completion]] = {}  # by prompt: seconds, answer

    def begin(self, prompts: Sequence[str]) -> None:
        self.clock, self.done = 0.0, {}
        for prompt in prompts:
            ids = self.encode([{"role": "user", "content": prompt}])
            self.core.add(self.core.request(ids, self.params, request_id=prompt))

    def turn(self) -> None:
        deadline = self.clock + self.seconds
        while self.core.busy and self.clock < deadline:
            began = time.perf_counter()
            outputs = self.core.step()
            self.clock += time.perf_counter() - began
            for output in outputs:
                if isinstance(output, Completion):
                    self.done[output.request_id] = (self.clock, output)


def race(plain: Side, speculative: Side, prompts: Sequence[str], first: int) -> None:
    """Both engines decode all prompts; which one starts a pair of turns alternates."""
    for side in (plain, speculative):
        side.begin(prompts)
    order = (
        (plain, speculative, speculative, plain)
        if first
        else (speculative, plain, plain, speculative)
    )
    while plain.core.busy or speculative.core.busy:
        for side in order:
            if side.core.busy:
                side.turn()
                time.sleep(PAUSE)


def ratios(plain: Side, speculative: Side, prompts: Sequence[str], rounds: int) -> list[float]:
    """Per prompt, all of them concurrent: plain time over speculative time, the median of the
    rounds."""
    race(plain, speculative, prompts, 0)  # fills the prefix caches
    found: dict[str, list[float]] = {prompt: [] for prompt in prompts}
    for turn in range(rounds):
        race(plain, speculative, prompts, turn % 2)
        for prompt in prompts:
            (slow, one), (fast, other) = plain.done[prompt], speculative.done[prompt]
            assert one.token_ids == other.token_ids, f"speculation changed an answer: {prompt!r}"
            found[prompt].append(slow / fast)
    for prompt in prompts:
        usage = speculative.done[prompt][1].usage
        ratio = statistics.median(found[prompt])
        print(
            f"{ratio:7.3f}x  {usage.accepted_tokens:4d} of {usage.drafted_tokens:4d} drafts  "
            f"{prompt[:60]!r}",
            flush=True,
        )
    return [statistics.median(found[prompt]) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1")
    parser.add_argument("--sets", default="copy,chat,code")
    parser.add_argument("--head", help="a draft head for the model")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--turn", type=float, default=0.006, help="seconds of an engine's turn")
    args = parser.parse_args()
    sets = {"copy": COPY, "chat": CHAT, "code": CODE, "all": (*CODE, *COPY, *CHAT)}
    result: dict[str, dict[str, float]] = {}
    opened = {
        "context": 2048,
        "backend": args.backend,
        "kv_memory": "2G",
        "prefix_cache": not args.head,
    }
    drafts = f"head:{args.head}" if args.head else "auto"
    with (
        LLM(args.model, speculate="off", **opened) as one,
        LLM(args.model, speculate=drafts, **opened) as other,
    ):
        print(
            f"backend {one.core.backend.info.name} {one.core.backend.info.detail}, mode {args.mode}"
        )
        plain = Side(one, "off", args.tokens, args.turn)
        speculative = Side(other, args.mode, args.tokens, args.turn)
        for batch in map(int, args.batches.split(",")):
            for name in args.sets.split(","):
                prompts, found, passes = sets[name], [], Passes()
                for at in range(0, len(prompts), batch):
                    found += ratios(plain, speculative, prompts[at : at + batch], args.rounds)
                    passes.add(speculative)
                mean = statistics.geometric_mean(found)
                result[f"{name}, {batch} at once"] = {
                    "geometric_mean": mean,
                    "quartiles": statistics.quantiles(found, n=4) if len(found) > 1 else found,
                    "tokens_per_pass": passes.tokens / max(passes.count, 1),
                    "least": min(found),
                    "most": max(found),
                }
                print(
                    f"{name}, {batch} at once: {mean:.3f}x (least {min(found):.3f}, most "
                    f"{max(found):.3f})",
                    flush=True,
                )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
