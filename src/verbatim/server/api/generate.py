"""What every generating handler shares: deltas of one choice merged into pieces, whole choices, usage, log-probabilities in OpenAI's shapes.

In: Running requests. Out: Piece after Piece for streams, Whole for answers; the protocols' files only spell them.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from verbatim.base.records import Usage
from verbatim.server.api.request_context import Call
from verbatim.server.api.to_params import check_finish
from verbatim.server.process.messages import (
    Generated,
    ModelFacts,
    TopLogprob,
    WireDelta,
    WireFinish,
    WireLogprob,
)
from verbatim.server.process.running import Running
from verbatim.text.decode import TextDecoder

FLOOR = -9999.0  # OpenAI's spelling of "impossible": JSON has no minus infinity


@dataclass(slots=True)
class Piece:
    """What one choice gained since the last piece. run: which prompt of the request."""

    run: int
    index: int
    text: str = ""
    logprobs: Sequence[WireLogprob] = ()
    explain: Sequence[dict[str, Any]] = ()
    finish: WireFinish | None = None


async def pieces(call: Call) -> AsyncIterator[Piece | None]:
    """Pieces of all choices until every run ended; None: nothing for a while, send a keep-alive. Raises the Problem of a run that failed,
    and ends silently when the client has gone. What piled up while the client did not read comes as one piece a choice."""
    runs, last = call.runs, call.state.clock()
    quiet = call.state.settings.keepalive_seconds
    while True:
        ended = all(run.ended for run in runs)
        found = False
        for number, run in enumerate(runs):
            for piece in _merged(number, run.take()):
                found = True
                finish, piece.finish = piece.finish, None if _failed(piece.finish) else piece.finish
                yield piece
                check_finish(finish, call.names)
            if run.closed:
                return
            if run.problem is not None:
                raise run.problem
        if ended:
            return
        now = call.state.clock()
        if found:
            call.state.metrics.between_tokens.observe(now - last)
            last = now
        elif now - last >= quiet:
            yield None
            last = now
        await call.signal.wait()


def _merged(run: int, deltas: Sequence[WireDelta]) -> list[Piece]:
    if len(deltas) == 1:  # by far the most frequent: the client reads as fast as tokens come
        _, index, text, _, finish, logprobs, explain = deltas[0]
        return [Piece(run, index, text, logprobs, explain, finish)]
    out: dict[int, Piece] = {}
    for delta in deltas:
        piece = out.setdefault(delta.choice, Piece(run, delta.choice))
        piece.text += delta.text
        piece.logprobs = [*piece.logprobs, *delta.logprobs]
        piece.explain = [*piece.explain, *delta.explain]
        piece.finish = delta.finish or piece.finish
    return list(out.values())


def finish_reason(finish: WireFinish | None) -> str | None:
    """OpenAI's name of a finish reason. A loop that was stopped by request is a stop. An error has
    been raised before (asks.check_finish)."""
    if finish is None:
        return None
    assert not _failed(finish)
    return {"loop": "stop", "cancel": "stop"}.get(finish.reason, finish.reason)


def _failed(finish: WireFinish | None) -> bool:
    return finish is not None and finish.reason == "error"


def _generated(runs: Sequence[Running]) -> list[Generated]:
    """The results so far."""
    return [done for run in runs if (done := run.generated) is not None]


def usage_of(runs: Sequence[Running]) -> dict[str, Any]:
    """Summed over the prompts of one request, with what the prefix cache and the drafts saved."""
    results = _generated(runs)
    usage = Usage(*map(sum, zip(*(astuple(done.usage) for done in results), strict=True)))
    saved = sum(done.timings.saved for done in results)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "mean_accepted_length": round(usage.mean_accepted_length, 3),
            "saved_seconds": round(saved, 6),
        },
    }


def speculation(runs: Sequence[Running]) -> dict[str, Any]:
    """For the protocols whose usage has no place for drafts; nothing where nothing was drafted."""
    told = usage_of(runs)["completion_tokens_details"]
    accepted, rejected = told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]
    if not accepted + rejected:
        return {}
    rest = {name: told[name] for name in ("mean_accepted_length", "saved_seconds")}
    return {
        "speculation": {"drafted_tokens": accepted + rejected, "accepted_tokens": accepted, **rest}
    }


def extras(runs: Sequence[Running]) -> dict[str, Any]:
    """Our own members at an answer's end: warnings and receipts where there are any."""
    results = _generated(runs)
    out: dict[str, Any] = {}
    warnings = sorted({warning for done in results for warning in done.warnings})
    if warnings:
        out["warnings"] = warnings
    receipts = [done.receipt for done in results if done.receipt is not None]
    if receipts:
        out["receipt"] = receipts[0] if len(receipts) == 1 else receipts
    return out


def observe(call: Call) -> None:
    metrics, now = call.state.metrics, call.state.clock()
    metrics.duration.observe(now - call.arrived)
    for done in _generated(call.runs):
        if done.choices:
            metrics.first_token.observe(done.timings.first_token)


# -------------------------------------------------------------------------------------------------------- logprobs


def spelled(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def floor(value: float) -> float:
    return max(value, FLOOR)


def chat_logprobs(items: Sequence[WireLogprob], top: int) -> list[dict[str, Any]]:
    """Log-probabilities as chat completions and responses spell them. Not for a prompt's first
    token, which has none."""

    def one(raw: bytes, logprob: float) -> dict[str, Any]:
        return {"token": spelled(raw), "logprob": floor(logprob), "bytes": list(raw)}

    out = []
    for item in items:
        assert item.logprob is not None
        assert item.top is not None
        best = [one(raw, logprob) for _, logprob, raw in item.top[:top]]
        out.append({**one(item.raw, item.logprob), "top_logprobs": best})
    return out


class Places:
    """Where in a text its tokens begin, in characters. The text was decoded by text/decode.py, and so are the tokens again: a character that is
    spread over tokens counts once, for the token that completes it, and a control token that is not shown counts nothing."""

    def __init__(self, facts: ModelFacts, skip_special: bool, *, start: bool = False) -> None:
        self.at = 0
        self.unseen = 0  # so many tokens were put before the text
        self.space_prefix = facts.space_prefix
        self._control = facts.control
        self._raw = b""
        self._decoder = TextDecoder(self, skip_special, start=start)

    def token_bytes(self, token: int) -> bytes:
        return self._raw

    def is_control(self, token: int) -> bool:
        return token in self._control

    def place(self, token: int, raw: bytes) -> int:
        at, self._raw = self.at, raw
        if self.unseen:
            self.unseen -= 1
            return at
        self.at += len(self._decoder.push(token))
        return at


def completion_logprobs(items: Sequence[WireLogprob], top: int, places: Places) -> dict[str, Any]:
    """The older shape: four parallel lists."""
    return {
        "tokens": [spelled(item.raw) for item in items],
        "token_logprobs": [None if item.logprob is None else floor(item.logprob) for item in items],
        "top_logprobs": [_best(item.top, top) for item in items] if top else None,
        "text_offset": [places.place(item.token, item.raw) for item in items],
    }


def _best(best: Sequence[TopLogprob] | None, top: int) -> dict[str, float] | None:
    """None: the first token of a prompt, which has no alternatives."""
    return (
        None if best is None else {spelled(raw): floor(logprob) for _, logprob, raw in best[:top]}
    )


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def obfuscation(text: str) -> str:
    """Padding to a multiple of 16 characters, so that the sizes of encrypted packets say less about the words."""
    return "".join(secrets.choice(ALPHABET) for _ in range(-len(text) % 16))
