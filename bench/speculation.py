"""What speculation is worth on real prompts: 20 copying tasks and 40 mixed chat turns, plain and guessed in turns, the same text both ways.

    python bench/speculation.py [--model smollm2] [--tokens 96] [--rounds 3] [--mode auto] [--batches 1,4,16] [--sets copy,chat]

In each round a prompt is written plain, guessed, guessed, plain (every other round the other way about), so that a pace which rises or falls
meets both alike; its ratio is the median of the rounds'. The prompt is in the prefix cache. In a batch of n, n prompts of the set are written side by
side, and each has its own time.

On a machine with neighbours the times of one prompt scatter by 10 % and more, also where nothing was drafted. So there is a second ratio, "by steps":
every step counts with the median time of all steps of its size in the run, and guessing as it was. It is what the same work would
take on a machine whose pace did not change. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from prompts import CHAT, COPY

from verbatim import LLM, SamplingParams
from verbatim.base.records import Completion, StepPlan, StepResult


class Steps:
    """The size of every step of the last call, and how long steps of each size took in the whole run."""

    def __init__(self, llm: LLM) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.guessing: list[float] = []
        self.sizes: list[int] = []
        execute, drafting = llm.core.backend.execute, llm.core.drafting

        def timed_execute(plan: StepPlan) -> StepResult:
            began = time.perf_counter()
            result = execute(plan)
            self.seconds.setdefault(plan.rows, []).append(time.perf_counter() - began)
            self.sizes.append(plan.rows)
            return result

        def timed(guess: Callable[..., None], step_begins: bool) -> Callable[..., None]:
            def call(*about: Any) -> None:
                began = time.perf_counter()
                guess(*about)
                spent = time.perf_counter() - began
                if step_begins or not self.guessing:
                    self.guessing.append(spent)
                else:
                    self.guessing[-1] += spent

            return call

        llm.core.backend.execute = timed_execute  # type: ignore[method-assign]
        drafting.propose, drafting.observe = timed(drafting.propose, True), timed(drafting.observe, False)  # type: ignore[method-assign]

    def take(self) -> tuple[list[int], float]:
        """Sizes of the steps since the last call, and the seconds of guessing; one that a neighbour made ten times as long counts as three."""
        usual = statistics.median(self.guessing) if self.guessing else 0.0
        found = (self.sizes, sum(min(spent, 3 * usual) for spent in self.guessing))
        self.sizes, self.guessing = [], []
        return found

    def steady(self, taken: tuple[list[int], float]) -> float:
        sizes, guessing = taken
        return sum(statistics.median(self.seconds[rows]) for rows in sizes) + guessing


def answers(llm: LLM, prompts: Sequence[str], mode: str, tokens: int) -> list[Completion]:
    params = SamplingParams(temperature=0, max_tokens=tokens, speculate=mode)
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)


Works = list[tuple[tuple[list[int], float], tuple[list[int], float]]]  # what a batch did plain, and what it did guessed


def ratios(llm: LLM, steps: Steps, works: Works, prompts: Sequence[str], mode: str, tokens: int, rounds: int) -> list[float]:
    """Of each prompt, all of them written side by side: time plain to time guessed, the median of the rounds."""
    answers(llm, prompts, "off", tokens)  # fills the prefix cache
    work = {}
    found: list[list[float]] = [[] for _ in prompts]
    texts: list[set[str]] = [set() for _ in prompts]
    for turn in range(rounds):
        times = {"off": [0.0] * len(prompts), mode: [0.0] * len(prompts)}
        first, second = ("off", mode) if turn % 2 else (mode, "off")
        for way in (first, second, second, first):
            steps.take()
            done = answers(llm, prompts, way, tokens)
            work[way] = steps.take()
            for i, answer in enumerate(done):
                times[way][i] += answer.timings.total
                texts[i].add(answer.text)
            if way == mode:
                usage = [answer.usage for answer in done]
        for ratio, plain, fast in zip(found, times["off"], times[mode], strict=True):
            ratio.append(plain / fast)
    assert all(len(one) == 1 for one in texts), f"speculation changed an answer: {texts}"
    works.append((work["off"], work[mode]))
    out = [statistics.median(ratio) for ratio in found]
    for ratio, use, prompt in zip(out, usage, prompts, strict=True):
        print(f"{ratio:6.2f}x  {use.accepted_tokens:4d} of {use.drafted_tokens:4d} drafts  {prompt[:60]!r}", flush=True)
    return out


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
    with LLM(asked.model, context=2048) as llm:
        print(f"backend {llm.core.backend.info.name} {llm.core.backend.info.detail}, mode {asked.mode}")
        steps = Steps(llm)
        for batch in map(int, asked.batches.split(",")):
            for name in asked.sets.split(","):
                prompts, found, works = sets[name], [], []
                for at in range(0, len(prompts), batch):
                    found += ratios(llm, steps, works, prompts[at : at + batch], asked.mode, asked.tokens, asked.rounds)
                mean = statistics.geometric_mean(found)
                steady = [steps.steady(plain) / steps.steady(fast) for plain, fast in works]
                even = statistics.geometric_mean(steady)
                result[f"{name}, {batch} at once"] = {
                    "geometric_mean": mean,
                    "least": min(found),
                    "most": max(found),
                    "by_steps": even,
                    "by_steps_least": min(steady),
                }
                print(f"{name}, {batch} at once: {mean:.2f}x (least {min(found):.2f}, most {max(found):.2f}); ", end="")
                print(f"by steps {even:.2f}x (least {min(steady):.3f})", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
