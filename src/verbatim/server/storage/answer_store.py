"""Stored answers, files and batches of every API key, in SQLite: in DIR/state.sqlite3 under
--state-dir DIR, else in memory.

One thread executes all statements in their order, so the event loop never waits for the disk. A
call returns after its transaction is committed: what a client was told survives `kill -9` (WAL). A
tenant (API key) reads its own items only. Responses and chat completions share one bound on number
and bytes, and beyond it the oldest item of the tenant with most is evicted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject, dumps
from verbatim.server.problem import Problem, unsupported

log = logging.getLogger("verbatim.server")
T = TypeVar("T")
Kind = Literal["chat", "response", "file", "batch"]
Statement = tuple[str, *tuple[object, ...]]  # SQL and its values
Rows = list[Any]  # of columns, whose types SQLite knows at run time
FILE = "state.sqlite3"
RESERVE = 8 << 20  # bytes; the WAL has up to 4 MiB to move, and a deletion writes what it frees
VERSION = 1  # of the tables below; a file of a higher one is refused
WINDOW_SECONDS = 24 * 3600  # completion_window of a batch
KEEP_SECONDS = 30 * 24 * 3600  # until a file, or a finished batch, is deleted
PAGE = 256  # lines of a file read at once
ANSWERS = ("chat", "response")
# What the 404 of each kind adds.
WHERE: dict[Kind, str] = {
    "chat": "a chat completion is stored if store is true, and the oldest are evicted",
    "response": "a response is stored unless store is false, and the oldest are evicted",
    "file": "it was never uploaded with this key, was deleted, or has expired",
    "batch": "it was never created with this key, or has expired",
}
# expires: seconds since 1970 at which the item is deleted. null: never, or a batch that still runs.
# lines: those of a file, by number; of a batch's output, by the number of the request's line.
TABLES = f"""
BEGIN;
CREATE TABLE items (tenant TEXT, kind TEXT, id TEXT, bytes INTEGER, expires INTEGER, item TEXT,
                    UNIQUE (tenant, kind, id));
CREATE INDEX answers ON items (tenant, bytes) WHERE kind IN {ANSWERS};
CREATE TABLE lines (file TEXT, n INTEGER, content BLOB, UNIQUE (file, n));
CREATE TRIGGER deleted AFTER DELETE ON items WHEN old.kind = 'file'
    BEGIN DELETE FROM lines WHERE file = old.id; END;
PRAGMA user_version = {VERSION};
COMMIT;
"""
PUT = """INSERT INTO items VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, kind, id)
    DO UPDATE SET bytes = excluded.bytes, expires = excluded.expires, item = excluded.item"""
USE = f"SELECT count(*), sum(bytes), tenant FROM items WHERE kind IN {ANSWERS} GROUP BY tenant"
EVICT = f"""DELETE FROM items WHERE rowid =
    (SELECT min(rowid) FROM items WHERE tenant = ? AND kind IN {ANSWERS})"""
EXPIRE = """DELETE FROM items WHERE expires <= ? AND id NOT IN
    (SELECT json_extract(item, '$.object.input_file_id') FROM items
     WHERE kind = 'batch' AND expires IS NULL)"""
CHANGE = """UPDATE items SET item = json_patch(item, ?) WHERE kind = 'batch' AND id = ?
    AND json_extract(item, '$.object.status') IN (SELECT value FROM json_each(?)) RETURNING id"""


def put_row(tenant: str, kind: Kind, name: str, item: JsonObject, expires: int | None) -> Statement:
    text = dumps(item).decode()
    return PUT, tenant, kind, name, len(text), expires, text


def file_item(
    name: str, size: int, now: int, seconds: int, filename: str, purpose: str
) -> JsonObject:
    times = {"created_at": now, "expires_at": now + seconds}
    file = {"filename": filename, "purpose": purpose, "status": "processed"}
    return {"object": {"id": name, "object": "file", "bytes": size, **times, **file}}


class Store:
    def __init__(self, capacity: int, max_bytes: int, folder: str | None = None) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self.folder = folder
        self.changed = asyncio.Event()  # a batch was created or is to be cancelled
        self._thread = ThreadPoolExecutor(1, "verbatim-store")
        if folder == "":
            raise ParameterError("state_dir", "is empty; name a directory")
        self._db = None if folder is None else _open(Path(folder).expanduser())
        self._reserve = Path(folder or "").expanduser() / "reserve"
        self._take_reserve()

    @property
    def enabled(self) -> bool:
        return self._capacity > 0

    def check_enabled(self, requested: bool) -> None:
        if requested and not self.enabled:
            raise unsupported("store", "this server stores no answers (--store-items 0)")

    def close(self) -> None:
        if self._db is not None:
            self._thread.submit(self._db.close)
        self._thread.shutdown()

    async def put(
        self,
        tenant: str,
        kind: Kind,
        name: str,
        item: JsonObject,
        *more: Statement,
        expires: int | None = None,
        limit: int | None = None,
    ) -> bool:
        """Store or replace `item`: the object that clients get, plus what its routes need. False:
        it is larger than the whole store, or the tenant has `limit` items of its kind."""
        row = put_row(tenant, kind, name, item, expires)
        too_large = kind in ANSWERS and len(str(row[-1])) > self._max_bytes
        count = "SELECT count(*) FROM items WHERE tenant = ? AND kind = ?"

        def work(db: sqlite3.Connection) -> bool:
            if limit is not None and db.execute(count, (tenant, kind)).fetchone()[0] >= limit:
                return False
            for sql, *values in (row, *more):
                db.execute(sql, values)
            while kind in ANSWERS and (most := self._over(db)) is not None:
                db.execute(EVICT, (most,))
            return True

        return not too_large and await self._run(work)

    async def keep(self, tenant: str, kind: Kind, name: str, item: JsonObject) -> list[str]:
        """Store an answer; if that fails, the warning with which the client gets it anyway."""
        try:
            if await self.put(tenant, kind, name, item):
                return []
            why = f"it is larger than the store ({self._max_bytes} bytes)"
        except Problem as problem:
            why = problem.message
        return [f"store: the answer is not stored: {why}"]

    def _over(self, db: sqlite3.Connection) -> str | None:
        """The tenant that gives up its oldest answer; None: all answers fit."""
        rows = db.execute(USE).fetchall()
        for column, most in ((0, self._capacity), (1, self._max_bytes)):
            if sum(row[column] for row in rows) > most:
                return str(max(rows, key=lambda row: row[column])[2])
        return None

    async def get(self, tenant: str, kind: Kind, name: str) -> JsonObject:
        sql = "SELECT item FROM items WHERE tenant = ? AND kind = ? AND id = ?"
        item: JsonObject = json.loads(await self._one(sql, tenant, kind, name))
        return item

    async def delete(self, tenant: str, kind: Kind, name: str) -> None:
        sql = "DELETE FROM items WHERE tenant = ? AND kind = ? AND id = ? RETURNING id"
        await self._one(sql, tenant, kind, name)

    async def _one(self, sql: str, tenant: str, kind: Kind, name: str) -> str:
        """The value that a statement returns for one item; a 404 without such an item."""
        for (value,) in await self.execute((sql, tenant, kind, name)):
            return str(value)
        raise Problem("not_found", f"no stored {kind} has this id; {WHERE[kind]}")

    async def of(self, tenant: str, kind: Kind) -> list[JsonObject]:
        sql = "SELECT item FROM items WHERE tenant = ? AND kind = ? ORDER BY rowid"
        return [json.loads(item) for (item,) in await self.execute((sql, tenant, kind))]

    async def lines(self, file: str) -> AsyncIterator[list[tuple[int, bytes]]]:
        """The lines of a file in their order, some at a time."""
        sql, last = "SELECT n, content FROM lines WHERE file = ? AND n > ? ORDER BY n LIMIT ?", -1
        while page := await self.execute((sql, file, last, PAGE)):
            yield page
            last = page[-1][0]

    async def sizes(self, *files: str) -> list[tuple[int, int]]:
        """The number of lines, and of bytes, of each file."""
        sql = "SELECT count(*), coalesce(sum(length(content)), 0) FROM lines WHERE file = ?"
        return [(await self.execute((sql, file)))[0] for file in files]

    async def unfinished(self, tenant: str | None = None) -> list[tuple[str, JsonObject]]:
        """The batches that still run, of one tenant or of all: (tenant, batch)."""
        sql = """SELECT tenant, item FROM items WHERE kind = 'batch' AND expires IS NULL
            AND tenant = coalesce(?, tenant) ORDER BY rowid"""
        rows = await self.execute((sql, tenant))
        return [(owner, json.loads(item)["object"]) for owner, item in rows]

    async def expire(self, now: int) -> None:
        """Delete what has expired, but no file that a batch still reads."""
        await self.execute((EXPIRE, now))

    async def change_batch(self, name: str, when: tuple[str, ...], **fields: object) -> bool:
        """Set fields of a batch if its status is one of `when`; whether it was."""
        patch = dumps({"object": fields}).decode()
        return bool(await self.execute((CHANGE, patch, name, json.dumps(when))))

    async def execute(self, *statements: Statement) -> Rows:
        """The rows of the last of several statements, which are one transaction. A deletion also
        removes the data from the write-ahead log."""

        def work(db: sqlite3.Connection) -> Rows:
            return [db.execute(sql, values).fetchall() for sql, *values in statements][-1]

        if not statements[0][0].startswith("DELETE"):
            return await self._run(work)
        rows = await self._run(work, frees=True)
        await self._run(_empty_log)
        await self._run(lambda _: self._take_reserve())
        return rows

    def _take_reserve(self) -> None:
        """Fill a file that a deletion on a full disk removes: SQLite needs space to free some."""
        if self.folder is None or self._reserve.exists():
            return
        try:
            self._reserve.touch(0o600)
            self._reserve.write_bytes(bytes(RESERVE))
        except OSError:
            self._reserve.unlink(missing_ok=True)

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, frees: bool = False) -> T:
        def transaction() -> T:
            if self._db is None:
                self._db = _connect(":memory:")
            try:
                with self._db:
                    return work(self._db)
            except sqlite3.OperationalError as error:
                if "full" not in str(error):
                    raise
                if frees and self.folder is not None and self._reserve.exists():
                    self._reserve.unlink()
                    return transaction()
                log.error("%s: %s", self.folder, error)
                why = "the state directory is full; free space, or delete files and answers"
                raise Problem("state_full", why) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)


def _empty_log(db: sqlite3.Connection) -> None:
    """Move the write-ahead log into the database. What fails is done with the next deletion."""
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.OperationalError as error:
        log.warning("deleted data stays in the write-ahead log: %s", error)


def _connect(path: str) -> sqlite3.Connection:
    """A connection with the tables. It holds the file's lock until it is closed: one writer."""
    db = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        db.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA secure_delete = ON")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        found = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if (found or version) and not {"items", "lines"} <= found:
            why = f"another program wrote {path}; name another directory"
            raise ParameterError("state_dir", why)
        if version > VERSION:
            why = f"a newer version of verbatim wrote {path}"
            raise ParameterError("state_dir", f"{why}; start that one, or name another directory")
        (check,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if check != "ok":
            raise sqlite3.DatabaseError(check)
        if version == 0:
            db.execute("PRAGMA auto_vacuum = FULL")  # only before the first page is written
        db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL")
        if version == 0:
            db.executescript(TABLES)
    except BaseException:
        db.close()
        raise
    return db


def _open(folder: Path) -> sqlite3.Connection:
    path = folder / FILE
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            remedy = f"run chmod 700 {folder}, or name a directory that does not exist yet"
            raise ParameterError("state_dir", f"other users can read {folder}; {remedy}")
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        return _connect(str(path))
    except FileExistsError:
        raise ParameterError("state_dir", f"{folder} is a file; name a directory") from None
    except OSError as error:
        raise ParameterError("state_dir", f"cannot write {path}: {error.strerror}") from None
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY":
            why = "is in use by another server; stop it, or name another directory"
        elif "full" in str(error):
            why = "cannot be written: the disk is full; free space"
        else:
            why = f"is damaged ({error}); move {folder} away to start empty, or restore a copy"
        raise ParameterError("state_dir", f"{path} {why}") from None
