"""What every generating handler shares: deltas of one choice merged into pieces, whole choices, usage, log-probabilities in OpenAI's shapes.

In: Running requests. Out: Piece after Piece for streams, Whole for answers; the protocols' files only spell them.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.base.records import Usage
from verbatim.server.asks import check_finish
from verbatim.server.call import Call
from verbatim.server.running import Running
from verbatim.text.decode import TextDecoder

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
    finish: tuple[Any, ...] | None = None  # reason, detail, and what jobs.spelled_finish adds


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


def finish_reason(finish: Sequence[Any] | None) -> str | None:
    """Ours to OpenAI's. A loop that was stopped by request is a stop. An error was raised before anybody asks here (asks.check_finish)."""
    if finish is None:
        return None
    assert not _failed(finish)
    reason: str = finish[0]
    return {"loop": "stop", "cancel": "stop"}.get(reason, reason)


def _failed(finish: Sequence[Any] | None) -> bool:
    return finish is not None and finish[0] == "error"


def usage_of(runs: Sequence[Running]) -> dict[str, Any]:
    """Summed over the prompts of one request, with what the cache and the drafts saved."""
    sums = [sum(column) for column in zip(*(run.done["usage"] for run in runs if run.done is not None), strict=True)] or [0] * 5
    prompt, output, cached, drafted, accepted = sums
    saved = sum(run.done["timings"][4] for run in runs if run.done is not None)
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
            "mean_accepted_length": round(Usage(*sums).mean_accepted_length, 3),
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
    return {"speculation": {"drafted_tokens": accepted + rejected, "accepted_tokens": accepted, **rest}}


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
    metrics, now = call.state.metrics, call.state.clock()
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


class Places:
    """Where in a text its tokens begin, in characters. The text was decoded by text/decode.py, and so are the tokens again: a character that is
    spread over tokens counts once, for the token that completes it, and a control token that is not shown counts nothing."""

    def __init__(self, facts: Mapping[str, Any], skip_special: bool, *, start: bool = False) -> None:
        self.at = 0
        self.unseen = 0  # so many tokens were put before the text
        self.space_prefix: bool = facts["space_prefix"]
        self._control = facts["control"]
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


def completion_logprobs(items: Sequence[Any], top: int, places: Places) -> dict[str, Any]:
    """The older shape: four parallel lists."""
    return {
        "tokens": [spelled(raw) for _, _, raw, _ in items],
        "token_logprobs": [logprob if logprob is None else floor(logprob) for _, logprob, _, _ in items],
        "top_logprobs": [_best(best, top) for _, _, _, best in items] if top else None,
        "text_offset": [places.place(token, raw) for token, _, raw, _ in items],
    }


def _best(best: Sequence[Any] | None, top: int) -> dict[str, float] | None:
    """None: the prompt's first token, which nothing foretold."""
    return None if best is None else {spelled(raw): floor(logprob) for _, logprob, raw in best[:top]}


def prompt_items(done: Mapping[str, Any]) -> list[Any]:
    """A prompt's records; the first token, which has no log-probability, in the same form."""
    first = [done["prompt_ids"][0], None, done["prompt_first"], None]
    return [first if item is None else item for item in done["prompt_logprobs"]]


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def obfuscation(text: str) -> str:
    """Padding to a multiple of 16 characters, so that the sizes of encrypted packets say less about the words."""
    return "".join(secrets.choice(ALPHABET) for _ in range(-len(text) % 16))
