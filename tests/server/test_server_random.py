"""Random requests with many fields: the streamed answer equals the whole one, an error names its
field, and there is no 5xx. The seeds are fixed.

test_server_hostile.py tries one field at a time; the bugs found here were in pairs of fields (such
as tools and explain).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from live_server import report

from filter_values import WEAK

pytestmark = pytest.mark.server

TEXTS = [
    "",
    "x",
    "é" * 50,
    "<|assistant|>",
    "\0",
    "</tool_call>",
    "<tool_call>",
    "{",
    "[TOOL_CALLS]",
    "😀",
    "\u2028",
    "%s%n",
    "{{ 7*7 }}",
]
ARGUMENTS = [
    "{}",
    '{"a": 1, "a": 2}',
    "null",
    "[1]",
    '{"a": "\\ud800"}',
    '{"a": 1e400}',
    "[" * 200,
    "9" * 30,
    "",
]
# every value is valid by itself; together they may contradict each other
FIELDS: dict[str, Any] = {
    **WEAK, "n": 2, "explain": 2, "receipt": True, "explain_rows": True, "top_k": 5, "best_of": 3,
    "num_beams": 3,
    "num_return_sequences": 2, "num_beam_groups": 3, "diversity_penalty": 1.0,
    "length_penalty": 2.0, "early_stopping": True, "regex": "[ab]{3,9}", "choice": ["é😀", "abc",
    "ab"], "grammar": 'start: "a"+', "json_schema": {"type": "object", "properties": {"a": {"type":
    "integer"}}}, "stop": ["a", "bc"], "stop_token_ids": [98], "logit_bias": {"65": 5, "97": 8,
    "98": 7}, "banned_token_ids": [1, 2], "allowed_token_ids": [65, 66, 97, 98, 195, 169, 257],
    "speculate": "ngram", "on_loop": "stop", "dry_multiplier": 1.0,
    "no_repeat_ngram": 2, "min_tokens": 2, "ignore_eos": True, "temperature": 0,
    "repetition_penalty": 1.3, "frequency_penalty": 1, "presence_penalty": -1,
    "include_stop": True, "skip_special": False, "logprobs_mode": "processed", "cache_salt": "s",
    "priority": 3, "max_tokens": 40,
}  # fmt: skip


def message(dice: random.Random) -> dict[str, Any]:
    role = dice.choice(["system", "user", "assistant", "tool", "developer"])
    text = dice.choice(TEXTS)
    made: dict[str, Any] = {
        "role": role,
        "content": dice.choice([text, [{"type": "text", "text": text}] * 2]),
    }
    if role == "assistant" and dice.random() < 0.5:
        call = {"name": dice.choice(TEXTS), "arguments": dice.choice(ARGUMENTS)}
        made["tool_calls"] = [{"id": dice.choice(TEXTS), "type": "function", "function": call}]
        if dice.random() < 0.5:
            del made["content"]
    if role == "tool":
        made["tool_call_id"] = dice.choice(TEXTS)
    if dice.random() < 0.05:
        made["name"] = dice.choice(TEXTS)
    return made


def request_of(dice: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": dice.choice([1, 5, 30]), "seed": dice.randint(-5, 10**6)}
    body |= {name: FIELDS[name] for name in dice.sample(list(FIELDS), dice.randint(0, 5))}
    if dice.random() < 0.5:
        body["prompt"] = dice.choice(["hello", [65, 66], ["a", "b"], "é" * 20])
        body |= {"logprobs": dice.choice([0, 3])} if dice.random() < 0.3 else {}
        return "/v1/completions", body | ({"echo": True} if dice.random() < 0.2 else {})
    body["messages"] = [message(dice) for _ in range(dice.randint(1, 4))]
    body |= {"logprobs": True, "top_logprobs": 2} if dice.random() < 0.3 else {}
    if dice.random() < 0.5:
        function = {
            "name": "f",
            "description": dice.choice(TEXTS),
            "parameters": {"type": "object"},
            "strict": dice.random() < 0.3,
        }
        body |= {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": dice.choice(["auto", "none", "required"]),
        }
    return "/v1/chat/completions", body


def check_choice(
    path: str, body: dict[str, Any], choice: dict[str, Any], chunks: list[dict[str, Any]]
) -> None:
    """Compare one choice of the whole answer with its streamed chunks."""

    def streamed_values(name: str) -> list[Any]:
        return [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"][name]]

    if path == "/v1/completions":
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        if choice["logprobs"] and "echo" not in body:  # echo is not streamed with logprobs
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert streamed_values(name) == choice["logprobs"][name]
    else:
        calls = [
            call["function"] for chunk in chunks for call in chunk["delta"].get("tool_calls", ())
        ]
        assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        assert text == (choice["message"]["content"] or "") or (calls and not text.strip())
        assert not choice["logprobs"] or streamed_values("content") == choice["logprobs"]["content"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [
        choice["finish_reason"]
    ]
    assert [record for chunk in chunks for record in chunk.get("explain", ())] == choice.get(
        "explain", []
    )


def try_one(fake: Any, path: str, body: dict[str, Any]) -> tuple[int, int]:
    whole = fake.post(path, body)
    streamed = fake.post(path, {**body, "stream": True})
    for answer in (whole, streamed):
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["param"], answer.text
    if whole.status_code == streamed.status_code == 200:
        events = [
            json.loads(line[6:])
            for line in streamed.text.splitlines()
            if line.startswith("data: {")
        ]
        assert not any("error" in event for event in events)
        for choice in whole.json()["choices"]:
            check_choice(
                path,
                body,
                choice,
                [c for e in events for c in e["choices"] if c["index"] == choice["index"]],
            )
    elif streamed.status_code == 200:  # failed while it ran
        assert '"error"' in streamed.text
    elif whole.status_code == 200:
        assert streamed.json()["error"]["param"] in ("best_of", "echo")  # not supported in a stream
    return whole.status_code, streamed.status_code


def try_many(fake: Any, seed: int, count: int) -> Counter[tuple[int, int]]:
    dice = random.Random(seed)
    found: Counter[tuple[int, int]] = Counter()
    for number in range(count):
        path, body = request_of(dice)
        try:
            found[try_one(fake, path, body)] += 1
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, number {number}: {path} {json.dumps(body)}"
            ) from error
    return found


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(fake: Any, seed: int) -> None:
    found = try_many(fake, seed, 60)
    assert found[200, 200] > 10
    assert found[400, 400] > 10


@pytest.mark.soak
def test_thousands_of_random_requests(fake: Any) -> None:
    found = try_many(fake, 1000, 3000)
    report(f"{found.total()} random requests, whole and streamed; {dict(found)}")
