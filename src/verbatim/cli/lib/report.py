"""Reports about a completion: the closing line of the terminal, and the JSON object of --json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from verbatim.base.defaults import report
from verbatim.base.json_io import JsonObject
from verbatim.base.params import STRUCTURE
from verbatim.base.records import Choice, Completion, Finish, TokenLogprob, loop_text

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM


def finish_text(finish: Finish | None) -> str:
    if finish is None:
        return "cancel"
    return f"{finish.reason} ({finish.detail})" if finish.detail else finish.reason


def closing_line(llm: LLM, completion: Completion, *, limit: float | None = None) -> str:
    """Tokens, time to first token, tokens per second (beside this machine's limit if `verbatim
    bench` measured it), drafts, finish reason, backend and seed, in one line."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.prompt_tokens} prompt + {usage.output_tokens} output tokens"]
    if usage.cached_tokens:
        parts[0] += f" ({usage.cached_tokens} from the prefix cache)"
    if usage.reasoning_tokens:
        parts[0] += f", {usage.reasoning_tokens} of them reasoning"
    if usage.output_tokens:
        parts.append(f"first token {timings.first_token:.2f} s")
    rate = timings.decode_rate(usage.output_tokens)
    if rate:
        possible = f" of {limit:.0f} possible" if limit and rate <= limit else ""
        parts.append(f"{rate:.1f} tokens per second{possible}")
    if usage.drafted_tokens:
        effect = f", {abs(timings.saved):.2f} s {'saved' if timings.saved > 0 else 'lost'}"
        effect = effect if abs(timings.saved) >= 0.005 else ""
        detail = f" ({usage.mean_accepted_length:.1f} tokens per step{effect})"
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted{detail}")
    ends = dict.fromkeys(finish_text(choice.finish) for choice in completion.choices)
    parts.append("; ".join(ends))
    parts.append(backend_text(llm))
    if is_sampled(completion):
        parts.append(f"seed {completion.seed}")
    return " · ".join(parts)


def short_line(completion: Completion) -> str:
    """Tokens, time and speed in a few words, and the finish reason unless the model ended it."""
    usage, timings = completion.usage, completion.timings
    parts = [_tokens(usage.output_tokens), f"{timings.total:.1f} s"]
    if rate := timings.decode_rate(usage.output_tokens):
        parts.append(f"{rate:.1f} tokens per second")
    if completion.finish != Finish("stop", "eos"):
        parts.append(finish_text(completion.finish))
    return " · ".join(parts)


def is_sampled(completion: Completion) -> bool:
    """Whether the seed decided anything."""
    params = completion.params
    return params is not None and not params.greedy and not _has_beams(completion)


def _has_beams(completion: Completion) -> bool:
    """Whether the answer is that of a beam search, which has no seed."""
    return completion.params is not None and completion.params.num_beams > 1


def params_in_force(completion: Completion) -> dict[str, JsonObject]:
    """Name -> value and origin of each parameter in force."""
    assert completion.params is not None, "the engine reports the parameters"
    return report(completion.params, completion.seed)


def params_line(completion: Completion) -> str:
    """The parameters in force and where each came from, in one line (--verbose, /stats)."""
    rows = params_in_force(completion).items()
    return " · ".join(f"{name} {_value(row['value'])} ({row['origin']})" for name, row in rows)


def _value(value: object) -> str:
    if value is None:
        return "unlimited"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def length_line(completion: Completion) -> str | None:
    """The notice about an answer that a limit cut; None without one."""
    cut = [choice for choice in completion.choices if choice.finish.reason == "length"]
    if not cut:
        return None
    if cut[0].finish.detail == "context":
        sizes = f"{len(completion.prompt_ids)} prompt + {len(cut[0].token_ids)} output tokens"
        return f"the answer was cut where the context ends ({sizes})"
    allowed = completion.params.max_tokens if completion.params else len(cut[0].token_ids)
    if cut[0].reasoning and not cut[0].text:
        return (
            f"the reasoning was cut after {_tokens(allowed or 0)}, so there is no answer; a larger "
            "--max-tokens allows more, --thinking-budget limits the reasoning"
        )
    return f"the answer was cut after {_tokens(allowed or 0)}; a larger --max-tokens allows more"


def broken_structure(completion: Completion) -> str | None:
    """Why structured output is not complete, and so not valid; None if every answer is.

    An answer is complete when its grammar allows the end: by the grammar itself, or by the model's
    end-of-sequence token, which the grammar masks elsewhere."""
    params = completion.params
    if params is None or not params.structured:
        return None
    field = next(name for name in STRUCTURE if getattr(params, name) is not None)
    for choice in completion.choices:
        finish = choice.finish
        if finish.reason == "stop" and finish.detail in (field, "eos"):
            continue
        why = {
            "length": "it was cut at the context's end"
            if finish.detail == "context"
            else f"it was cut after {_tokens(len(choice.token_ids))}; allow more with --max-tokens",
            "loop": f"its end repeats {loop_text(choice.loop)}, and it was stopped; another "
            "--seed, or a schema with maxLength and maxItems, may help",
            "stop": "a stop string or token ended it; leave out --stop and --stop-token-ids",
            "cancel": "it was interrupted",
            "error": finish.detail,
        }[finish.reason]
        return f"{field}: the answer is not complete: {why}"
    return None


def error_text(completion: Completion) -> str | None:
    """The error of the first answer that ended with one."""
    finishes = [choice.finish for choice in completion.choices]
    return next((finish.detail for finish in finishes if finish.reason == "error"), None)


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count != 1 else ''}"


def choice_head(choice: Choice, *, several: bool) -> str:
    """`[2] (-0.3172) `: the number of the answer, and its ranking score if it has one."""
    score = "" if choice.score is None else f"({choice.score:.4f}) "
    return (f"[{choice.index + 1}] " if several else "") + score


def backend_text(llm: LLM) -> str:
    info = llm.loaded.backend.info
    threads = f", {info.threads} threads" if info.threads > 1 else ""
    return f"{info.name} {info.detail}".strip() + threads


# Members of the first choice that are at the top level.
FIRST = ("text", "reasoning", "tokens", "finish_reason", "finish_detail")


def completion_json(llm: LLM, completion: Completion, notices: Sequence[str] = ()) -> JsonObject:
    """The object that --json prints. The first answer is at the top level; with several answers,
    `choices` holds all of them."""
    first, usage = choice_json(completion.choices[0]), completion.usage
    derived = ("total_tokens", "mean_accepted_length")
    info = llm.loaded.backend.info
    note = {"note": info.note} if info.note else {}
    rate = completion.timings.decode_rate(completion.usage.output_tokens)
    out: JsonObject = {
        **{name: first[name] for name in FIRST if name in first},
        "usage": {**asdict(usage), **{name: getattr(usage, name) for name in derived}},
        "seed": None if _has_beams(completion) else completion.seed,
        "params": report(completion.params, completion.seed) if completion.params else {},
        "timings": {**asdict(completion.timings), "tokens_per_second": rate},
        "model": llm.loaded.name,
        "backend": {"name": info.name, "detail": info.detail, "numerics": info.numerics, **note},
        "fingerprint": completion.fingerprint,
        "warnings": [*llm.warnings, *notices, *completion.warnings],
        "prompt_token_ids": list(completion.prompt_ids),
    }
    for key in ("logprobs", "explain"):
        if first.get(key):
            out[key] = first[key]
    if len(completion.choices) > 1:
        out["choices"] = [choice_json(choice) for choice in completion.choices]
    if completion.prompt_logprobs:
        out["prompt_logprobs"] = token_logprobs(completion.prompt_logprobs)
    if completion.receipt is not None:
        out["receipt"] = completion.receipt
    return out


def choice_json(choice: Choice) -> JsonObject:
    out: JsonObject = {
        "index": choice.index,
        "text": choice.text,
        **({"reasoning": choice.reasoning} if choice.reasoning else {}),
        "tokens": list(choice.token_ids),
        "finish_reason": choice.finish.reason,
        "finish_detail": choice.finish.detail,
    }
    if choice.logprobs:
        out["logprobs"] = token_logprobs(choice.logprobs)
    if choice.explain:
        out["explain"] = list(choice.explain)
    if choice.score is not None:
        out["score"] = choice.score
    if choice.loop:
        out["loop"] = choice.loop
    return out


def token_logprobs(rows: Iterable[TokenLogprob | None]) -> list[JsonObject | None]:
    return [
        None
        if row is None
        else {"token": row.token, "logprob": row.logprob, "top": [list(pair) for pair in row.top]}
        for row in rows
    ]
