"""The sampler on the default model: `verbatim explain` recomputed, JSON under a schema. Beam search
against transformers is in tests/parity/test_default_model.py."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sampling_rows import softmax
from verbatim.base.errors import RequestError
from verbatim.base.params import SamplingParams
from verbatim.engine.calls.llm import LLM
from verbatim.sampling.draw import gumbel, noise_key

pytestmark = [pytest.mark.model]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        # A pattern, because a JSON number has no maximum length and at temperature 1.5 may not end.
        "score": {"type": "string", "pattern": "^0\\.[0-9]{1,3}$"},
    },
    "required": ["name", "age", "tags", "score"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Any:
    with LLM(default_model, context=512) as found:
        yield found


def test_verbatim_explain_equals_a_recomputation_from_the_raw_rows(default_model: Path) -> None:
    """Recompute every number of the JSON from its raw row with NumPy's exp and log; the what-if
    too."""
    command = [
        sys.executable,
        "-m",
        "verbatim",
        "explain",
        "--model",
        str(default_model),
        "--raw",
        "--json",
        "--context",
        "256",
    ]
    command += [
        *("--temperature", "0.9", "--top-p", "0.8", "--seed", "11", "--max-tokens", "4"),
        *("--explain", "6"),
    ]
    done = subprocess.run(
        [*command, "--what-if", "top_k=1", "The best colour is"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    records = report["choices"][0]["explain"] if "choices" in report else report["explain"]
    assert len(records) == 4
    for record, again in zip(records, report["what_if"][0]["tokens"], strict=True):
        raw = np.frombuffer(base64.b64decode(record["row"]), "<f4").astype(np.float64)
        assert len(raw) == record["vocab"] == 49152
        p, token = softmax(raw), record["token"]
        assert record["logprob"] == pytest.approx(math.log(p[token]), abs=1e-7)
        assert record["entropy"] == pytest.approx(
            float(-(p[p > 0] * np.log(p[p > 0])).sum()), abs=1e-6
        )
        assert record["rank"] == 1 + int((raw > raw[token]).sum())
        assert [c["id"] for c in record["top"]] == np.argsort(-raw, kind="stable")[:6].tolist()
        d = (raw - raw.max()) / 0.9
        order = np.argsort(-d, kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(softmax(d)[order]), 0.8)) + 1]
        assert record["stages"][-1]["left"] == len(kept)
        scores = d[kept] + gumbel(noise_key(11), record["position"], kept)
        assert int(kept[np.argmax(scores)]) == token
        assert record["score"] == pytest.approx(scores.max(), abs=1e-7)
        assert again == {
            "position": record["position"],
            "before": token,
            "after": int(raw.argmax()),
        }


def documents(llm: LLM, count: int) -> None:
    import jsonschema

    params = [
        SamplingParams(
            temperature=1.5,
            json_schema=SCHEMA,
            max_tokens=300,
            seed=seed,
            top_p=0.95 if seed % 2 else 1.0,
        )
        for seed in range(count)
    ]
    done = llm.generate(["Describe a person as JSON:\n"] * count, params)
    for each in done:
        assert each.finish_reason == "stop", (each.text, each.finish)
        jsonschema.validate(json.loads(each.text), SCHEMA)
    llm.check()


def test_json_under_a_schema_is_valid_at_temperature_1_5(llm: LLM) -> None:
    documents(llm, 6)


@pytest.mark.soak
def test_200_json_outputs_are_valid(llm: LLM) -> None:
    documents(llm, 200)


def test_a_rejected_schema_does_not_disturb_a_running_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running stream keeps its output while another request is rejected for its schema."""
    params = SamplingParams(max_tokens=8, seed=4)
    alone = llm.generate("The sea", params).token_ids
    stream = llm.stream("The sea", params)
    next(stream)
    with pytest.raises(RequestError) as caught:
        llm.generate(
            "x", SamplingParams(json_schema={"type": "integer", "multipleOf": 7919 * 7907})
        )
    assert caught.value.param == "json_schema"
    for _ in stream:
        pass
    assert stream.completion is not None
    assert stream.completion.token_ids == alone
