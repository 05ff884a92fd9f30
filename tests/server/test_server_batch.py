"""`verbatim batch` (OpenAI's batch files through the server's handlers, resumable), and receipts
and explanations over HTTP."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest

from verbatim import LLM, SamplingParams
from verbatim.base.errors import ParameterError
from verbatim.cli.main import main
from verbatim.explain.receipt import compare, digest_of, read_receipt
from verbatim.server import batch_files
from verbatim.server.batch_files import open_answers, read_answers, read_requests
from verbatim.testing.fakes import fake_parts

pytestmark = pytest.mark.server
MODEL = "any"


def words(source: Path, target: Path) -> list[str]:
    files = [str(source), str(target)]
    return ["batch", *files, "--test-engine", "pipeline", "--served-model-name", MODEL]


def batch(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verbatim", *words(source, target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def rejected(source: Path, target: Path) -> int:
    """The exit code of a command that fails before it starts an engine: in this process."""
    with pytest.raises(SystemExit) as ended:
        main(words(source, target))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def line(name: str, **body: Any) -> str:
    return json.dumps(
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "max_tokens": 6, "seed": 7, **body},
        }
    )


def test_a_batch_answers_every_line_as_the_server_would_and_resumes(
    fake: Any, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": MODEL,
            "max_tokens": 6,
            "seed": 7,
            "messages": [{"role": "user", "content": "hi"}],
        },
    }
    same = "one prompt, longer than a block of the prefix cache"
    rows = [line(f"c{i}", prompt=f"prompt {i}") for i in range(20)] + [
        *(line(f"same{i}", prompt=same) for i in range(8)),
        json.dumps(chat),
        line("bad", prompt="x", temperature=-1),
    ]
    source.write_text("\n".join(rows) + "\n")
    done = batch(source, target)
    assert done.returncode == 1, done.stderr  # one request failed
    answers = {a["custom_id"]: a for a in map(json.loads, target.read_text().splitlines())}
    assert len(answers) == 30
    # The first of these fills the prefix cache; no answer says which one was the first.
    usages = [answers[f"same{i}"]["response"]["body"]["usage"] for i in range(8)]
    for usage in usages:
        del usage["completion_tokens_details"]  # drafts depend on time
    assert usages == [usages[0]] * 8
    for i in range(20):
        assert (
            answers[f"c{i}"]["response"]["body"]["choices"]
            == fake.complete(f"prompt {i}", max_tokens=6)["choices"]
        )
    assert answers["chat"]["response"]["body"]["model"] == MODEL
    refused = answers["bad"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "temperature")

    kept = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(kept[:5]) + kept[5][:30])  # as a crash would leave it
    assert batch(source, target).returncode in (0, 1)
    again = [json.loads(text) for text in target.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in again) == sorted(answers)
    assert target.read_bytes().startswith(b"".join(kept[:5]))


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        '{"custom_id": "a", "url": "/v1/files", "body": {}}',
        line("a", prompt="x") + "\n" + line("a", prompt="y"),
        line("a", prompt="x", stream=True),
        line("a", prompt="x").replace('"seed": 7', '"seed": 7, "seed": 8'),
        line("a", prompt="x").replace('"method"', '"mode": 1, "method"'),
        "[" * 100_000,
    ],
)
def test_a_wrong_batch_file_fails_before_any_request(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text + "\n")
    assert rejected(source, target) == 2
    assert "line" in capsys.readouterr().err
    assert not target.exists()


def test_a_batch_line_for_another_model_fails_as_on_the_server(fake: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "\n".join([line("other", prompt="x", model="other"), line("none", prompt="x", model=None)])
        + "\n"
    )
    assert batch(source, target).returncode == 1
    answers = {
        a["custom_id"]: a["response"] for a in map(json.loads, target.read_text().splitlines())
    }
    refused, served = (
        answers["other"],
        fake.post("/v1/completions", {"model": "other", "prompt": "x"}),
    )
    assert refused["status_code"] == served.status_code == 404
    for name in ("code", "param", "type"):
        assert refused["body"]["error"][name] == served.json()["error"][name]
    assert (answers["none"]["status_code"], answers["none"]["body"]["model"]) == (200, MODEL)


def test_equal_lines_of_a_batch_without_a_seed_get_different_seeds(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "\n".join(line(f"c{i}", prompt="x", max_tokens=20, seed=None) for i in range(3)) + "\n"
    )
    assert batch(source, target).returncode == 0
    answers = [json.loads(row)["response"]["body"] for row in target.read_text().splitlines()]
    assert len({a["choices"][0]["text"] for a in answers}) == len({a["seed"] for a in answers}) == 3


def test_a_batch_rejects_its_input_file_as_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    # without a final newline, like a truncated answer
    source.write_text(line("a", prompt="x") + "\n" + line("b", prompt="y"))
    before = source.read_bytes()
    link.symlink_to(source)
    for target in (source, link):
        assert rejected(source, target) == 2
        said = capsys.readouterr().err
        assert "OUT: " in said
        assert "choose another file" in said
        assert source.read_bytes() == before


def test_a_batch_does_not_erase_a_file_of_one_line_that_it_did_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, notes = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text(line("a", prompt="x") + "\n")
    notes.write_text("without a final newline, like a truncated answer")
    assert rejected(source, notes) == 2
    assert "line 1 is not an answer of a batch" in capsys.readouterr().err
    assert notes.read_text().startswith("without")
    for size in range(30):  # of a line that a crash cut
        notes.write_text('{"id": "batch_req_7f7887683e140d12'[:size])
        assert read_answers(notes, {"a"}) == {}
        assert not notes.read_bytes()


@pytest.mark.parametrize("target", ["/dev/zero", "-"])
def test_a_batch_writes_to_files_only(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading a device to resume may never end; a file named - would be a surprise."""
    source = Path(__file__)
    with pytest.raises(SystemExit) as ended:
        main(["batch", str(source), target])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"verbatim: OUT: {target!r} is n")


def test_a_parquet_out_is_checked_before_any_request_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal beside it is a regular file too, and pyarrow is there to write OUT at the end."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text(line("a", prompt="x") + "\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert rejected(source, target) == 1
    assert "need pyarrow" in capsys.readouterr().err
    journal = tmp_path / "out.parquet.jsonl"
    assert not journal.exists()
    journal.mkdir()
    assert rejected(source, target) == 2
    assert capsys.readouterr().err.endswith("is not a regular file; choose another path\n")


def test_a_batch_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line("a", prompt="x") + "\n" + line("b", prompt="x"), "utf-8-sig")
    assert [request["custom_id"] for request in read_requests(source)] == ["a", "b"]


def test_a_receipt_over_http_replays_in_the_library(fake: Any) -> None:
    from verbatim.testing.fakes import server_parts

    answer = fake.complete("receipts", max_tokens=30, n=2, temperature=0.8, receipt=True)
    receipt = read_receipt(json.loads(json.dumps(answer)))
    assert receipt["model"] == "m"
    with LLM.from_loaded(server_parts("pipeline")) as llm:
        again = llm.generate(receipt["prompt_ids"], SamplingParams.from_mapping(receipt["params"]))
        makers = {
            "digest": llm.loaded.digest,
            "backend": "fake",
            "numerics": "fake-1",
            "context": llm.context,
        }
        assert compare(receipt, again.choices, makers).identical
        drawn_apart = fake.post(
            "/v1/completions", {"prompt": ["x"] * 3, "max_tokens": 20, "receipt": True}
        ).json()
        for choice, each in zip(
            drawn_apart["choices"], map(read_receipt, drawn_apart["receipt"]), strict=True
        ):
            same = llm.generate(
                each["prompt_ids"],
                SamplingParams.from_mapping({**each["params"], "seed": choice["seed"]}),
            )
            assert same.text == choice["text"]
            assert compare(
                each,
                llm.generate(
                    each["prompt_ids"], SamplingParams.from_mapping(each["params"])
                ).choices,
                makers,
            ).identical
        other = llm.generate(
            receipt["prompt_ids"], SamplingParams.from_mapping({**receipt["params"], "seed": 1})
        )
        verdict = compare(receipt, other.choices, {**makers, "numerics": "fake-2"})
    assert not verdict.identical
    assert "numerics differs" in str(verdict)
    assert f"token {verdict.position}" in str(verdict)
    streamed = fake.events(
        "/v1/completions", {"prompt": "receipts", "max_tokens": 4, "receipt": True}
    )
    assert read_receipt(streamed[-2])["choices"][0]["token_ids"]


def test_a_modified_receipt_is_detected(fake: Any) -> None:
    receipt = fake.complete("receipts", receipt=True)["receipt"]
    for change in (
        {"prompt_ids": [1]},
        {"params": {}},
        {"receipt": 9},
        {"choices": [{"token_ids": ["x"]}]},
        {"digest": None},
    ):
        with pytest.raises(ParameterError):
            read_receipt({**receipt, **change})
    forged = {**receipt, "params": {"no_such": 1}}
    with pytest.raises(ParameterError, match="no_such"):
        read_receipt({**forged, "sha256": digest_of(forged)})


# ------------------------------------------------------------------------------------ explanations


def explanations(fake: Any, path: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """The explanation records of a response of any route, whole or streamed."""
    if not stream:
        answer = fake.post(path, body).json()
        return list(
            answer["explain"] if path == "/v1/responses" else answer["choices"][0]["explain"]
        )
    events = [e for e in fake.events(path, body) if e != "[DONE]"]
    if path == "/v1/responses":
        return list(events[-1]["response"]["explain"])
    return [
        record for e in events for choice in e["choices"] for record in choice.get("explain", ())
    ]


ROUTES = {
    "/v1/completions": {"prompt": "why", "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "why"}], "max_tokens": 6},
    "/v1/responses": {"input": "why", "max_output_tokens": 6},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_every_token_is_explained_and_rows_are_sent_on_request(
    fake: Any, path: str, stream: bool
) -> None:
    from verbatim.explain.explanation import what_if

    params = {"explain": 3, "receipt": True, "seed": 4, "temperature": 0.9, "regex": "[a-z]{20}"}
    plain = explanations(fake, path, {**ROUTES[path], **params}, stream)
    whole = explanations(fake, path, {**ROUTES[path], **params, "explain_rows": True}, stream)
    assert len(plain) == len(whole) == 6
    assert all(record["row"] and record["mask"] for record in whole)
    assert plain == [{**record, "row": None, "mask": None} for record in whole]
    again = what_if(whole, SamplingParams(seed=4, temperature=0.9, regex="[a-z]{20}"), {})
    assert [step.after for step in again] == [record["token"] for record in whole]


def test_explanations_are_sent_while_the_text_is_held_back(fake: Any) -> None:
    """Text that may become a tool call, or a partial character, is held back; its tokens are
    explained at once."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for choice in (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        '{"name": "f"',
        "é😀",
    ):
        body = {
            **ROUTES["/v1/chat/completions"],
            "tools": [tool],
            "choice": [choice],
            "explain": 1,
            "max_tokens": 60,
        }
        for more in ({}, {"logprobs": True}):
            whole = explanations(fake, "/v1/chat/completions", {**body, **more}, False)
            assert [r["token"] for r in whole] == list(choice.encode())
            assert explanations(
                fake, "/v1/chat/completions", {**body, **more, "seed": 1}, True
            ) == explanations(fake, "/v1/chat/completions", {**body, **more, "seed": 1}, False)


def test_explain_rows_that_cannot_be_returned_is_rejected(fake: Any) -> None:
    for more in ({}, {"explain": 3}, {"receipt": True}, {"explain": 3, "receipt": True, "n": 2}):
        for path, body in ROUTES.items():
            if path == "/v1/responses" and "n" in more:
                continue
            error = fake.post(path, {**body, **more, "explain_rows": True}).json()["error"]
            assert (error["param"], error["code"]) == ("explain_rows", "invalid_parameter")

    error = fake.post(
        "/v1/completions",
        {"prompt": ["a", "b"], "explain": 1, "receipt": True, "explain_rows": True},
    ).json()["error"]
    assert error["param"] == "explain_rows"


def test_concurrent_answers_with_rows_are_limited(fake: Any) -> None:
    """Each is large in both processes; its slot is released however it ends."""
    from verbatim.server.admission import MAX_ROWS

    body = {
        "model": "m",
        "prompt": "x",
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
        "explain": 1,
        "receipt": True,
    }
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_ROWS):
            stream = stack.enter_context(
                fake.client.stream("POST", "/v1/completions", json={**body, "explain_rows": True})
            )
            assert stream.status_code == 200
        refused = fake.post("/v1/completions", {**body, "stream": False, "explain_rows": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "explain_rows")
        assert (
            fake.post("/v1/completions", {**body, "stream": False, "max_tokens": 1}).status_code
            == 200
        )
    fake.wait_at_rest()
    assert (
        fake.post("/v1/completions", {**body, "stream": False, "explain_rows": True}).status_code
        == 200
    )


@pytest.mark.parametrize("details", ["prompt_tokens_details", "input_tokens_details"])
def test_a_batch_reports_no_cached_tokens(details: str) -> None:
    from verbatim.server.batch_requests import drop_cached_tokens

    body = {"usage": {details: {"cached_tokens": 3, "audio_tokens": 0}}}
    drop_cached_tokens(body)
    assert body["usage"][details] == {"audio_tokens": 0}


def test_rows_that_were_not_requested_are_dropped() -> None:
    from verbatim.server.process.results import drop_rows

    with LLM.from_loaded(fake_parts(), kv_blocks=64) as llm:
        stream = llm.stream(
            "x", SamplingParams(max_tokens=4, explain=1, receipt=True, ignore_eos=True)
        )
        held = [record for delta in stream for record in delta.explain]
        assert all(record["row"] for record in held)
        drop_rows(held)
        assert stream.completion is not None
        kept = stream.completion.choices[0].explain
        assert [record["row"] for record in kept] == [
            None
        ] * 4  # the same records: nothing else holds a row


@pytest.mark.parametrize("path", ROUTES)
def test_a_loop_is_reported_in_every_mode(fake: Any, path: str) -> None:
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {
        **ROUTES[path],
        length: 80,
        "logit_bias": {"65": 100},
        "ignore_eos": True,
        "receipt": True,
    }
    answer = fake.post(path, body).json()
    assert (answer if path == "/v1/responses" else answer["choices"][0])["loop"] == 1
    told = "the output repeated a run of 1 token; on_loop stop ends such an answer"
    assert told in answer["warnings"]
    events = [e for e in fake.events(path, body) if e != "[DONE]"]
    last = events[-1]
    assert last["response"]["loop"] == 1 if path == "/v1/responses" else last["loops"] == [1]


def test_a_second_batch_does_not_touch_a_file_that_one_is_writing(tmp_path: Path) -> None:
    """Also where the first one had to replace the file, without the line of a request to retry."""
    target = tmp_path / "out.jsonl"
    lines = [
        json.dumps({"id": "batch_req_1", "custom_id": name, "response": {"status_code": status}})
        for name, status in (("a", 503), ("b", 200))
    ]
    target.write_text("\n".join(lines) + "\n")
    first, statuses = open_answers(target, {"a", "b"})
    with first:
        assert statuses == {"b": 200}
        first.write('{"id": "batch_req_2", "custom_id": "a", "resp')
        first.flush()
        before = target.read_bytes()
        with pytest.raises(ParameterError, match="another batch is writing"):
            open_answers(target, {"a", "b"})
        assert target.read_bytes() == before
    second, _ = open_answers(target, {"a", "b"})
    second.close()
    assert target.read_text() == lines[1] + "\n"


def test_a_file_that_another_batch_replaces_before_the_lock_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the replaced file is free; the new file has the line that is being written."""
    target = tmp_path / "out.jsonl"
    target.touch()
    writing = b'{"id": "batch_req_2", "custom_id": "a", "resp'
    lock = batch_files._lock
    locked: list[Path] = []

    def replace_then_lock(file: TextIO, path: Path) -> None:
        if locked:
            raise ParameterError("OUT", "another batch is writing it")
        locked.append(path)
        new = tmp_path / "new"
        new.write_bytes(writing)
        new.replace(target)
        lock(file, path)

    monkeypatch.setattr(batch_files, "_lock", replace_then_lock)
    with pytest.raises(ParameterError, match="another batch"):
        open_answers(target, {"a"})
    assert target.read_bytes() == writing
