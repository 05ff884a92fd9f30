"""Timings of `verbatim bench`: the same jobs for our engine and a rival, interleaved, medians.

Our numbers are taken at the public API, so they include scheduling, sampling and detokenization.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from verbatim.base.errors import VerbatimError
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

MAX_REPEATED = 20.0  # seconds; a measurement that takes longer is not repeated
# Rounds before the first that counts. The first on a GPU compiles kernels, and the second captures
# the CUDA graph of a step with prompts, whose shape it sees for the second time.
GPU_WARM_UPS = 2


class Runner(Protocol):
    name: str

    def prefill(self, tokens: int) -> float:
        """Seconds for a prompt of this many tokens, up to its first drawn token."""

    def decode(self, context: int, steps: int) -> float:
        """Seconds for `steps` more tokens at a context of this length; prefill is not included."""

    def batch(self, sequences: int, context: int, steps: int) -> float:
        """decode() of several sequences at once, each with a context of this length."""


class Ours:
    """Our engine as a Runner. Prompts are random tokens, because the cost does not depend on
    them."""

    name = "verbatim"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.random = random.Random(0)
        tokenizer = llm.tokenizer
        self.ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)]

    def _prompt(self, tokens: int) -> list[int]:
        return self.random.choices(self.ids, k=tokens)

    def _params(self, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def prefill(self, tokens: int) -> float:
        prompt = self._prompt(tokens)
        began = time.perf_counter()
        self.llm.generate(prompt, self._params(1))
        return time.perf_counter() - began

    def decode(self, context: int, steps: int) -> float:
        return self.batch(1, context, steps)

    def batch(self, sequences: int, context: int, steps: int) -> float:
        """Seconds from the end of the last prefill until all are done: the time in which every
        sequence decodes one token per step."""
        prompts = [self._prompt(context) for _ in range(sequences)]
        done = self.llm.generate(prompts, self._params(steps + 1))
        raise_error(done)
        return max(c.timings.total for c in done) - max(c.timings.first_token for c in done)


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the table. Throughput is `tokens` per second."""

    kind: str  # prefill | decode | batch
    size: int  # prompt tokens, context or sequences
    tokens: int
    run: Callable[[Runner], float]


@dataclass(slots=True)
class JobRow:
    job: Job
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by runner

    def rate(self, name: str) -> float:
        return self.job.tokens / statistics.median(self.seconds[name])


def jobs(
    prefills: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    steps: int,
    step_tokens: int,
    limit: int,
) -> list[Job]:
    """The jobs of a run. `limit` is the model's context: larger jobs are left out, and the caller
    reports them."""
    out = [Job("prefill", n, n, lambda r, n=n: r.prefill(n)) for n in prefills if n < limit]  # type: ignore[misc]
    fitting = [c for c in contexts if c + steps < limit]
    out += [Job("decode", c, steps, lambda r, c=c: r.decode(c, steps)) for c in fitting]  # type: ignore[misc]
    for b in batches:
        # All prompts fit into the first step, so that all sequences start together.
        context = max(1, min(32, step_tokens // b))
        out.append(Job("batch", b, b * steps, lambda r, b=b, c=context: r.batch(b, c, steps)))  # type: ignore[misc]
    return out


def measure(job: Job, runners: Sequence[Runner], repeats: int, warm_ups: int = 1) -> JobRow:
    """Rounds of ours, theirs, ours, theirs, so that a slow minute of the machine affects both."""
    row = JobRow(job, {r.name: [] for r in runners})
    for runner in runners:
        for _ in range(warm_ups):
            last = job.run(runner)
        if last > MAX_REPEATED:  # a warm-up counts only if it is too long to repeat
            row.seconds[runner.name].append(last)
    for _ in range(repeats):
        for runner in runners:
            if not (row.seconds[runner.name] and row.seconds[runner.name][0] > MAX_REPEATED):
                row.seconds[runner.name].append(job.run(runner))
    return row


def cold_start(model: str, extra: Sequence[str], repeats: int) -> float:
    """Seconds from starting `verbatim run` in a new process to the first byte of output, with
    the model in the page cache."""
    arguments = "-m verbatim run Hi --max-tokens 8 --quiet --model"
    command = [sys.executable, *arguments.split(), model, *extra]
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdout=pipe, stderr=null) as process:
            assert process.stdout is not None
            answered = os.read(process.stdout.fileno(), 1)
            times.append(time.perf_counter() - began)
            process.stdout.close()
            process.wait()
        if not answered:
            raise VerbatimError(
                f"a second process gave no answer (exit code {process.returncode}); "
                f"{' '.join(command[2:])} shows why"
            )
    return statistics.median(times)


def answer(llm: LLM, text: str, params: SamplingParams) -> Completion:
    """The output for a prompt: of a chat turn where the model has a template."""
    if llm.has_template:
        return llm.chat([{"role": "user", "content": text}], params)
    return llm.generate(text, params)


def first_token(llm: LLM, repeats: int) -> float:
    """Time to first token of a short question in a running engine, without a prefix hit."""
    times: list[float] = []
    for i in range(repeats + 1):
        text = f"Question {i} of {repeats}: why is the sky blue?"
        params = SamplingParams(temperature=0, max_tokens=1, cache_salt=str(i))
        times.append(answer(llm, text, params).timings.first_token)
    return statistics.median(times[1:])
