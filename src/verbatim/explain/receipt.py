"""Receipts: everything needed to reproduce a completion, or to say why it cannot be reproduced.

In: a finished request (prompt ids, parameters, seed, choices) and what computed it (model digest,
backend, numerics). Out: one JSON object. `verbatim replay FILE` runs it again and compares token by
token with `compare`. Prompt and completion are in it as token ids, so it is as private as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonMapping, JsonObject
from verbatim.base.params import FIELDS, SamplingParams
from verbatim.base.records import Choice

VERSION = 1
# Parameters that change delivery or reporting, never the tokens.
NOT_REPLAYED = ("receipt", "cache_salt", "priority", "speculate", "explain", "prompt_logprobs")
MAKERS = ("model", "digest", "backend", "detail", "numerics", "fingerprint", "context")


def make_receipt(
    *,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    choices: Sequence[Choice],
    adapter: str = "",
    reasoning: bool = False,
    **makers: str | int,
) -> JsonObject:
    """The receipt of a finished request. `adapter`: digest of the LoRA adapter params.adapter.
    `reasoning`: a conversation with a reasoning model, so that structure and stop strings apply
    behind its reasoning. `makers`: all of MAKERS."""
    given = params.with_(seed=None if params.num_beams > 1 else seed).to_mapping()
    asked = {k: v for k, v in given.items() if k not in NOT_REPLAYED}
    body: JsonObject = {
        "receipt": VERSION,
        **{maker: makers[maker] for maker in MAKERS},
        **({"adapter": adapter} if adapter else {}),
        **({"thinks": True} if reasoning else {}),
        "prompt_ids": list(prompt_ids),
        "params": _json_ready(asked),
        "origins": dict(params.origins),
        "choices": [
            {
                "index": c.index,
                "token_ids": list(c.token_ids),
                "finish": [c.finish.reason, c.finish.detail],
            }
            for c in choices
        ],
    }
    return {**body, "sha256": digest_of(body)}


def digest_of(body: Mapping[str, object]) -> str:
    """SHA-256 of everything but the digest, in a canonical form. It detects damage, not forgery."""
    plain = {k: v for k, v in body.items() if k != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_receipt(data: object) -> JsonObject:
    """Validate a receipt, or an API response that contains one, and return the receipt."""
    if isinstance(data, Mapping) and isinstance(data.get("receipt"), Mapping):
        data = data["receipt"]
    if not isinstance(data, Mapping) or data.get("receipt") != VERSION:
        raise ParameterError(
            "receipt",
            f'is not a receipt of version {VERSION}: expected an object with "receipt": {VERSION}',
        )
    shapes: dict[str, type | tuple[type, ...]] = dict.fromkeys(MAKERS, (str, int))
    shapes = {"prompt_ids": list, "params": dict, "choices": list, **shapes}
    for name, shape in shapes.items():
        if not isinstance(data.get(name), shape):
            raise ParameterError("receipt", f"has no usable {name!r}")
    if not isinstance(data.get("thinks", False), bool):
        raise ParameterError("receipt", "has no usable 'thinks'")
    if not _ids(data["prompt_ids"]) or not all(
        isinstance(c, dict) and _ids(c.get("token_ids")) for c in data["choices"]
    ):
        raise ParameterError("receipt", "holds token ids that are not whole numbers")
    data = {**data, "params": _with_floats(data["params"])}
    if data.get("sha256") != digest_of(data):
        raise ParameterError(
            "receipt", "was changed after it was written (its sha256 does not match)"
        )
    for name in data["params"]:
        if name not in FIELDS:
            raise ParameterError("receipt", f"asks for {name!r}, which this version does not know")
    return dict(data)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Identical, or the first difference: choice, position in its output, and the two tokens
    (None: the output had ended)."""

    identical: bool
    choice: int = 0
    position: int = 0
    expected: int | None = None
    got: int | None = None
    reasons: tuple[str, ...] = ()
    cancelled: bool = False  # the answer was cancelled, so only its beginning was compared

    def __str__(self) -> str:
        if self.identical:
            return "identical" + " up to where the answer was cancelled" * self.cancelled
        lines = [
            f"choice {self.choice}, token {self.position}: "
            f"the receipt has {_show(self.expected)}, this run {_show(self.got)}"
        ]
        lines += self.reasons or (
            "model, backend, numerics and context are the same, so the tokens should be: "
            "please report it as a bug, with this receipt",
        )
        return "\n".join(lines)


def compare(receipt: JsonMapping, choices: Sequence[Choice], makers: JsonMapping) -> Verdict:
    """Compare token by token. `makers`: this run's values of MAKERS; those that differ are the
    reasons why the tokens may differ. A cancelled answer is compared as far as it was written; with
    best_of not at all, because the best candidate was not known yet."""
    reasons = tuple(
        f"{name} differs: {_brief(receipt[name])} then, {_brief(makers[name])} now"
        for name in ("digest", "backend", "numerics", "context")
        if name in makers and makers[name] != receipt[name]
    )
    if makers.get("adapter", "") != receipt.get("adapter", ""):
        then, now_ = receipt.get("adapter", ""), makers.get("adapter", "")
        reasons += (f"adapter differs: {_brief(then)} then, {_brief(now_)} now",)
    now, cancelled = {c.index: c for c in choices}, False
    for then in receipt["choices"]:
        choice = now.get(then["index"])
        old, new = then["token_ids"], list(choice.token_ids) if choice else []
        if (then.get("finish") or [""])[0] == "cancel":
            if receipt["params"].get("best_of", 0) > len(receipt["choices"]):
                old = []
            new, cancelled = new[: len(old)], True
        if old == new:
            continue
        pairs = enumerate(zip_longest(old, new))
        at, (expected, got) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        return Verdict(False, then["index"], at, expected, got, reasons)
    return Verdict(True, cancelled=cancelled)


def _with_floats(params: Mapping[str, object]) -> JsonObject:
    """JavaScript and jq write 2.0 as 2, which would change the digest."""
    out = dict(params)
    for name, value in params.items():
        kind = FIELDS[name].kind if name in FIELDS else ""
        if kind == "float" and type(value) is int:
            out[name] = float(value)
        elif kind == "bias" and isinstance(value, dict):
            out[name] = {k: float(v) if type(v) is int else v for k, v in value.items()}
    return out


def _brief(value: object) -> str:
    """A value in quotes; a digest by its first 12 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:13]}…'"


def _ids(value: object) -> bool:
    return isinstance(value, list) and all(type(t) is int and t >= 0 for t in value)


def _json_ready(values: JsonObject) -> JsonObject:
    """JSON has string keys only; without this the digest would change on the way through a file."""
    plain: JsonObject = json.loads(json.dumps(values))
    return plain


def _show(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"
