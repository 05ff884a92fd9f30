"""Random requests that mix every sampler, for tests that compare two ways of running them."""

from __future__ import annotations

import random
from typing import Any

from filter_values import random_value
from verbatim.base.params import FILTERS, SamplingParams
from verbatim.base.records import Completion

_STRUCTURES: tuple[dict[str, Any], ...] = (
    {"choice": ("alpha", "beta", "alphabet")},
    {"regex": "[ab]{2,9}(cd)*"},
    {
        "json_schema": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
)


def random_prompt(r: random.Random) -> list[int]:
    """Often repetitive, so that lookups find a match."""
    piece = [r.randrange(97, 103) for _ in range(r.randrange(1, 7))]
    tail = [r.randrange(32, 127) for _ in range(r.randrange(0, 20))]
    return (piece * r.randrange(1, 8) + tail + piece)[: r.randrange(1, 60)]


def random_params(r: random.Random) -> SamplingParams:
    def maybe(chance: float, value: Any, default: Any) -> Any:
        return value if r.random() < chance else default

    fields: dict[str, Any] = {
        "max_tokens": r.randrange(1, 28),
        "min_tokens": maybe(0.2, 1, 0),
        "temperature": r.choice((0.0, 0.0, 0.3, 0.7, 1.0, 1.5)),
        **{name: random_value(name, r.random()) for name in FILTERS if r.random() < 0.2},
        "repetition_penalty": maybe(0.2, 1.2, 1.0),
        "frequency_penalty": maybe(0.2, 0.4, 0.0),
        "presence_penalty": maybe(0.2, 0.3, 0.0),
        "dry_multiplier": maybe(0.1, 0.8, 0.0),
        "no_repeat_ngram": maybe(0.1, 3, 0),
        "logit_bias": maybe(0.2, {98: 2.0, 99: -3.0}, ()),
        "banned_token_ids": maybe(0.1, (100, 101), ()),
        "stop": maybe(0.2, ("ab", "c"), ()),
        "stop_token_ids": maybe(0.1, (97,), ()),
        "ignore_eos": maybe(0.2, True, False),
        "logprobs": maybe(0.5, r.randrange(0, 4), None),
        "logprobs_mode": maybe(0.3, "processed", "raw"),
        "explain": maybe(0.1, 2, 0),
        "n": maybe(0.15, 2, 1),
        "on_loop": maybe(0.2, "stop", "report"),
        "seed": r.getrandbits(40),
    }
    if r.random() < 0.12:
        fields |= r.choice(_STRUCTURES) | {"banned_token_ids": (), "stop": (), "no_repeat_ngram": 0}
    elif r.random() < 0.08:  # bans that leave nothing to draw after some tokens
        few = tuple(r.sample(range(97, 103), r.randrange(1, 4)))
        fields |= {
            "allowed_token_ids": few,
            "banned_token_ids": (),
            "no_repeat_ngram": r.randrange(1, 3),
            "max_tokens": 27,
        }
    return SamplingParams(**fields)


def answer(completion: Completion) -> list[Any]:
    """Everything about a completion that must be equal, to the bit."""
    return [
        (
            c.text,
            c.token_ids,
            c.finish,
            [(t.token, t.logprob.hex(), t.top) for t in c.logprobs],
            c.loop,
            c.explain,
        )
        for c in completion.choices
    ]
