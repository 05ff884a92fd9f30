"""`verbatim compare`: the same prompts under several settings, and what each setting does to them.

In: prompts and Settings (sampling parameters, engine settings, a model). Out: one Outcome per
setting. All prompts of a setting are one batch; settings that share an engine share its weights.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verbatim.base.json_io import JsonObject
from verbatim.base.params import SamplingParams
from verbatim.base.records import Completion
from verbatim.diagnose.statistics import distinct, repetition
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM


@dataclass(frozen=True, slots=True)
class Setting:
    """One column of the comparison."""

    name: str
    params: SamplingParams
    engine: JsonObject = field(default_factory=dict)  # fields of EngineConfig
    model: str = ""  # "": the command's model


@dataclass(frozen=True, slots=True)
class Outcome:
    setting: Setting
    texts: tuple[str, ...]  # first choice per prompt
    tokens: int  # output tokens of all choices
    logprob: float  # mean per token, in the model's own distribution
    repetition: float  # mean share of repeated 4-grams of an output
    diversity: float  # distinct 2-grams of all outputs together
    loops: int  # outputs that end in a loop
    same: int  # prompts whose tokens equal those of the first setting
    seconds: float  # time of the whole batch
    finish: tuple[str, ...]
    seeds: tuple[int, ...]
    fingerprint: str

    @property
    def rate(self) -> float:
        """Output tokens per second of the whole batch, prefill included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


Open = Callable[[str, JsonObject], "LLM"]
Encode = Callable[["LLM", str], list[int]]


def compare(
    open_llm: Open, prompts: Sequence[str], settings: Sequence[Setting], encode: Encode
) -> list[Outcome]:
    """Run the settings in order of their engines; the result is in order of the settings."""
    found: dict[int, Outcome] = {}
    first: list[tuple[int, ...]] = []
    engines: dict[str, list[int]] = {}
    for at, setting in enumerate(settings):
        key = repr((setting.model, sorted(setting.engine.items())))
        engines.setdefault(key, []).append(at)
    for members in engines.values():
        shared = settings[members[0]]
        with open_llm(shared.model, shared.engine) as llm:
            ids = [encode(llm, text) for text in prompts]
            llm.generate(ids[0], SamplingParams(max_tokens=1, temperature=0))  # warm up
            for at in members:
                began = time.perf_counter()
                done = llm.generate(ids, settings[at].params.with_(logprobs=0))
                seconds = time.perf_counter() - began
                raise_error(done)
                if not first:  # the first engine has the first setting
                    first = [c.token_ids for c in done]
                found[at] = _outcome(settings[at], done, first, seconds)
    return [found[at] for at in range(len(settings))]


def _outcome(
    setting: Setting, done: Sequence[Completion], first: Sequence[tuple[int, ...]], seconds: float
) -> Outcome:
    choices = [choice for completion in done for choice in completion.choices]
    values = [entry.logprob for choice in choices for entry in choice.logprobs]
    outputs = [choice.token_ids for choice in choices]
    return Outcome(
        setting,
        tuple(c.text for c in done),
        sum(map(len, outputs)),
        sum(values) / len(values) if values else 0.0,
        sum(map(repetition, outputs)) / len(outputs),
        distinct(outputs),
        sum(choice.loop > 0 for choice in choices),
        sum(c.token_ids == ids for c, ids in zip(done, first, strict=True)),
        seconds,
        tuple(c.finish_reason for c in done),
        tuple(c.seed for c in done),
        done[0].fingerprint,
    )


Part = tuple[str, bool]  # text, and whether it differs from the first setting's text


def differences(first: str, other: str) -> list[Part]:
    """`other` in pieces, each marked if it differs from `first`. Compared word by word.

    >>> differences("a red cat", "a blue cat")
    [('a ', False), ('blue', True), (' cat', False)]
    """
    a, b = re.findall(r"\s+|\S+", first), re.findall(r"\s+|\S+", other)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    parts = [
        ("".join(b[low:high]), kind != "equal")
        for kind, _, _, low, high in matcher.get_opcodes()
        if high > low
    ]
    merged: list[Part] = []
    for at, (text, differs) in enumerate(parts):
        between = 0 < at < len(parts) - 1 and not text.strip()
        differs = differs or between  # a space between two differences is part of them
        if merged and merged[-1][1] == differs:
            merged[-1] = (merged[-1][0] + text, differs)
        else:
            merged.append((text, differs))
    return merged
