"""What every generating handler shares: deltas of one choice merged into pieces, whole choices, usage, log-probabilities in OpenAI's shapes.

In: Running requests. Out: Piece after Piece for streams, Whole for answers; the protocols' files only spell them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.server.call import Call
from verbatim.server.problems import Problem
from verbatim.server.running import Running

FLOOR = -9999.0  # OpenAI's spelling of "impossible": JSON has no minus infinity


@dataclass(slots=True)
class Piece:
    """What one choice gained since the last piece. run: which prompt of the request."""

    run: int
    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    explain: list[Any] = field(default_factory=list)
    finish: tuple[str, str] | None = None


async def pieces(call: Call) -> AsyncIterator[Piece | None]:
    """Pieces of all choices until every run ended; None: nothing for a while, send a keep-alive. Raises the Problem of a run that failed,
    and ends silently when the client has gone. What piled up while the client did not read comes as one piece a choice."""
    runs, last = call.runs, time.monotonic()
    quiet = call.state.settings.keepalive_seconds
    while True:
        ended = all(run.ended for run in runs)
        found = False
        for number, run in enumerate(runs):
            for piece in _merged(number, run.take()):
                found = True
                yield piece
            if run.closed:
                return
            if run.problem is not None:
                raise run.problem
        if ended:
            return
        now = time.monotonic()
        if found:
            call.state.metrics.between_tokens.add(now - last)
            last = now
        elif now - last >= quiet:
            yield None
            last = now
        await call.signal.wait()


def _merged(run: int, deltas: Sequence[Sequence[Any]]) -> list[Piece]:
    if len(deltas) == 1:  # by far the most frequent: one token, as soon as it is there
        index, text, finish, ids, logprobs, explain = deltas[0]
        return [Piece(run, index, text, ids, logprobs, explain, tuple(finish) if finish is not None else None)]
    out: dict[int, Piece] = {}
    for index, text, finish, ids, logprobs, explain in deltas:
        piece = out.setdefault(index, Piece(run, index))
        piece.text += text
        piece.ids += ids
        piece.logprobs += logprobs
        piece.explain += explain
        piece.finish = tuple(finish) if finish is not None else piece.finish
    return list(out.values())


def finish_reason(finish: Sequence[str] | None) -> str | None:
    """Ours to OpenAI's. A loop that was stopped by request is a stop. An error is the request's own (bans and a grammar that leave nothing to
    draw, for instance): one of the engine's would have ended the engine."""
    if finish is None:
        return None
    reason = finish[0]
    if reason == "error":
        raise Problem("invalid_request", finish[1] or "the request could not be carried out")
    return {"loop": "stop", "cancel": "stop"}.get(reason, reason)


def usage_of(runs: Sequence[Running]) -> dict[str, Any]:
    """Summed over the prompts of one request, with what the cache and the drafts saved."""
    sums = [sum(column) for column in zip(*(run.done["usage"] for run in runs if run.done is not None), strict=True)] or [0] * 5
    prompt, output, cached, drafted, accepted = sums
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def extras(runs: Sequence[Running]) -> dict[str, Any]:
    """Our own members at an answer's end: warnings and receipts where there are any."""
    done = [run.done for run in runs if run.done is not None]
    out: dict[str, Any] = {}
    warnings = sorted({w for d in done for w in d["warnings"]})
    if warnings:
        out["warnings"] = warnings
    receipts = [d["receipt"] for d in done if d["receipt"] is not None]
    if receipts:
        out["receipt"] = receipts[0] if len(receipts) == 1 else receipts
    return out


def observe(call: Call) -> None:
    metrics, now = call.state.metrics, time.monotonic()
    metrics.duration.add(now - call.arrived)
    for run in call.runs:
        if run.done is not None and "timings" in run.done and run.done["choices"]:
            metrics.first_token.add(run.done["timings"][1])


# -------------------------------------------------------------------------------------------------------- logprobs


def spelled(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def floor(value: float) -> float:
    return max(value, FLOOR)


def chat_logprobs(items: Sequence[Any], top: int) -> dict[str, Any]:
    def one(raw: bytes, logprob: float) -> dict[str, Any]:
        return {"token": spelled(raw), "logprob": floor(logprob), "bytes": list(raw)}

    content = [
        {**one(raw, lp), "top_logprobs": [one(r, p) for _, p, r in best[:top]]} for _, lp, raw, best in items
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def completion_logprobs(items: Sequence[Any], top: int, offset: int) -> tuple[dict[str, Any], int]:
    """The older shape: four parallel lists. Returns the offset after the last token, in characters."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for item in items:
        offsets.append(offset)
        if item is None:  # the prompt's first token
            tokens.append("")
            values.append(None)
            tops.append(None)
            continue
        _, logprob, raw, best = item
        text = spelled(raw)
        tokens.append(text)
        values.append(floor(logprob))
        tops.append({spelled(r): floor(p) for _, p, r in best[:top]} if top else None)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops if top else None, "text_offset": offsets}, offset


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def obfuscation(text: str) -> str:
    """Padding to a multiple of 16 characters, so that the sizes of encrypted packets say less about the words."""
    return "".join(secrets.choice(ALPHABET) for _ in range(-len(text) % 16))
