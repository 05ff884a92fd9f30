"""Shared by all generating handlers: merged stream deltas, usage, log-probabilities.

In: the `Running` requests of one HTTP request. Out: a stream of `ChoiceDelta`, and dicts in
OpenAI's shapes. The protocol modules only format these.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass

from verbatim.base.json_io import JsonObject
from verbatim.base.records import Usage
from verbatim.server.api.common.request_context import RequestContext
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

FLOOR = -9999.0  # OpenAI's log-probability of an impossible token; JSON has no -inf


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice since its last delta. `run` is the index of the prompt."""

    run: int
    index: int
    text: str = ""
    logprobs: Sequence[WireLogprob] = ()
    explain: Sequence[JsonObject] = ()
    finish: WireFinish | None = None
    tokens: int = 0
    reasoning: str = ""
    reasoning_tokens: int = 0  # share of `tokens`


async def choice_deltas(call: RequestContext) -> AsyncIterator[ChoiceDelta | None]:
    """Yield deltas of all choices until every run has ended.

    None means that nothing arrived for a keep-alive interval. Deltas that queue up while the client
    does not read are merged, one per choice. Raises the Problem of a run that failed; ends silently
    when the client has disconnected."""
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
                call.check_finish(finish)
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


def _merged(run: int, deltas: Sequence[WireDelta]) -> list[ChoiceDelta]:
    if len(deltas) == 1:  # the common case: the client keeps up
        _, at, text, ids, finish, logprobs, explain, reasoning, count = deltas[0]
        tokens = len(ids)
        return [ChoiceDelta(run, at, text, logprobs, explain, finish, tokens, reasoning, count)]
    out: dict[int, ChoiceDelta] = {}
    for delta in deltas:
        piece = out.setdefault(delta.choice, ChoiceDelta(run, delta.choice))
        piece.text += delta.text
        piece.reasoning += delta.reasoning
        piece.reasoning_tokens += delta.reasoning_tokens
        piece.logprobs = [*piece.logprobs, *delta.logprobs]
        piece.explain = [*piece.explain, *delta.explain]
        piece.finish = delta.finish or piece.finish
        piece.tokens += len(delta.token_ids)
    return list(out.values())


def finish_reason(finish: WireFinish | None) -> str | None:
    """OpenAI's name of a finish reason. `check_finish` has already raised for an error."""
    if finish is None:
        return None
    assert not _failed(finish)
    # A loop is cut, so the output is not complete: "length", as for every other limit.
    return {"loop": "length", "cancel": "stop"}.get(finish.reason, finish.reason)


def _failed(finish: WireFinish | None) -> bool:
    return finish is not None and finish.reason == "error"


def _generated(runs: Sequence[Running]) -> list[Generated]:
    """The results of the runs that have ended."""
    return [done for run in runs if (done := run.generated) is not None]


def usage_of(runs: Sequence[Running]) -> JsonObject:
    """Usage summed over the prompts of one request, with prefix-cache and draft savings."""
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
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "mean_accepted_length": round(usage.mean_accepted_length, 3),
            "saved_seconds": round(saved, 6),
        },
    }


class RunningUsage:
    """Usage so far, for the chunks of a stream (stream_options.continuous_usage_stats)."""

    def __init__(self, runs: Sequence[Running]) -> None:
        self._runs = runs
        self._output = 0

    def after(self, piece: ChoiceDelta) -> dict[str, int]:
        self._output += piece.tokens
        prompt = sum(run.prompt_tokens for run in self._runs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._output,
            "total_tokens": prompt + self._output,
        }


def speculation(runs: Sequence[Running]) -> JsonObject:
    """Draft statistics for protocols whose usage object has none; empty if nothing was drafted."""
    details = usage_of(runs)["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    rejected = details["rejected_prediction_tokens"]
    if not accepted + rejected:
        return {}
    rest = {name: details[name] for name in ("mean_accepted_length", "saved_seconds")}
    counts = {"drafted_tokens": accepted + rejected, "accepted_tokens": accepted}
    return {"speculation": {**counts, **rest}}


def warnings_of(call: RequestContext) -> dict[str, list[str]]:
    """`warnings` of a response, if any. Every response of every protocol has them, and the last
    part of every stream."""
    results = [run.done for run in call.runs]
    lines = {line for done in results for line in getattr(done, "warnings", ())}
    found = sorted(set(map(call.in_client_names, lines)))
    found += call.notices
    return {"warnings": found} if found else {}


def extra_fields(call: RequestContext) -> JsonObject:
    """Verbatim's extra fields at the end of a response: warnings, parameters and receipts, if
    any."""
    results = _generated(call.runs)
    out: JsonObject = warnings_of(call)
    if results and results[0].params:  # the client asked for it; all prompts share them
        out["params"] = results[0].params
    receipts = [done.receipt for done in results if done.receipt is not None]
    if receipts:
        out["receipt"] = receipts[0] if len(receipts) == 1 else receipts
    return out


def observe_latency(call: RequestContext) -> None:
    metrics, now = call.state.metrics, call.state.clock()
    metrics.duration.observe(now - call.arrived)
    for done in _generated(call.runs):
        if done.choices:
            metrics.first_token.observe(done.timings.first_token)


# -------------------------------------------------------------------------------- logprobs


def token_text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def unique_name(raw: bytes) -> str:
    """The text of a token, or OpenAI's name of a part of a character: bytes:\\xe2\\x82. In
    /v1/completions the names are keys, and as text all parts would be U+FFFD."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def floor(value: float) -> float:
    return max(value, FLOOR)


def chat_logprobs(items: Sequence[WireLogprob], top: int) -> list[JsonObject]:
    """Log-probabilities in the shape of chat completions and responses. Not for the first prompt
    token, which has none."""

    def one(raw: bytes, logprob: float) -> JsonObject:
        return {"token": token_text(raw), "logprob": floor(logprob), "bytes": list(raw)}

    out = []
    for item in items:
        assert item.logprob is not None
        assert item.top is not None
        best = [one(raw, logprob) for _, logprob, raw in item.top[:top]]
        out.append({**one(item.raw, item.logprob), "top_logprobs": best})
    return out


class TokenOffsets:
    """Character offset at which each token starts in the output text.

    Decodes the tokens again with text/decode.py, as the output was. A character that spans several
    tokens counts for the token that completes it; a hidden control token has length 0."""

    def __init__(self, facts: ModelFacts, skip_special: bool, *, start: bool = False) -> None:
        self.at = 0
        self.unseen = 0  # number of leading tokens that are not in the text
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


def completion_logprobs(items: Sequence[WireLogprob], top: int, places: TokenOffsets) -> JsonObject:
    """The shape of /v1/completions: four parallel lists."""
    return {
        "tokens": [unique_name(item.raw) for item in items],
        "token_logprobs": [None if item.logprob is None else floor(item.logprob) for item in items],
        "top_logprobs": [_best(item.top, top) for item in items] if top else None,
        "text_offset": [places.place(item.token, item.raw) for item in items],
    }


def _best(best: Sequence[TopLogprob] | None, top: int) -> dict[str, float] | None:
    """None for the first token of a prompt, which has no alternatives."""
    if best is None:
        return None
    found: dict[str, float] = {}
    for _, logprob, raw in best[:top]:
        found.setdefault(unique_name(raw), floor(logprob))  # equal names: the most likely stays
    return found


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def obfuscation(text: str) -> str:
    """Padding to a multiple of 16 characters, so that packet sizes reveal less about the text."""
    return "".join(secrets.choice(ALPHABET) for _ in range(-len(text) % 16))
