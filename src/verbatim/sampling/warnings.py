"""Warnings about sampling parameters that contradict each other, are risky or have no effect.

In: SamplingParams. Out: sentences; no parameter is changed. The engine puts them into
Completion.warnings; the command line prints them.
"""

from __future__ import annotations

from collections.abc import Iterator

from verbatim.base.params import FIELDS, FILTERS, STRUCTURE, SamplingParams

PENALTIES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry_multiplier",
    "no_repeat_ngram",
)


def warnings_for(params: SamplingParams) -> tuple[str, ...]:
    """One sentence per warning."""
    return (*_draws(params), *_penalties(params), *_structure(params), *_without_effect(params))


def _set(params: SamplingParams, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(params, name) != FIELDS[name].default]


def _draws(p: SamplingParams) -> Iterator[str]:
    many = max(p.n, p.best_of or 1)
    if p.greedy and many > 1 and p.num_beams == 1:
        name = "n" if p.n > 1 else "best_of"
        yield f"temperature 0 with {name}={many}: all answers will be equal"
    if p.greedy and (filters := _set(p, FILTERS)):
        yield f"temperature 0 takes the most likely token: {', '.join(filters)} has no effect"
    if p.temperature > 1.2 and p.top_p < 0.5:
        yield (
            f"temperature {p.temperature:g} flattens the distribution and top_p {p.top_p:g} "
            "cuts it again; one of them is enough"
        )
    if p.temperature > 2.0 and not _set(p, FILTERS):
        yield (
            f"temperature {p.temperature:g} without a filter (top_p, min_p, top_k) "
            "draws mostly noise"
        )
    if p.xtc_probability > 0 and p.xtc_threshold > 0.5:
        yield (
            f"xtc_threshold {p.xtc_threshold:g}: no two tokens are that likely at once, "
            "so XTC never acts"
        )
    if p.top_k == 1 and p.xtc_probability == 0 and not p.greedy:
        yield "top_k 1 leaves one token: the same as temperature 0"


def _penalties(p: SamplingParams) -> Iterator[str]:
    if p.repetition_penalty > 1.3:
        yield (
            f"repetition_penalty {p.repetition_penalty:g} is over 1.3: "
            "common words and punctuation will go missing"
        )
    if p.repetition_penalty < 1.0:
        yield f"repetition_penalty {p.repetition_penalty:g} is under 1: it rewards repetition"
    if p.no_repeat_ngram in (1, 2):
        what = "token" if p.no_repeat_ngram == 1 else "pair of tokens"
        yield f"no_repeat_ngram {p.no_repeat_ngram} forbids any {what} twice, prompt included"


def _structure(p: SamplingParams) -> Iterator[str]:
    named = next((f for f in STRUCTURE if getattr(p, f) is not None), None)
    if named is None:
        return
    if penalties := _set(p, PENALTIES):
        yield (
            f"{', '.join(penalties)} with {named}: braces, quotes and repeated keys are penalised "
            "too, which bends the answer"
        )
    if p.stop or p.stop_token_ids:
        yield (
            f"a stop string or token with {named} may end the answer "
            "before the structure is complete"
        )
    if p.min_tokens:
        yield f"min_tokens with {named}: the answer still ends where the structure does"
    if p.ignore_eos:
        yield f"ignore_eos with {named}: the answer still ends where the structure does"


def _without_effect(p: SamplingParams) -> Iterator[str]:
    if not p.dry_multiplier and (
        names := _set(p, ("dry_base", "dry_allowed_length", "dry_range", "dry_breakers"))
    ):
        yield f"{', '.join(names)} without dry_multiplier has no effect"
    if p.penalty_range and not _set(p, PENALTIES[:3]):
        yield "penalty_range without a repetition, frequency or presence penalty has no effect"
    if not p.xtc_probability and _set(p, ("xtc_threshold",)):
        yield "xtc_threshold without xtc_probability has no effect"
    if p.include_stop and not p.stop and not p.stop_token_ids and p.skip_special:
        yield "include_stop without stop has no effect"
    if p.logprobs_mode != "raw" and p.logprobs is None and p.best_of is None:
        yield "logprobs_mode without logprobs has no effect"
