"""The Lens' own routes without a browser, its files, and what one key sees of another."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from typing import Any

import numpy as np
import pytest
from lens_page import PROMPT, api, prompt_ids
from live_server import Live

from verbatim import lens
from verbatim.base.config import EngineConfig
from verbatim.base.page_files import POLICY
from verbatim.base.params import FIELDS, FILTERS, SamplingParams
from verbatim.engine.core import EngineCore
from verbatim.observe.step_log import WATCH_SECONDS, StepLog, StepPart
from verbatim.server.process.lens_queries import engine_report
from verbatim.testing.fakes import fake_parts

pytestmark = pytest.mark.server
# lit-html 3.3.3 without its sourceMappingURL line
LIT_HTML = "22115ca1002e4afc0dd2cb208f28d9c71a577a8989d4185028e26b29676e7842"


def step(live: Live, output: list[int], **params: Any) -> dict[str, Any]:
    body = {"prompt": prompt_ids(live), "output": output, "params": params, "rest": True}
    answer = live.client.post("/lens/api/step", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# ------------------------------------------------------------------------------------------- files


def test_the_page_is_small_and_names_its_libraries() -> None:
    vendor = lens.PAGE.folder / "vendor"
    files = [path for path in lens.PAGE.folder.rglob("*") if path.is_file()]
    files.remove(vendor / "lit-html.LICENSE")  # a browser does not load it
    size = sum(path.stat().st_size for path in files)
    assert size <= 159_000, size
    source = gzip.decompress((vendor / "lit-html.js.gz").read_bytes())
    assert hashlib.sha256(source).hexdigest() == LIT_HTML
    assert "Copyright" in (vendor / "lit-html.LICENSE").read_text()
    assert {"index.html", "app.js", "lens.css", "vendor/lit-html.js"} <= lens.PAGE.names
    assert lens.PAGE.asset("../__init__.py") is None


def test_the_page_lists_every_parameter_and_every_filter() -> None:
    """tests/lens/test_lens_draw.py compares the page's sampler with the stages."""
    sampler = (lens.PAGE.folder / "sampler.js").read_text()
    stages = re.findall(r"^  (\w+)\(live", sampler, re.MULTILINE)
    assert tuple(stages) == FILTERS
    text = (lens.PAGE.folder / "controls.js").read_text()
    of_chats = {"thinking_budget"}  # the Lens completes token ids
    assert {name for name in FIELDS if f'"{name}"' not in text} == of_chats | set(FILTERS)
    for name in ("controls.js", "inspector.js"):
        assert "...FILTERS" in (lens.PAGE.folder / name).read_text()


def test_files_are_served_with_their_type_and_the_policy(live: Live) -> None:
    for name in sorted(lens.PAGE.names):
        answer = live.client.get(f"/lens/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert live.client.get("/lens/nothing.js").status_code == 404
    assert "Google LLC" in live.client.get("/lens/vendor/lit-html.js").text


# ------------------------------------------------------------------------------------------ routes


def test_info_names_every_parameter(live: Live) -> None:
    info = live.client.get("/lens/api/info").json()
    assert set(info["parameters"]) == set(FIELDS)
    assert info["fingerprint"] == live.client.get("/v1/models/m").json()["fingerprint"]
    vocab = live.client.get("/lens/api/vocab").json()
    assert sum(vocab["lengths"]) == len(base64.b64decode(vocab["bytes"]))
    assert len(vocab["lengths"]) == info["vocab"]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {"65": 5.0}, "banned_token_ids": [66, 67]},
        {"dry_multiplier": 0.8, "no_repeat_ngram": 2},
        {"regex": "[a-f]+"},
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_a_step_has_the_logits_that_the_sampler_drew_from(
    live: Live, params: dict[str, Any]
) -> None:
    """The record of the draw itself is the reference: logits, processed logits, ids left."""
    settings = {"seed": 3, "max_tokens": 6, **params}
    direct = api(live, PROMPT, **settings)
    for index, record in enumerate(direct["explain"]):
        data = step(live, direct["ids"][:index], **settings)
        assert (data["position"], data["key"]) == (record["position"], record["key"])
        assert data["entropy"] == record["entropy"]
        raw = np.frombuffer(
            base64.b64decode(data["row"]), "<f4" if data["row_type"] == "f4" else "<f8"
        )
        for candidate in record["top"]:
            processed = raw[candidate["id"]]
            assert candidate["processed"] == (None if processed == -np.inf else processed)
        logprobs = {i: logit - data["peak"] - data["log_total"] for i, logit, _ in data["top"]}
        for candidate in record["top"]:
            if candidate["processed"] is not None:
                assert logprobs[candidate["id"]] == candidate["logprob"]
        before = [s for s in record["stages"] if s["name"] in {t["name"] for t in data["stages"]}]
        assert [(s["name"], s["left"]) for s in data["stages"]] == [
            (s["name"], s["left"]) for s in before
        ]


@pytest.mark.parametrize(
    "params", [{"regex": "[a-f]{9}[xyz]+"}, {"frequency_penalty": 1.5}, {"min_tokens": 9}], ids=str
)
def test_a_step_of_a_branch_continues_the_output(live: Live, params: dict[str, Any]) -> None:
    """The same tokens as prompt and output, or as output alone: one distribution."""
    settings = {"seed": 3, "max_tokens": 12, **params}
    ids = api(live, PROMPT, **settings)["ids"]
    whole = step(live, ids[:6], **settings)
    body = {
        "prompt": [*prompt_ids(live), *ids[:4]],
        "output": ids[4:6],
        "params": {**settings, "output_prefix": 4},
        "rest": True,
    }
    continued = live.client.post("/lens/api/step", json=body).json()
    for name in ("row", "stages", "cut", "top", "key", "position", "prompt_len"):
        assert continued[name] == whole[name], name


def test_a_step_refuses_what_it_cannot_explain(live: Live) -> None:
    ids = prompt_ids(live)
    for body, word in (
        ({"prompt": ids, "params": {"num_beams": 2}}, "num_beams"),
        ({"prompt": ids, "params": {"temprature": 1}}, "temprature"),
        ({"prompt": ids, "params": {"top_p": 3}}, "top_p"),
        ({"prompt": ids, "output": [90], "params": {"regex": "[a-f]+"}}, "grammar"),
        ({"prompt": [*ids, 4000]}, "4000"),
    ):
        answer = live.client.post("/lens/api/step", json=body)
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["error"]["message"]


def test_replay_tells_the_first_difference(live: Live) -> None:
    from verbatim.explain.receipt import digest_of

    receipt = api(live, PROMPT, seed=4, max_tokens=8, temperature=2.0)["receipt"]
    same = live.client.post("/lens/api/replay", json={"receipt": receipt, "explain": 2}).json()
    assert same["identical"]
    assert len(same["explain"][0]) == same["tokens"] == len(receipt["choices"][0]["token_ids"])
    # as JavaScript would send it back: 2.0 has become 2
    plain = {**receipt, "params": {**receipt["params"], "temperature": 2}}
    assert live.client.post("/lens/api/replay", json={"receipt": plain}).json()["identical"]
    wrong = {**receipt, "choices": [{**receipt["choices"][0], "token_ids": [1, 2, 3]}]}
    damaged = live.client.post("/lens/api/replay", json={"receipt": wrong})
    assert (damaged.status_code, "sha256" in damaged.text) == (400, True)
    wrong["sha256"] = digest_of(wrong)
    other = live.client.post("/lens/api/replay", json={"receipt": wrong}).json()
    assert (other["identical"], other["position"], other["expected"]) == (False, 0, 1)


# ------------------------------------------------------------------------------- engine view, keys


def test_a_key_sees_only_its_own_requests() -> None:
    core = EngineCore(fake_parts(), EngineConfig(kv_blocks=32))
    assert engine_report(core, "a", 0)["steps"] == []  # and the log is on from now
    for tenant in ("a", "b", "b"):
        core.add(core.request([1] * 20, SamplingParams(max_tokens=4, seed=1), tenant=tenant))
    core.step()
    seen = {tenant: engine_report(core, tenant, 0) for tenant in ("a", "b", "c")}
    assert [len(seen[t]["requests"]) for t in "abc"] == [1, 2, 0]
    assert [seen[t]["others"] for t in "abc"] == [2, 1, 3]
    assert [len(seen[t]["steps"][0]["parts"]) for t in "abc"] == [1, 2, 0]
    computed = [
        sum(p["tokens"] for p in seen[t]["steps"][0]["parts"]) + seen[t]["steps"][0]["others"]
        for t in "abc"
    ]
    assert len(set(computed)) == 1
    pool = seen["a"]["pools"][0]
    assert len(pool["strip"]) == 32
    assert pool["strip"].count(".") == pool["free"]
    assert "o" in pool["strip"]
    assert "o" not in seen["c"]["pools"][0]["strip"]
    while core.busy:
        core.step()
    last = engine_report(core, "a", seen["a"]["steps"][-1]["step"])
    assert last["steps"][0]["step"] == seen["a"]["steps"][-1]["step"] + 1
    core.close()


def test_evicted_blocks_and_preemptions_are_reported() -> None:
    """A cache of 8 blocks of 16 tokens: prompts one after the other evict each other's blocks, and
    three at once preempt."""
    core = EngineCore(fake_parts(), EngineConfig(kv_blocks=8))
    engine_report(core, "a", 0)  # the log is on from now
    for i in range(4):
        core.add(core.request([i] * 40, SamplingParams(max_tokens=1, seed=1), tenant="a"))
        while core.busy:
            core.step()
    [pool] = engine_report(core, "a", 0)["pools"]
    assert pool["evictions"] == len(pool["evicted"]) > 0
    assert pool["evicted"] == list(core.scheduler.cache.pools[0].evicted)
    assert set(pool["evicted"]) <= set(range(8))
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
    for i in range(3):
        core.add(core.request([50 + i] * 20, params, tenant="a"))
    while core.busy:
        core.step()
    report = engine_report(core, "a", 0)
    seen = [p["preemptions"] for s in report["steps"] for p in s["parts"]]
    assert max(seen) > 0
    assert report["preemptions"] > 0
    core.close()


def test_steps_are_recorded_only_while_a_page_watches() -> None:
    now = 100.0
    log = StepLog(lambda: now)
    assert not log.watched
    log.read("a")
    assert log.watched
    log.add(
        1.0,
        1.5,
        (StepPart("r", "a", 7, 4, 4, 3, "ngram", 0.25), StepPart("s", "b", 0, 9, 0, 0, "")),
    )
    [found] = log.read("a")
    assert found["others"] == 9
    assert found["parts"] == [
        {
            "request": "r",
            "start": 7,
            "tokens": 4,
            "kind": "decode",
            "drafts": 3,
            "accepted": 2,
            "source": "ngram",
            "arrival": 0.25,
            "preemptions": 0,
        }
    ]
    now += WATCH_SECONDS + 1
    assert not log.watched
