"""Twelve requests for the tests of overlapped decoding, on the fake backend and on the cuda one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion, StepPlan
from verbatim.engine.calls.llm import LLM
from verbatim.engine.loaded_model import LoadedModel
from verbatim.engine.step.overlap import Current, EarlyStep, Overlap
from verbatim.testing.fakes import ByteTokenizer


def crowd(r: random.Random) -> list[tuple[int, list[int], SamplingParams]]:
    """(arrival step, prompt, parameters) of 12 requests: the device samples most of them, the host
    some, and some have drafts."""
    kinds: list[dict[str, Any]] = [
        {"top_k": 3, "logprobs": 2},
        {"repetition_penalty": 1.3},
        {"min_tokens": 4, "typical_p": 0.8},
        {"n": 2},
        {"stop": ["a"]},
        {"speculate": "suffix"},
    ]
    out = []
    for i in range(12):
        more = kinds[i // 2] if i % 2 else {}
        options = {
            "temperature": r.choice((0.0, 0.8, 1.3)),
            "seed": i,
            "max_tokens": r.randint(4, 26),
            "speculate": "off",
            **more,
        }
        out.append(
            (
                r.choice((0, 0, 9, 30)),
                r.choices(range(200), k=r.choice((2, 15, 17))),
                SamplingParams(**options),
            )
        )
    return sorted(out, key=lambda request: request[0])


def generate_all(backend: Any, r: random.Random, blocks: int = 9) -> list[Any]:
    """The choices of each request of crowd(), in a KV cache that forces preemption; one request is
    aborted."""
    tokenizer = ByteTokenizer()
    loaded = LoadedModel(backend, tokenizer, (tokenizer.EOS,), name="tiny", digest="tiny")
    waiting, done = crowd(r), {}
    with LLM.from_loaded(loaded, context=128, kv_blocks=blocks, step_tokens=24, check=True) as llm:
        core, step = llm.core, 0
        while waiting or core.busy:
            while waiting and waiting[0][0] <= step:
                _, prompt, params = waiting.pop(0)
                core.add(core.request(prompt, params, request_id=str(len(waiting))))
            if step == 12:
                core.abort(next(iter(core.requests)))
            done |= {
                one.request_id: one.choices for one in core.step() if isinstance(one, Completion)
            }
            step += 1
        assert core.scheduler.preemptions, "the KV cache was large enough: no preemption"
    return sorted(done.items())


@dataclass
class RowCount:
    launched: int = 0  # rows of steps that were launched ahead
    matched: int = 0  # those of them that a plan has used


def count_rows(monkeypatch: pytest.MonkeyPatch) -> RowCount:
    """Counts the rows of all engines."""
    count, launch, launch_next = RowCount(), Overlap.launch, Overlap.launch_next

    def counted(self: Overlap, plan: StepPlan) -> Current:
        ahead = self._ahead
        current = launch(self, plan)
        count.matched += len(current.rows) if ahead is not None else 0
        return current

    def counted_next(self: Overlap, plan: StepPlan, current: Current) -> EarlyStep | None:
        following = launch_next(self, plan, current)
        count.launched += len(following.steps) if following is not None else 0
        return following

    monkeypatch.setattr(Overlap, "launch", counted)
    monkeypatch.setattr(Overlap, "launch_next", counted_next)
    return count
