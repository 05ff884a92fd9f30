"""What a server keeps under --state-dir: stored answers, over restarts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live

from eventually import eventually
from verbatim.base.errors import ParameterError
from verbatim.server.problem import Problem
from verbatim.server.storage.answer_store import Store

pytestmark = pytest.mark.server


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
    assert "cannot write" in refused(plain)


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
