"""`verbatim verify`: one request, the needle, in every circumstance that must not matter. Promise 1
on this machine, with this model.

In: a model and engine settings. Out: one CaseResult per circumstance. The needle is a greedy and a
sampled request; a run is identical if every token and every bit of every log-probability equals the
first run, in which the needle was alone. A row also says what shows that the circumstance occurred:
how often the needle was preempted, how many of its tokens came from the cache.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from verbatim.backend import gpu
from verbatim.base.json_io import JsonObject
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

# It repeats itself, so that the n-gram proposers find drafts, some of them wrong.
TEXT = (
    "To make tea: boil the water, add the leaves, wait, pour. To make coffee: boil the water, add"
    " the powder, wait, pour. To make tea: boil the water, add"
)
TOKENS = 32
LOW_PRIORITY = 5  # the scheduler preempts the needle first
MATE_TOKENS = 40
ISA = "VERBATIM_ISA"
Open = Callable[[JsonObject], "LLM"]


@dataclass(frozen=True, slots=True)
class Circumstance:
    """One way to run the needle: engine settings, other requests beside it, environment."""

    group: str
    detail: str
    engine: JsonObject = field(default_factory=dict)
    mates: int = 0
    warm: bool = False  # run the needle once before, so that its prompt is in the prefix cache
    starve: bool = False  # a KV cache too small for all, and the needle last in rank
    isa: str = ""
    draft: bool = False  # draft wherever a proposer can, also where it does not pay


@dataclass(frozen=True, slots=True)
class CaseResult:
    group: str
    detail: str
    same: bool
    tokens: int  # compared, with their log-probabilities
    evidence: str
    difference: str = ""  # the first differing token, described for the report


def circumstances(
    backend: str, threads: int, isas: Sequence[str], own: Iterable[str] = ()
) -> list[Circumstance]:
    """What is tried. Threads and instruction sets belong to the cpu backend; `own`: modes of
    speculation that come with the model."""
    found = [Circumstance("alone", "again")]
    found += [Circumstance("batch-mates", f"{n} others", mates=n) for n in (2, 7, 15)]
    found += [Circumstance("chunks", f"of {n} tokens", {"step_tokens": n}) for n in (5, 16, 48)]
    found += [
        Circumstance("prefix cache", "hit", {"prefix_cache": True}, warm=True),
        Circumstance("prefix cache", "off", {"prefix_cache": False}, warm=True),
        Circumstance("preemption", "a full KV cache", {"prefix_cache": False}, 3, starve=True),
        Circumstance("preemption", "and 5 others", {}, 5, starve=True),
    ]
    if backend == "cpu":
        found.append(Circumstance("processes", "2", {"tensor_parallel": 2}))
        counts = sorted({1, 2, threads, threads + 1} - {0})
        found += [Circumstance("threads", str(n), {"threads": n}) for n in counts]
        found += [Circumstance("instruction set", name, isa=name) for name in isas]
    modes = ("ngram", "suffix", *own)
    found += [Circumstance("speculation", m, {"speculate": m}, draft=True) for m in modes]
    return found


def settings_of(backend: str) -> tuple[str, ...]:
    """The engine settings of the circumstances as NAME=VALUE, and one sequence at a time."""
    if backend == "auto":
        backend = "cuda" if gpu.present() and gpu.missing() is None else "cpu"
    changes = [case.engine.items() for case in circumstances(backend, 2, ())]
    single = {f"{name}={value}".lower() for one in changes for name, value in one if len(one) == 1}
    return ("speculate=off", "max_running=1", *sorted(single))


def verify(open_llm: Open, backend: str) -> Iterator[CaseResult]:
    """Run every circumstance on one backend. `open_llm` opens the model with engine settings."""
    with open_llm({"backend": backend, "speculate": "auto"}) as llm:
        expected = _run(llm, Circumstance("alone", "first"), "off")
        info, own = llm.loaded.backend.info, tuple(llm.core.drafting.own)
    isas = _isas() if info.name == "cpu" else ()
    for case in circumstances(info.name, info.threads, isas, own):
        settings = {"backend": backend, "speculate": "off", **case.engine}
        with _environment(case.isa):
            if case.starve:
                settings["kv_blocks"] = _few_blocks(expected, case.mates)
            with open_llm(settings) as llm:
                llm.core.drafting.adaptive = not case.draft
                if case.warm:
                    _run(llm, case)
                found = _run(llm, case)
        yield _compare(case, expected, found)


def needles(llm: LLM, *, low: bool = False) -> tuple[list[list[int]], list[SamplingParams]]:
    ids = llm.tokenizer.encode_prompt(TEXT)
    base = SamplingParams(max_tokens=TOKENS, logprobs=2, ignore_eos=True, temperature=0)
    base = base.with_(priority=LOW_PRIORITY if low else 0)
    return [ids, ids], [base, base.with_(temperature=1.0, top_p=0.95, seed=11)]


def _run(llm: LLM, case: Circumstance, mode: str | None = None) -> list[Completion]:
    """Run the two needles and the requests beside them in one batch; return the needles. `mode`:
    of speculation, where not the engine's."""
    prompts, params = needles(llm, low=case.starve)
    params = [one.with_(speculate=mode) for one in params]
    rng = random.Random(case.mates)
    tokenizer = llm.tokenizer
    ids = [i for i in range(min(tokenizer.vocab_size, 4096)) if not tokenizer.is_control(i)]
    for number in range(case.mates):
        prompts.append(rng.choices(ids, k=rng.choice((3, 9, 24))))
        mate = SamplingParams(max_tokens=MATE_TOKENS, ignore_eos=True, seed=number)
        params.append(mate.with_(temperature=rng.choice((0.0, 0.7, 1.3))))
    done = llm.generate(prompts, params)[:2]
    raise_error(done)
    return done


def _few_blocks(needle: Sequence[Completion], mates: int) -> int:
    """So few KV blocks that a sequence is preempted: all prompts fit, but not all outputs."""
    from verbatim.base.config import BLOCK_SIZE

    each = -(-(len(needle[0].prompt_ids) + TOKENS + 1) // BLOCK_SIZE)
    return each + 2 * mates


def _isas() -> tuple[str, ...]:
    try:
        native = import_module("verbatim.backend.cpu._native")
    except ImportError:  # not built
        return ()
    return tuple(native.isas())


@contextmanager
def _environment(isa: str) -> Iterator[None]:
    before = os.environ.get(ISA)
    if isa:
        os.environ[ISA] = isa
    try:
        yield
    finally:
        if before is not None:
            os.environ[ISA] = before
        elif isa:
            del os.environ[ISA]


def _compare(
    case: Circumstance, expected: Sequence[Completion], found: Sequence[Completion]
) -> CaseResult:
    tokens, difference = 0, ""
    for name, a, b in zip(("greedy", "sampled"), expected, found, strict=True):
        tokens += len(a.token_ids)
        if not difference and (a.token_ids != b.token_ids or a.logprobs != b.logprobs):
            difference = f"{name}: {_first_difference(a, b)}"
    return CaseResult(case.group, case.detail, not difference, tokens, _evidence(found), difference)


def _first_difference(a: Completion, b: Completion) -> str:
    for at, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=False)):
        if x.token != y.token:
            return f"token {at} is {y.token}, and {x.token} alone"
        if x != y:
            return f"log-probability of token {at} is {y.logprob!r}, and {x.logprob!r} alone"
    return f"{len(b.token_ids)} tokens, and {len(a.token_ids)} alone"


def _evidence(found: Sequence[Completion]) -> str:
    """Counts that prove the circumstance: preemptions, cached tokens, accepted drafts."""
    preempted = sum(c.timings.preemptions for c in found)
    cached = sum(c.usage.cached_tokens for c in found)
    drafted = sum(c.usage.drafted_tokens for c in found)
    accepted = sum(c.usage.accepted_tokens for c in found)
    parts = {
        f"preempted {preempted}×": preempted,
        f"{cached} tokens from the cache": cached,
        f"{accepted} of {drafted} drafts accepted": drafted,
    }
    return ", ".join(part for part, count in parts.items() if count)
