"""`verbatim drift`: exposure bias made visible. A model that reads its own output drifts away from
the texts it was trained on: greedy text becomes ever more certain and loops, sampled text wanders.

In: a prompt and a given text. Out: three Series of log-probability and entropy per token: the given
text, teacher-forced (the model reads the true tokens), and two free-running texts (it reads its
own): greedy, and sampled with a seed. All numbers are of the model's own distribution, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verbatim.base.defaults import NO_DEFAULTS, resolve
from verbatim.base.params import SamplingParams
from verbatim.base.records import Choice
from verbatim.diagnose.statistics import repetition
from verbatim.engine.loop_detector import MIN_TOKENS, loop_length
from verbatim.engine.step.failed_step import raise_error

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM

# The opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865; public domain).
GIVEN = """Alice was beginning to get very tired of sitting by her sister on the bank, and of \
having nothing to do: once or twice she had peeped into the book her sister was reading, but it \
had no pictures or conversations in it, "and what is the use of a book," thought Alice "without \
pictures or conversations?" So she was considering in her own mind (as well as she could, for the \
hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would \
be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink \
eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so \
very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" \
(when she thought it over afterwards, it occurred to her that she ought to have wondered at this, \
but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its \
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed \
across her mind that she had never before seen a rabbit with either a waistcoat-pocket, or a watch \
to take out of it, and burning with curiosity, she ran across the field after it, and fortunately \
was just in time to see it pop down a large rabbit-hole under the hedge."""


@dataclass(frozen=True, slots=True)
class Series:
    """One text, token by token. `loop_at`: tokens after which the loop detector found a loop of
    `loop` tokens; None if it found none."""

    name: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    loop_at: int | None = None
    loop: int = 0

    @property
    def repetition(self) -> float:
        return repetition(self.token_ids)

    def mean(self, values: Sequence[float], part: int, parts: int = 3) -> float:
        """Mean of one of `parts` equal parts of the text: 0 is its beginning."""
        low, high = len(values) * part // parts, len(values) * (part + 1) // parts
        chosen = values[low:high]
        return sum(chosen) / len(chosen) if chosen else 0.0


def measure_drift(
    llm: LLM,
    start: Sequence[int],
    given: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    context: int = 0,
) -> list[Series]:
    """Free-running texts of `tokens` tokens after `start`, and `given`, teacher-forced. The first
    `context` tokens of `given` are only read."""
    base = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, explain=1)
    settings = [base, base.with_(temperature=temperature, seed=seed)]
    # the whole distribution, without the filters and penalties that the model recommends
    free = llm.generate([list(start)] * 2, [resolve(p, NO_DEFAULTS) for p in settings])
    raise_error(free)
    forced = _forced(llm, list(given), max(1, context), tokens)
    names = ("greedy", f"T = {temperature:g}")
    return [forced, *(_free(name, done.choices[0]) for name, done in zip(names, free, strict=True))]


def _free(name: str, choice: Choice) -> Series:
    at, period = find_loop(choice.token_ids)
    return Series(
        f"free-running, {name}",
        choice.text,
        choice.token_ids,
        tuple(entry.logprob for entry in choice.logprobs),
        tuple(float(record["entropy"]) for record in choice.explain),
        at,
        period,
    )


def _forced(llm: LLM, ids: list[int], context: int, tokens: int) -> Series:
    """Log-probabilities from one scoring pass; entropies from one request per position, which the
    prefix cache makes cheap: the pass before has filled it."""
    ids = ids[: context + tokens]
    score = llm.score(ids)
    probe = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, explain=1)
    places = range(context, len(ids))
    done = llm.generate([ids[:at] for at in places], probe) if places else []
    raise_error(done)
    chosen = ids[context:]
    at, period = find_loop(chosen)
    return Series(
        "teacher-forced text",
        llm.tokenizer.decode(chosen),
        tuple(chosen),
        tuple(row.logprob for row in score.logprobs[context:] if row is not None),
        tuple(float(c.choices[0].explain[0]["entropy"]) for c in done),
        at,
        period,
    )


def find_loop(tokens: Sequence[int]) -> tuple[int | None, int]:
    """(tokens after which the loop detector first finds a loop, its length), or (None, 0)."""
    for end in range(MIN_TOKENS, len(tokens) + 1):
        if period := loop_length(tokens[:end]):
            return end, period
    return None, 0


def smooth(values: Sequence[float], window: int) -> tuple[float, ...]:
    """Mean of the last `window` values at each place (fewer at the beginning)."""
    out, total = [], 0.0
    for at, value in enumerate(values):
        total += value - (values[at - window] if at >= window else 0.0)
        out.append(total / min(at + 1, window))
    return tuple(out)
