"""`verbatim batch`: what is refused for now is asked again, what is refused for good stays so, and a file that cannot be read is refused by its line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_said import Call

from verbatim.cli import batch

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
    """By request; no request may have two answers."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["status_code"] for line in lines}
    assert len(found) == len(lines)
    return found


class Desk:
    """Answers `room` requests at once, and refuses the others for now; those in `never` always."""

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
async def test_what_is_refused_for_now_is_asked_again(room: int, status: int) -> None:
    desk, written = Desk(room, status=status), []
    names = [f"c{i}" for i in range(50)]
    await batch.answer_in_rounds(desk, [request(name) for name in names], 16, written.append)
    assert sorted(w["custom_id"] for w in written) == sorted(names)
    assert {batch.status_of(w) for w in written} == {200}


@pytest.mark.parametrize("concurrency", [1, 2, 7, 64])
async def test_what_is_never_served_is_given_up_in_the_end(concurrency: int) -> None:
    desk, written = Desk(100, never=("bad",)), []
    await batch.answer_in_rounds(
        desk, [request("bad"), request("good")], concurrency, written.append
    )
    assert [(w["custom_id"], batch.status_of(w)) for w in written] == [("good", 200), ("bad", 429)]
    assert desk.asked.count("good") == 1
    assert desk.asked.count("bad") == concurrency.bit_length() - 1 + batch.SERIAL_RETRIES


async def test_an_engine_that_does_not_come_back_ends_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "RESTART_SECONDS", 0.0)
    with pytest.raises(batch.BackendError, match="did not restart"):
        await batch.wait_for_engine(asyncio.Event())


def test_more_than_the_server_takes_at_once(verbatim: Call, tmp_path: Path) -> None:
    """The real handlers: few answers with rows may be open at once."""
    from verbatim.server.server_state import MAX_ROWS

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
def test_unsettled_lines_are_asked_anew_and_refusals_stay(
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
    for _ in range(2):  # the refusal is told every time, and asked once
        said = verbatim("batch", str(source), str(target), *ENGINE)
        assert said.code == 1, said.err
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
def test_a_file_that_holds_something_else_is_left_alone(
    verbatim: Call, tmp_path: Path, text: str
) -> None:
    source, target = write_lines(tmp_path / "in", [request("a")]), tmp_path / "out"
    target.write_text(json.dumps(answer("a", 429)) + "\n" + text + "\n")
    before = target.read_bytes()
    said = verbatim("batch", str(source), str(target), *ENGINE)
    assert said.code == 2
    assert "OUT: line 2 of" in said.err
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
def test_what_cannot_be_read_or_written_is_named_before_anything_runs(
    verbatim: Call, tmp_path: Path, raw: bytes, says: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(json.dumps(request("a")).encode() + b"\n" + raw + b"\n")
    said = verbatim("batch", str(source), str(target), "-q", "--test-engine", "no such engine")
    assert said.code == 2
    assert said.err.startswith(f"verbatim: IN: {says}")
    assert not target.exists()
