"""`verbatim batch`: a 429 or 503 is retried, other errors are final, and a bad line of the input
fails with its line number."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli_result import Call
from verbatim.server import batch_requests as batch

pytestmark = pytest.mark.server
ENGINE = ("-q", "--test-engine", "pipeline,pause=0.005", "--served-model-name", "any")


def request(name: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "url": "/v1/completions",
        "body": {"prompt": "x", "max_tokens": 4, "seed": 7, **body},
    }


def answer(name: str, status: int) -> dict[str, Any]:
    return {
        "id": "batch_req_1",
        "custom_id": name,
        "response": {"status_code": status, "request_id": "", "body": {}},
        "error": None,
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def statuses(path: Path) -> dict[str, int]:
    """Status per request; no request may have two answers."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["status_code"] for line in lines}
    assert len(found) == len(lines)
    return found


class FakeServer:
    """A fake server: answers `room` concurrent requests and rejects the others with a retryable
    status; rejects those in `never` always."""

    def __init__(self, room: int, never: tuple[str, ...] = (), status: int = 429) -> None:
        self.room, self.never, self.status = room, never, status
        self.open = 0
        self.asked: list[str] = []

    async def __call__(self, line: dict[str, Any]) -> tuple[dict[str, Any], float]:
        name = line["custom_id"]
        self.asked.append(name)
        if self.open >= self.room or name in self.never:
            return answer(name, self.status), 0.0
        self.open += 1
        for _ in range(5):
            await asyncio.sleep(0)
        self.open -= 1
        return answer(name, 200), 0.0


@pytest.mark.parametrize(("room", "status"), [(1, 429), (3, 503), (100, 429)])
async def test_a_429_or_503_is_retried_until_answered(room: int, status: int) -> None:
    server, written = FakeServer(room, status=status), []
    names = [f"c{i}" for i in range(50)]

    async def write(answer: Any) -> None:
        written.append(answer)

    await batch.answer_in_rounds(server, [request(name) for name in names], 16, write)
    assert sorted(w["custom_id"] for w in written) == sorted(names)
    assert {batch.status_of(w) for w in written} == {200}


@pytest.mark.parametrize("concurrency", [1, 2, 7, 64])
async def test_a_request_that_always_fails_is_given_up_after_the_serial_retries(
    concurrency: int,
) -> None:
    server, written = FakeServer(100, never=("bad",)), []

    async def write(answer: Any) -> None:
        written.append(answer)

    await batch.answer_in_rounds(server, [request("bad"), request("good")], concurrency, write)
    assert [(w["custom_id"], batch.status_of(w)) for w in written] == [("good", 200), ("bad", 429)]
    assert server.asked.count("good") == 1
    assert server.asked.count("bad") == concurrency.bit_length() - 1 + batch.SERIAL_RETRIES


@pytest.mark.parametrize("name", ["prompt_tokens_details", "input_tokens_details"])
def test_an_answer_has_no_count_that_depends_on_earlier_requests(name: str) -> None:
    body = {"usage": {"total_tokens": 9, name: {"cached_tokens": 3, "audio_tokens": 0}}}
    batch.drop_cached_tokens(body)
    assert body == {"usage": {"total_tokens": 9, name: {"audio_tokens": 0}}}
    for other in ({}, {"error": {"code": "x"}}, {"usage": None}, {"usage": {"total_tokens": 1}}):
        before = dict(other)
        batch.drop_cached_tokens(other)
        assert other == before


async def test_an_engine_that_does_not_restart_ends_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "RESTART_SECONDS", 0.0)
    with pytest.raises(batch.BackendError, match="did not restart"):
        await batch.wait_for_engine(asyncio.Event())


def test_requests_above_the_limit_on_rows_are_retried(verbatim: Call, tmp_path: Path) -> None:
    """Uses the real handlers, which limit the concurrent requests with rows of logits."""
    from verbatim.server.admission import MAX_ROWS

    rows = {
        "explain": 1,
        "receipt": True,
        "explain_rows": True,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    lines = [request(f"c{i}", **rows) for i in range(2 * MAX_ROWS)]
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    assert verbatim("batch", str(source), str(target), *ENGINE, "--concurrency", "8").code == 0
    assert set(statuses(target).values()) == {200}
    assert len(statuses(target)) == len(lines)


@pytest.mark.parametrize("link", [False, True])
def test_retryable_answers_are_retried_and_final_errors_stay(
    verbatim: Call, tmp_path: Path, link: bool
) -> None:
    source = write_lines(
        tmp_path / "in",
        [request(name) for name in ("a", "b", "c", "d")] + [request("bad", temperature=-1)],
    )
    held = [
        answer("a", 200),
        answer("b", 429),
        answer("other", 503),
        answer("c", 500),
        answer("d", 503),
    ]
    real = target = write_lines(tmp_path / "out", held)
    if link:
        target = tmp_path / "link"
        target.symlink_to(real)
    first = real.read_bytes().splitlines(keepends=True)
    for _ in range(2):  # a final error is reported in every run, and requested once
        result = verbatim("batch", str(source), str(target), *ENGINE)
        assert result.code == 1, result.err
        assert statuses(real) == {"a": 200, "other": 503, "b": 200, "c": 200, "d": 200, "bad": 400}
        assert real.read_bytes().startswith(first[0] + first[2])
        assert target.is_symlink() == link
    assert sorted(
        path.name for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()
    ) == ["in", "out"]
    write_lines(source, [request("a"), request("b")])
    assert verbatim("batch", str(source), str(target), *ENGINE).code == 0, (
        "a refusal of another file's request is not this one's"
    )


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        json.dumps({"custom_id": "a"}),
        json.dumps({"custom_id": "a", "response": None}),
        json.dumps({"custom_id": ["a"], "response": {"status_code": 200}}),
        json.dumps({"custom_id": "a", "response": {"status_code": "200"}}),
        "[" * 100_000,
    ],
)
def test_an_output_file_with_other_content_is_not_changed(
    verbatim: Call, tmp_path: Path, text: str
) -> None:
    source, target = write_lines(tmp_path / "in", [request("a")]), tmp_path / "out"
    target.write_text(json.dumps(answer("a", 429)) + "\n" + text + "\n")
    before = target.read_bytes()
    result = verbatim("batch", str(source), str(target), *ENGINE)
    assert result.code == 2
    assert f"OUT: {target}: line 2 is not" in result.err
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            json.dumps(request("b", prompt="caf")).encode().replace(b"caf", b"caf\xe9"),
            "line 2 is not UTF-8",
        ),
        (
            json.dumps(request("\ud800")).encode(),
            "line 2: custom_id '\\ud800' contains an unpaired surrogate",
        ),
    ],
)
def test_a_bad_line_or_an_unwritable_output_fails_before_any_request(
    verbatim: Call, tmp_path: Path, raw: bytes, says: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(json.dumps(request("a")).encode() + b"\n" + raw + b"\n")
    result = verbatim("batch", str(source), str(target), "-q", "--test-engine", "no such engine")
    assert result.code == 2
    assert result.err.startswith(f"verbatim: IN: {source}: {says}")
    assert not target.exists()
