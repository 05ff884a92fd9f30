"""What speculation is worth on real prompts: 20 copying tasks and 40 mixed chat turns, plain and guessed in turns, the same text both ways.

    python bench/speculation.py [--model smollm2] [--tokens 96] [--rounds 3] [--mode auto] [--batches 1,4,16] [--sets copy,chat]

Two engines write the same prompts, one plain and one guessing, and take turns of a few steps: each has a clock that runs only while it steps. On a
machine with neighbours the pace of a core changes within a second by more than is to be measured here; in turns this short both meet the same pace. A
prompt's ratio is its time plain to its time guessed, the median of the rounds. Prompts are in the prefix cache. In a batch of n, n prompts
of the set are written side by side, and each has its own time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from prompts import CHAT, COPY

from verbatim import LLM, SamplingParams
from verbatim.base.records import Completion

TURN = 0.006  # seconds
PAUSE = 0.0005  # between turns: the threads of the engine that has stopped spin for a moment before they sleep


class Side:
    """One engine, and its clock."""

    def __init__(self, llm: LLM, mode: str, tokens: int) -> None:
        self.core, self.encode = llm.core, llm.encode_chat
        self.params = SamplingParams(temperature=0, max_tokens=tokens, speculate=mode)
        self.clock = 0.0
        self.done: dict[str, tuple[float, Completion]] = {}  # by prompt: seconds, answer

    def begin(self, prompts: Sequence[str]) -> None:
        self.clock, self.done = 0.0, {}
        for prompt in prompts:
            ids = self.encode([{"role": "user", "content": prompt}])
            self.core.add(self.core.request(ids, self.params, request_id=prompt))

    def turn(self) -> None:
        until = self.clock + TURN
        while self.core.busy and self.clock < until:
            began = time.perf_counter()
            outputs = self.core.step()
            self.clock += time.perf_counter() - began
            for output in outputs:
                if isinstance(output, Completion):
                    self.done[output.request_id] = (self.clock, output)


def race(plain: Side, guessed: Side, prompts: Sequence[str], first: int) -> None:
    """Both write all prompts; who begins a pair of turns alternates."""
    for side in (plain, guessed):
        side.begin(prompts)
    order = (plain, guessed, guessed, plain) if first else (guessed, plain, plain, guessed)
    while plain.core.busy or guessed.core.busy:
        for side in order:
            if side.core.busy:
                side.turn()
                time.sleep(PAUSE)


def ratios(plain: Side, guessed: Side, prompts: Sequence[str], rounds: int) -> list[float]:
    """Of each prompt, all of them written side by side: time plain to time guessed, the median of the rounds."""
    race(plain, guessed, prompts, 0)  # fills the prefix caches
    found: dict[str, list[float]] = {prompt: [] for prompt in prompts}
    for turn in range(rounds):
        race(plain, guessed, prompts, turn % 2)
        for prompt in prompts:
            (slow, one), (fast, other) = plain.done[prompt], guessed.done[prompt]
            assert one.token_ids == other.token_ids, f"speculation changed an answer: {prompt!r}"
            found[prompt].append(slow / fast)
    for prompt in prompts:
        usage = guessed.done[prompt][1].usage
        ratio = statistics.median(found[prompt])
        print(
            f"{ratio:7.3f}x  {usage.accepted_tokens:4d} of {usage.drafted_tokens:4d} drafts  {prompt[:60]!r}",
            flush=True,
        )
    return [statistics.median(found[prompt]) for prompt in prompts]


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--model", default="smollm2")
    ask.add_argument("--mode", default="auto")
    ask.add_argument("--tokens", type=int, default=96)
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--batches", default="1")
    ask.add_argument("--sets", default="copy,chat")
    asked = ask.parse_args()
    sets = {"copy": COPY, "chat": CHAT}
    result: dict[str, dict[str, float]] = {}
    with LLM(asked.model, context=2048) as one, LLM(asked.model, context=2048) as other:
        print(
            f"backend {one.core.backend.info.name} {one.core.backend.info.detail}, mode {asked.mode}"
        )
        plain, guessed = Side(one, "off", asked.tokens), Side(other, asked.mode, asked.tokens)
        for batch in map(int, asked.batches.split(",")):
            for name in asked.sets.split(","):
                prompts, found = sets[name], []
                for at in range(0, len(prompts), batch):
                    found += ratios(plain, guessed, prompts[at : at + batch], asked.rounds)
                mean = statistics.geometric_mean(found)
                result[f"{name}, {batch} at once"] = {
                    "geometric_mean": mean,
                    "least": min(found),
                    "most": max(found),
                }
                print(
                    f"{name}, {batch} at once: {mean:.3f}x (least {min(found):.3f}, most {max(found):.3f})",
                    flush=True,
                )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
