"""What a server keeps under --state-dir: stored answers, files and batches, over restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from live_server import Gate, Live

from eventually import eventually
from verbatim.base.errors import ParameterError
from verbatim.server.api.openai.batches import parse_form
from verbatim.server.app import make_app
from verbatim.server.http.api_keys import ApiKeys
from verbatim.server.problem import Problem
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import Limits, Settings
from verbatim.server.storage.answer_store import (
    KEEP_SECONDS,
    RESERVE,
    WINDOW_SECONDS,
    Store,
    file_item,
)
from verbatim.server.storage.batch_runner import BatchRunner

pytestmark = pytest.mark.server
NOW = 1_000_000.0


def line(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 6, "seed": 7, "prompt": name, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


# ------------------------------------------------------------------------------------ the store


async def test_the_store_is_bounded_in_number_and_bytes() -> None:
    store = Store(3, 1000)
    for i in range(5):
        await store.put("t", "chat", f"c{i}", {"id": f"c{i}"})
    assert [item["id"] for item in await store.of("t", "chat")] == ["c2", "c3", "c4"]
    await store.put("t", "chat", "large", {"id": "large", "text": "x" * 960})
    assert [item["id"] for item in await store.of("t", "chat")][-1] == "large"
    assert len(await store.of("t", "chat")) < 3
    # an item that cannot fit evicts nothing
    assert not await store.put("t", "chat", "huge", {"text": "x" * 2000})
    assert [item["id"] for item in await store.of("t", "chat")][-1] == "large"
    store.close()


async def test_storing_waits_for_the_disk_and_the_event_loop_does_not() -> None:
    store, disk = Store(9, 1000), threading.Event()
    store._thread.submit(disk.wait)
    put = asyncio.create_task(store.put("t", "chat", "a", {}))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not put.done()
    disk.set()
    assert await put
    store.close()


async def test_a_key_that_stores_much_evicts_its_own_answers_and_sees_no_others() -> None:
    store = Store(4, 1000)
    await store.put("small", "response", "mine", {"id": "mine"})
    for i in range(9):
        await store.put("big", "chat", f"c{i}", {"id": f"c{i}"})
    assert await store.of("small", "response") == [{"id": "mine"}]
    assert [item["id"] for item in await store.of("big", "chat")] == ["c6", "c7", "c8"]
    for i in range(3):
        await store.put("big", "chat", f"b{i}", {"id": f"b{i}", "text": "x" * 400})
    assert await store.of("small", "response") == [{"id": "mine"}]
    assert await store.of("big", "response") == []
    with pytest.raises(Problem, match="no stored response has this id"):
        await store.get("big", "response", "mine")
    with pytest.raises(Problem):
        await store.delete("big", "response", "mine")
    store.close()


async def test_the_state_directory_is_private_and_outlives_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    store = Store(9, 1000, str(folder))
    await store.put("t", "chat", "a", {"id": "a"})
    with pytest.raises(ParameterError, match="is in use by another server"):
        Store(9, 1000, str(folder))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    store.close()
    again = Store(9, 1000, str(folder))
    assert await again.get("t", "chat", "a") == {"id": "a"}
    again.close()


async def test_a_state_directory_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(ParameterError) as error:
            Store(9, 10**9, str(folder))
        assert str(error.value).startswith("state_dir: ")
        assert str(folder) in str(error.value)
        return str(error.value)

    folder = tmp_path / "state"
    store = Store(9, 10**9, str(folder))
    for i in range(5):
        await store.put("t", "chat", f"c{i}", {"text": "x" * 50_000})
    store.close()
    file = folder / "state.sqlite3"
    good = file.read_bytes()
    for damaged in (b"x" * 5000, good[: len(good) // 2], good[:9000] + b"y" * 9000 + good[18_000:]):
        file.write_bytes(damaged)
        assert "is damaged" in refused(folder)
        assert "move" in refused(folder)
        assert file.read_bytes() == damaged
    file.write_bytes(good)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 2")
    assert "a newer version of verbatim wrote" in refused(folder)
    folder.chmod(0o755)
    assert "run chmod 700" in refused(folder)
    plain = tmp_path / "plain"
    plain.touch(0o600)
    assert "is a file; name a directory" in refused(plain)
    file.unlink()
    folder.chmod(0o700)
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE others (x)")
    assert "another program wrote" in refused(folder)
    assert set(folder.iterdir()) == {file, folder / "reserve"}
    with pytest.raises(ParameterError, match="state_dir: is empty; name a directory"):
        Store(9, 10**9, "")


async def test_deletion_and_expiry_remove_the_data_from_the_disk(tmp_path: Path) -> None:
    store = Store(9, 10**9, str(tmp_path / "state"))

    def on_disk(text: bytes) -> bool:
        return any(text in path.read_bytes() for path in (tmp_path / "state").iterdir())

    async def upload(name: str, *more: Any, expires: int | None = None) -> None:
        row = ("INSERT INTO lines VALUES (?, ?, ?)", name, 1, f"secret {name}".encode())
        await store.put("t", "file", name, {}, row, expires=expires)

    await store.put("t", "chat", "a", {"text": "secret chat"})
    await upload("deleted")
    await upload("expired", expires=10)
    await upload("read", expires=10)
    batch = {"object": {"id": "b", "input_file_id": "read", "status": "in_progress"}}
    await store.put("t", "batch", "b", batch)
    names = ("chat", "deleted", "expired", "read")
    assert [on_disk(f"secret {name}".encode()) for name in names] == [True] * 4
    await store.delete("t", "chat", "a")
    await store.delete("t", "file", "deleted")
    await store.expire(10)
    assert [on_disk(f"secret {name}".encode()) for name in names] == [False, False, False, True]
    await store.put("t", "batch", "b", batch, expires=20)
    await store.expire(20)
    assert not on_disk(b"secret read")
    store.close()


async def test_of_several_deletions_one_finds_the_item(tmp_path: Path) -> None:
    store = Store(9, 10**9, str(tmp_path / "state"))
    await store.put("t", "chat", "a", {"id": "a"})
    deletions = (store.delete("t", "chat", "a") for _ in range(4))
    found = await asyncio.gather(*deletions, return_exceptions=True)
    assert [getattr(error, "status", 200) for error in found] == [200, 404, 404, 404]
    store.close()


class FullDisk:
    """A connection on a full disk: statements that start with one of `fails` do."""

    def __init__(self, db: Any, *fails: str) -> None:
        self.db, self.fails = db, fails

    def execute(self, sql: str, *values: Any) -> Any:
        if sql.startswith(self.fails):
            raise sqlite3.OperationalError("database or disk is full")
        return self.db.execute(sql, *values)

    def __enter__(self) -> Any:
        return self.db.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.db.__exit__(*error)

    def close(self) -> None:
        self.db.close()


async def test_a_full_disk_is_named_and_a_deletion_needs_no_checkpoint(tmp_path: Path) -> None:
    store = Store(9, 10**9, str(tmp_path / "state"))
    await store.put("t", "chat", "a", {"id": "a"})
    assert store._db is not None
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Problem, match="the state directory is full") as full:
        await store.put("t", "chat", "b", {"text": "x" * 99_999})
    assert (full.value.code, full.value.status) == ("state_full", 507)
    assert [item["id"] for item in await store.of("t", "chat")] == ["a"]
    disk: Any = FullDisk(store._db, "PRAGMA wal_checkpoint")
    store._db = disk
    await store.delete("t", "chat", "a")
    assert await store.of("t", "chat") == []
    store.close()


async def test_a_deletion_on_a_full_disk_has_the_space_of_the_reserve(tmp_path: Path) -> None:
    """SQLite writes what it frees to its log first, so it needs space to free some."""
    store, reserve = Store(9, 10**9, str(tmp_path / "state")), tmp_path / "state" / "reserve"
    await store.put("t", "chat", "a", {"id": "a"})
    assert reserve.stat().st_size == RESERVE

    class Full(FullDisk):
        def execute(self, sql: str, *values: Any) -> Any:
            return (super() if reserve.exists() else self.db).execute(sql, *values)

    disk: Any = Full(store._db, "DELETE", "INSERT")
    store._db = disk
    with pytest.raises(Problem, match="the state directory is full"):
        await store.put("t", "chat", "b", {"id": "b"})
    await store.delete("t", "chat", "a")
    assert await store.of("t", "chat") == []
    assert reserve.stat().st_size == RESERVE, "for the next time"
    store.close()


# ----------------------------------------------------------------------------------- the runner


class FakeApp:
    """An ASGI application that answers a prompt with the codes set for it, then with 200; a prompt
    that starts with hang when `released` is set."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.tenants: set[str] = set()
        self.codes: dict[str, list[str]] = {}  # prompt -> error codes before an answer
        self.hangs, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.asked[prompt] += 1
        self.tenants.add(scope["verbatim.tenant"])
        if prompt.startswith("hang"):
            self.hangs.set()
            await self.released.wait()
        codes = self.codes.get(prompt, [])
        code = codes.pop(0) if codes else ""
        status = {"": 200, "overloaded": 429, "invalid_parameter": 400}.get(code, 503)
        body = {"error": {"code": code}} if code else {"text": prompt}
        headers = [*scope["verbatim.headers"], (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class Rig:
    """A store, a runner over a fake application, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(9, 10**6, str(folder))
        self.app, self.now = FakeApp(), NOW
        self.state: Any = SimpleNamespace(
            store=self.store, limits=Limits(), ready=True, clock=lambda: 0.0,
            names=lambda: ["m"], keys=ApiKeys(), facts_of=lambda name: SimpleNamespace(slots=8),
        )  # fmt: skip
        self.runner = asyncio.create_task(BatchRunner(self.state, self.app, lambda: self.now).run())

    async def create(self, *lines: dict[str, Any], name: str = "b", tenant: str = "t") -> None:
        file = file_item(f"in-{name}", 1, int(NOW), KEEP_SECONDS, "in.jsonl", "batch")
        rows = [
            ("INSERT INTO lines VALUES (?, ?, ?)", f"in-{name}", n, jsonl(each))
            for n, each in enumerate(lines, 1)
        ]
        await self.store.put(tenant, "file", f"in-{name}", file, *rows, expires=int(NOW) + 3600)
        batch = {
            "id": name, "input_file_id": f"in-{name}", "endpoint": "/v1/completions",
            "status": "validating", "expires_at": NOW + WINDOW_SECONDS,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }  # fmt: skip
        item = {"object": batch, "outputs": [f"out-{name}", f"err-{name}"], "keep": 7200}
        await self.store.put(tenant, "batch", name, item)
        self.store.changed.set()

    async def batch(self, name: str = "b", tenant: str = "t") -> dict[str, Any]:
        return dict((await self.store.get(tenant, "batch", name))["object"])

    async def ended(self, status: str, name: str = "b") -> dict[str, Any]:
        running = ("validating", "in_progress", "finalizing", "cancelling")
        while (found := await self.batch(name))["status"] in running:
            await asyncio.sleep(0)
        assert found["status"] == status, found
        return found

    async def answered(self, file: str, lines: int) -> None:
        while (await self.store.sizes(file))[0][0] < lines:
            await asyncio.sleep(0)

    async def lines(self, file: str) -> dict[str, dict[str, Any]]:
        rows = [row async for page in self.store.lines(file) for _, row in page]
        found = {row["custom_id"]: row for row in map(json.loads, rows)}
        assert len(found) == len(rows), "each request is answered once"
        return found

    async def stop(self) -> None:
        self.runner.cancel()
        await asyncio.wait((self.runner,))
        self.store.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Callable[[], Rig]]:
    """Makes rigs over one directory; a later one is a server that was started again."""
    rigs: list[Rig] = []

    def make() -> Rig:
        rigs.append(Rig(tmp_path / "state"))
        return rigs[-1]

    yield make
    await rigs[-1].stop()


async def test_a_batch_has_one_line_per_request_and_the_rejected_ones_are_sent_again(
    rig: Callable[[], Rig],
) -> None:
    r = rig()
    r.app.codes = {
        "busy": ["overloaded", "unavailable"] * 20,
        "dies": ["engine_died"] * 99,
        "wrong": ["invalid_parameter"],
    }
    await r.create(*(line(name) for name in ("a", "busy", "dies", "wrong", "b")))
    batch = await r.ended("completed")
    assert batch["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
    good, bad = await r.lines(batch["output_file_id"]), await r.lines(batch["error_file_id"])
    assert list(good) == ["a", "busy", "b"], "in the order of the requests"
    assert {name: row["response"]["status_code"] for name, row in bad.items()} == {
        "dies": 503, "wrong": 400,
    }  # fmt: skip
    assert r.app.asked["busy"] == 41
    assert 3 <= r.app.asked["dies"] < 9
    assert r.app.tenants == {"t"}
    made = (await r.store.get("t", "file", batch["output_file_id"]))["object"]
    sent = b"".join([row async for page in r.store.lines(made["id"]) for _, row in page])
    assert (made["bytes"], made["purpose"]) == (len(sent), "batch_output")
    assert made["expires_at"] == NOW + 7200


async def test_a_restarted_server_runs_the_requests_without_a_line_only(
    rig: Callable[[], Rig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "verbatim.server")
    r = rig()
    await r.create(*(line(f"c{i}") for i in range(9)), line("hang"), line("late"))
    await r.answered("out-b", 10)
    await r.app.hangs.wait()
    await r.stop()
    again = rig()
    await again.app.hangs.wait()
    again.app.released.set()
    batch = await again.ended("completed")
    assert set(again.app.asked) == {"hang"}
    assert caplog.messages == [
        "batch b starts: 11 of 11 requests",
        "batch b resumes: 1 of 11 requests",
    ]
    assert len(await again.lines(batch["output_file_id"])) == 11


async def test_a_cancelled_batch_ends_with_the_requests_that_run(rig: Callable[[], Rig]) -> None:
    r = rig()
    await r.create(*(line(f"hang {i}") for i in range(4)), line("late"))
    await r.create(line("a"), name="next")
    while len(r.app.asked) < 4:
        await asyncio.sleep(0)
    assert await r.store.change_batch("b", ("in_progress",), status="cancelling")
    r.store.changed.set()
    await asyncio.sleep(0)
    await r.stop()  # a restarted server goes on with it
    again = rig()
    batch = await again.ended("cancelled")
    assert not again.app.asked["late"]
    assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 5}
    rows = (await again.lines(batch["error_file_id"])).values()
    assert {row["error"]["code"] for row in rows} == {"batch_cancelled"}
    assert "output_file_id" not in batch
    await again.ended("completed", "next")


async def test_the_window_ends_a_batch_and_its_input_is_kept_until_then(
    rig: Callable[[], Rig],
) -> None:
    r = rig()
    await r.create(line("a"), line("hang"))
    await r.answered("out-b", 1)
    await r.stop()
    again = rig()
    again.now = NOW + WINDOW_SECONDS
    batch = await again.ended("expired")
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (row,) = (await again.lines(batch["error_file_id"])).values()
    assert (row["response"], row["error"]["code"]) == (None, "batch_expired")
    while "in-b" in {file["object"]["id"] for file in await again.store.of("t", "file")}:
        await asyncio.sleep(0)


async def test_one_batch_of_a_key_runs_at_a_time_and_those_of_others_concurrently(
    rig: Callable[[], Rig],
) -> None:
    r = rig()
    await r.create(line("hang"), name="first")
    await r.app.hangs.wait()
    await r.create(line("a"), name="second")
    await r.create(line("z"), name="other", tenant="u")
    while (await r.batch("other", "u"))["status"] != "completed":
        await asyncio.sleep(0)
    assert r.app.asked["a"] == 0
    assert (await r.batch("second"))["status"] == "validating"
    r.app.released.set()
    await r.ended("completed", "second")


@pytest.mark.parametrize(
    ("lines", "why", "at"),
    [
        ([], "the file has no requests", None),
        ([line("a"), line("a")], "line 2: custom_id 'a' appears twice", 2),
        ([line("a"), {**line("b"), "url": "/v1/embeddings"}], "url one of /v1/completions", 2),
        ([line("a", stream=True)], "a batch cannot be streamed", 1),
    ],
)
async def test_a_wrong_file_fails_the_batch_before_any_request(
    rig: Callable[[], Rig], lines: list[dict[str, Any]], why: str, at: int | None
) -> None:
    r = rig()
    await r.create(*lines)
    batch = await r.ended("failed")
    (error,) = batch["errors"]["data"]
    assert why in error["message"]
    assert error["line"] == at
    assert not r.app.asked


# -------------------------------------------------------------------------------- over the API


@contextlib.asynccontextmanager
async def serving(folder: Path, **limits: int) -> AsyncIterator[tuple[openai.AsyncOpenAI, Store]]:
    """A client of the whole application with the fake engine, without a socket, and its store."""
    settings = Settings(
        test_engine="pipeline", served_names=("m",), limits=Limits(**limits),
        state_dir=str(folder),
    )  # fmt: skip
    supervisor = Supervisor(settings)
    supervisor.start()
    await supervisor.ready.wait()
    state = State(settings, supervisor)
    app = make_app(state)
    runner = asyncio.create_task(BatchRunner(state, app).run())
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
    )
    try:
        yield client, state.store
    finally:
        runner.cancel()
        await asyncio.wait((runner,))
        await supervisor.close()
        state.store.close()


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common."""
    return {name: answer[name] for name in ("choices", "seed", "system_fingerprint", "model")}


async def test_the_openai_client_runs_a_batch(tmp_path: Path) -> None:
    rows = [line(f"c{i}", temperature=1.0) for i in range(6)]
    raw = jsonl(*rows, line("bad", temperature=-1))
    limits = {"max_files": 4, "max_batches": 1, "max_file_bytes": len(raw)}
    async with serving(tmp_path / "state", **limits) as (client, _):
        file = await client.files.create(file=("in.jsonl", raw), purpose="batch")
        assert (file.bytes, file.filename, file.status) == (len(raw), "in.jsonl", "processed")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h",
            metadata={"k": "v"},
        )  # fmt: skip
        while batch.status not in ("completed", "failed"):
            batch = await client.batches.retrieve(batch.id)
        assert (batch.status, batch.metadata) == ("completed", {"k": "v"})
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 7, "completed": 6, "failed": 1}
        output = (await client.files.content(batch.output_file_id or "")).text.splitlines()
        for row, answer in zip(rows, map(json.loads, output), strict=True):
            alone = await client.completions.create(**row["body"])
            assert answer["custom_id"] == row["custom_id"]
            assert same(answer["response"]["body"]) == same(alone.to_dict())
        errors = json.loads((await client.files.content(batch.error_file_id or "")).text)
        assert errors["response"]["body"]["error"]["param"] == "temperature"
        assert (await client.files.content(file.id)).content == raw
        assert [each.id async for each in client.files.list(purpose="batch")] == [file.id]
        assert [each.id async for each in client.files.list(limit=1)][-1] == file.id

        with pytest.raises(openai.BadRequestError, match="the batch is completed"):
            await client.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError, match="is an output of a batch"):
            await client.batches.create(
                input_file_id=batch.output_file_id or "", endpoint="/v1/completions",
                completion_window="24h",
            )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="purpose: input should be 'batch'"):
            await client.files.create(file=("in.jsonl", raw), purpose="assistants")
        with pytest.raises(openai.APIStatusError, match="is larger than") as large:
            await client.files.create(file=("in.jsonl", raw + b"\n"), purpose="batch")
        assert large.value.status_code == 413
        after = {"anchor": "created_at", "seconds": 3600}
        short = await client.files.create(
            file=("b.jsonl", raw), purpose="batch", expires_after=after
        )
        assert short.expires_at == short.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="this key has 4 files"):
            await client.files.create(file=("in.jsonl", raw), purpose="batch")
        second = await client.batches.create(
            input_file_id=short.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        assert [each.id async for each in client.batches.list()] == [second.id], "one per key"
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError, match="no stored file has this id; it was never"):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError, match="no stored batch has this id; it was never"):
            await client.batches.retrieve("batch_none")


def test_a_server_that_starts_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=sqlite3.OperationalError("database or disk is full"))
    monkeypatch.setattr("verbatim.server.storage.answer_store._connect", full)
    with pytest.raises(ParameterError, match="cannot be written: the disk is full; free space"):
        Store(9, 10**9, str(tmp_path / "state"))


async def test_an_answer_that_the_full_disk_cannot_keep_is_sent_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    why = "store: the answer is not stored: the state directory is full"
    hi: list[Any] = [{"role": "user", "content": "hi"}]
    async with serving(tmp_path / "state") as (client, store):
        full: Any = FullDisk(store._db, "INSERT")
        store._db = full
        answer = (
            await client.responses.create(model="m", input="hi", max_output_tokens=4)
        ).to_dict()
        assert (len(answer["output"]), answer["store"]) == (1, False)
        assert str(answer["warnings"]).startswith(f"['{why}")
        events = await client.responses.create(
            model="m", input="hi", max_output_tokens=4, stream=True
        )
        assert why in str([event async for event in events][-1])
        chat = await client.chat.completions.create(
            model="m", messages=hi, max_tokens=4, store=True
        )
        assert chat.choices[0].message.content is not None
        assert why in str(chat.to_dict()["warnings"])
        chunks = await client.chat.completions.create(
            model="m", messages=hi, max_tokens=4, store=True, stream=True
        )
        assert why in str([chunk async for chunk in chunks])
        with pytest.raises(openai.InternalServerError) as refused:
            await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (507, "state_full")
    assert "disk is full" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_chat_completion_has_its_metadata(tmp_path: Path) -> None:
    async with serving(tmp_path / "state") as (client, _):
        made = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=4, store=True,
            metadata={"k": "v"},
        )  # fmt: skip
        assert made.to_dict()["metadata"] == {"k": "v"}
        assert (await client.chat.completions.retrieve(made.id)).to_dict() == made.to_dict()


async def test_a_response_needs_an_input_or_an_earlier_response(tmp_path: Path) -> None:
    async with serving(tmp_path / "state") as (client, _):
        for given, code in (
            ({}, "missing_parameter"), ({"input": ""}, "invalid_parameter"),
            ({"input": []}, "invalid_parameter"), ({"instructions": "x"}, "missing_parameter"),
        ):  # fmt: skip
            for path in ("/responses", "/responses/input_tokens"):
                with pytest.raises(openai.BadRequestError, match="input: is ") as refused:
                    await client.post(path, body=given, cast_to=dict[str, Any])
                assert (refused.value.param, refused.value.code) == ("input", code)
        first = await client.responses.create(model="m", input="hi", max_output_tokens=4)
        again = await client.responses.create(
            model="m", previous_response_id=first.id, max_output_tokens=4
        )
        assert again.output


async def test_a_second_cancel_returns_the_batch(tmp_path: Path) -> None:
    async with serving(tmp_path / "state") as (client, store):
        object = {
            "id": "b",
            "status": "cancelling",
            "request_counts": {"completed": 1, "failed": 0},
        }
        await store.put("", "batch", "b", {"object": object}, expires=2**40)
        assert (await client.batches.cancel("b")).status == "cancelling"


async def test_without_a_state_directory_files_and_batches_name_the_flag() -> None:
    app = make_app(State(Settings(), Mock()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        for method, path in itertools.product(("GET", "POST"), ("/v1/files", "/v1/batches")):
            answer = await client.request(method, f"http://localhost{path}", json={})
            assert (answer.status_code, "--state-dir DIR" in answer.text) == (400, True)


async def test_an_upload_that_is_no_file_of_requests_is_refused(tmp_path: Path) -> None:
    state = State(Settings(state_dir=str(tmp_path / "state")), Mock())
    http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(state)))

    async def refused(status: int, why: str, **body: Any) -> None:
        answer = await http.post("http://localhost/v1/files", **body)
        assert answer.status_code == status, answer.text
        assert why in answer.json()["error"]["message"]

    batch = {"purpose": "batch"}
    await refused(415, "multipart/form-data; with curl: -F", json=batch)
    await refused(400, "file: is required", files={"purpose": (None, b"batch")})
    await refused(400, "file: has no name", files={"file": (None, b"{}")}, data=batch)
    await refused(400, "nope: /v1/files has no such", files={"file": ("a", b"{}"), "nope": b"1"})
    many = b"\n" * 50_001
    await refused(400, "more than 50000 lines", files={"file": ("a", many)}, data=batch)
    parts = {f"part {i}": b"" for i in range(30)}
    await refused(400, "is not complete multipart", files={"file": ("a", b"{}"), **parts})
    state.store.close()


def form(*parts: bytes, boundary: bytes = b"b1") -> bytes:
    return b"".join(b"--%s\r\n%s\r\n" % (boundary, part) for part in parts) + b"--b1--\r\n"


def test_a_form_is_read_to_the_byte() -> None:
    name = b'content-disposition: form-data; name="%s"\r\n\r\n%s'
    content = b"\r\n--b\x00\xff\r\n\n"
    file = b'Content-Disposition: form-data; name="file"; filename="a \xc3\xa9.jsonl"\r\n\r\n'
    body = form(name % (b"purpose", b"batch"), file + content, name % (b"x[y]", b"60"))
    for kind in ("multipart/form-data; boundary=b1", 'multipart/form-data; boundary="b1"'):
        fields = {"purpose": "batch", "file": "a é.jsonl", "x": {"y": 60}}
        assert parse_form(kind, body) == (fields, content)
    for wrong in (b"", b"--b1", body[:-4], b"x" + body, body.replace(b"--b1", b"--b2")):
        with pytest.raises(Problem, match="is not complete multipart"):
            parse_form("multipart/form-data; boundary=b1", wrong)
    with pytest.raises(Problem, match="is not complete multipart"):
        parse_form("multipart/form-data", body)
    with pytest.raises(Problem, match="purpose: is given twice"):
        parse_form("multipart/form-data; boundary=b1", form(*[name % (b"purpose", b"batch")] * 2))


# -------------------------------------------------------------------------------- after kill -9


def killed(live: Live) -> None:
    live.process.send_signal(signal.SIGKILL)
    live.process.wait()
    live.client.close()


def test_a_killed_server_has_lost_no_stored_answer(tmp_path: Path) -> None:
    """Clients store as fast as they can, and the server is killed meanwhile."""
    flags = ("--state-dir", str(tmp_path / "state"), "--store-items", "100000")
    live = Live(*flags).wait_ready()
    stored: list[dict[str, Any]] = []

    def store(number: int) -> None:
        with contextlib.suppress(httpx.TransportError):
            while True:
                body = {"input": f"hi {number}", "max_output_tokens": 2}
                stored.append(live.post("/v1/responses", body).json())

    with ThreadPoolExecutor(4) as clients:
        work = [clients.submit(store, number) for number in range(4)]
        eventually(lambda: len(stored) > 40, "the server stores nothing")
        live.process.send_signal(signal.SIGKILL)
        for each in work:
            each.result()
    killed(live)
    live = Live(*flags).wait_ready()
    for answer in stored:
        assert live.client.get(f"/v1/responses/{answer['id']}").json() == answer
    follow = {"input": "and?", "previous_response_id": stored[0]["id"], "max_output_tokens": 2}
    assert live.post("/v1/responses", follow).status_code == 200
    assert live.stop() == 0, live.log_text()


def test_a_killed_server_goes_on_with_its_batch(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    flags = ("--state-dir", str(tmp_path / "state"), "--max-running", "4")
    rows = [line(f"c{i}", temperature=1.0) for i in range(12)]
    live = Live(*flags, engine=f"pipeline,gate={gate.path}").wait_ready()
    file = live.client.post(
        "/v1/files", files={"file": ("in.jsonl", jsonl(*rows))}, data={"purpose": "batch"}
    ).json()
    made = live.client.post(
        "/v1/batches",
        json={"input_file_id": file["id"], "endpoint": "/v1/completions",
              "completion_window": "24h"},
    ).json()  # fmt: skip

    def batch() -> Any:
        return live.client.get(f"/v1/batches/{made['id']}").json()

    def some_answered() -> bool:
        gate.allow(1)
        return bool(batch()["request_counts"]["completed"])

    eventually(some_answered, "no request is answered")
    before = batch()["request_counts"]["completed"]
    killed(live)
    assert 0 < before < 12
    live = Live(*flags).wait_ready()
    eventually(lambda: batch()["status"] == "completed", lambda: str(batch()))
    content = live.client.get(f"/v1/files/{batch()['output_file_id']}/content").text
    answers = [json.loads(row) for row in content.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [row["custom_id"] for row in rows]
    for row, answer in zip(rows, answers, strict=True):
        alone = live.post("/v1/completions", row["body"]).json()
        assert same(answer["response"]["body"]) == same(alone)
    assert live.stop() == 0, live.log_text()
