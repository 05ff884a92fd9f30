"""Runs the batches of /v1/batches through the server's own handlers, as `verbatim batch` does.

In: the unfinished batches in the store, which the routes write and a restarted server finds again.
Out: one line per request, stored when its answer is complete, and the batch's status:

    validating -> in_progress -> finalizing -> completed | expired | cancelled,  or failed

A request that has a line is never run again. The requests are those of the key that made the batch
and share the engine as such (ADR 27). One batch of a key runs at a time, in at most half of the
key's places, so that the key's other requests find one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable

from verbatim.base.errors import ParameterError
from verbatim.base.json_io import JsonObject, dumps
from verbatim.server.batch_files import RequestCheck
from verbatim.server.batch_requests import (
    MAX_PAUSE,
    answer_in_rounds,
    new_line_id,
    send_request,
    status_of,
)
from verbatim.server.problem import Problem
from verbatim.server.server_state import State
from verbatim.server.storage.answer_store import KEEP_SECONDS, Statement, file_item, put_row

log = logging.getLogger("verbatim.server")
CONCURRENCY = 64  # requests of one batch at once, as of `verbatim batch`
SWEEP_SECONDS = 60.0  # between two deletions of what has expired, and two attempts
POLL_SECONDS = 0.2  # until the model is loaded
# Rejections before the engine saw the request, and the end of the window: no line is written. After
# a crash (engine_died) the request is sent a few times only, at last alone: it may be the cause.
WAIT_CODES = ("overloaded", "key_overloaded", "unavailable", "timeout")
NOT_SENT: JsonObject = {"response": {"status_code": 0}}
ADD_LINE = "INSERT OR IGNORE INTO lines VALUES (?, ?, ?)"
OUTPUTS = ("output_file_id", "error_file_id")  # for status 200, and for the rest


class BatchRunner:
    def __init__(self, state: State, app: object, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._state = state
        self._store = state.store
        self._app = app
        self._clock = clock
        self._running: dict[str, str] = {}  # batch -> tenant
        self._cancelled: set[str] = set()

    async def run(self) -> None:
        """Run the unfinished batches and delete what has expired, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._store.changed.clear()
                try:
                    await self._store.expire(int(self._clock()))
                    await self._start(group)
                except Problem as problem:  # a full disk
                    text = "batches: %s; tried again within %g s"
                    log.error(text, problem.message, SWEEP_SECONDS)
                except Exception:
                    log.exception("batches: tried again within %g s", SWEEP_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_SECONDS):
                        await self._store.changed.wait()

    async def _start(self, group: asyncio.TaskGroup) -> None:
        """Start the oldest batch of each tenant, and every one that is to end."""
        for tenant, batch in await self._store.unfinished():
            name = batch["id"]
            if batch["status"] == "cancelling":
                self._cancelled.add(name)
            is_next = tenant not in self._running.values() or self._is_over(batch)
            if is_next and name not in self._running:
                self._running[name] = tenant
                group.create_task(self._run_one(tenant, name))

    def _is_over(self, batch: JsonObject) -> bool:
        return batch["id"] in self._cancelled or self._clock() >= batch["expires_at"]

    async def _run_one(self, tenant: str, name: str) -> None:
        try:
            item = await self._store.get(tenant, "batch", name)
            batch = item["object"]
            check = RequestCheck(batch["input_file_id"], "input_file_id", (batch["endpoint"],))
            try:
                await self._check(check, batch["input_file_id"])
            except ParameterError as error:
                why: JsonObject = {"code": "invalid_file", "message": str(error)}
                why |= {"param": error.param, "line": check.at}
                batch["errors"] = {"object": "list", "data": [why]}
                await self._end(tenant, item, "failed")
            else:
                await self._answer(tenant, item, check.numbers)
                await self._finish(tenant, item, check.numbers)
            self._store.changed.set()  # the tenant's next batch
        except Problem as problem:
            log.error("batch %s: %s; tried again within %g s", name, problem.message, SWEEP_SECONDS)
        except Exception:
            log.exception("batch %s: tried again within %g s", name, SWEEP_SECONDS)
        finally:
            del self._running[name]

    async def _check(self, check: RequestCheck, file: str) -> None:
        """Check every line of the file; a ParameterError names the first wrong one."""

        def check_page(page: list[tuple[int, bytes]]) -> None:
            for number, raw in page:
                check.line(number, raw)

        async for page in self._store.lines(file):
            await asyncio.to_thread(check_page, page)
        if not check.numbers:
            check.at = None
            raise check.wrong("the file has no requests")

    async def _todo(self, item: JsonObject, numbers: dict[str, int]) -> dict[str, int]:
        """The requests that have no line yet."""
        sql = "SELECT n FROM lines WHERE file IN (?, ?)"
        done = {n for (n,) in await self._store.execute((sql, *item["outputs"]))}
        return {name: n for name, n in numbers.items() if n not in done}

    async def _answer(self, tenant: str, item: JsonObject, numbers: dict[str, int]) -> None:
        batch, now = item["object"], int(self._clock())
        counts = {"total": len(numbers)}
        fields = {"status": "in_progress", "in_progress_at": now, "request_counts": counts}
        await self._store.change_batch(batch["id"], ("validating",), **fields)
        while not (self._state.ready or self._is_over(batch)):
            await asyncio.sleep(POLL_SECONDS)

        async def write(answer: JsonObject) -> None:
            if status_of(answer):
                output, n = item["outputs"][status_of(answer) != 200], numbers[answer["custom_id"]]
                await self._store.execute((ADD_LINE, output, n, dumps(answer) + b"\n"))

        lines = [{"n": n} for n in (await self._todo(item, numbers)).values()]
        verb = "starts" if batch["status"] == "validating" else "resumes"
        log.info("batch %s %s: %d of %d requests", batch["id"], verb, len(lines), len(numbers))
        most = self._concurrency(tenant)
        await answer_in_rounds(lambda one: self._send(tenant, batch, one["n"]), lines, most, write)

    def _concurrency(self, tenant: str) -> int:
        facts, limits = self._state.facts_of(self._state.names()[0]), self._state.limits
        own = self._state.keys.limits_of(tenant).max_open or limits.max_per_key
        places = min(own or limits.max_queue, (facts and facts.slots) or 1)
        return max(1, min(CONCURRENCY, places // 2))

    async def _send(self, tenant: str, batch: JsonObject, n: int) -> tuple[JsonObject, float]:
        """Send the request of line `n` as its key's own, with the rest of the window as its time
        limit, until the engine has answered it or the batch is over."""
        sql = "SELECT content FROM lines WHERE file = ? AND n = ?"
        while not self._is_over(batch):
            [(raw,)] = await self._store.execute((sql, batch["input_file_id"], n))
            request_id = f"req_{secrets.token_hex(12)}"
            known = {
                "verbatim.id": request_id,
                "verbatim.arrived": self._state.clock(),
                "verbatim.seconds": batch["expires_at"] - self._clock(),
                "verbatim.tenant": tenant,
                "verbatim.headers": [(b"x-request-id", request_id.encode())],
            }
            line = json.loads(raw.decode("utf-8-sig"))
            answer, pause = await send_request(self._app, None, line, known)
            error = answer["response"]["body"].get("error") or {}
            if error.get("code") not in WAIT_CODES:
                return answer, pause
            await asyncio.sleep(min(pause, MAX_PAUSE))
        return NOT_SENT, 0

    async def _finish(self, tenant: str, item: JsonObject, numbers: dict[str, int]) -> None:
        """Store the output files and the status, with a line for each request that was not run."""
        name, outputs, now = item["object"]["id"], item["outputs"], int(self._clock())
        fields = {"status": "finalizing", "finalizing_at": now}
        await self._store.change_batch(name, ("in_progress",), **fields)
        item, todo = await self._store.get(tenant, "batch", name), await self._todo(item, numbers)
        end = "cancelled" if name in self._cancelled else "expired" if todo else "completed"
        error = {"code": f"batch_{end}", "message": f"the batch is {end}; this request was not run"}
        more: list[Statement] = []
        good, bad = await self._store.sizes(*outputs)
        for custom_id, n in todo.items():
            line = {"id": new_line_id(), "custom_id": custom_id, "response": None, "error": error}
            row = dumps(line) + b"\n"
            more.append((ADD_LINE, outputs[1], n, row))
            bad = (bad[0] + 1, bad[1] + len(row))
        for field, file, (lines, size) in zip(OUTPUTS, outputs, (good, bad), strict=True):
            if lines:
                filename = f"{name}_{field.removesuffix('_file_id')}.jsonl"
                made = file_item(file, size, now, item["keep"], filename, "batch_output")
                more.append(put_row(tenant, "file", file, made, now + item["keep"]))
                item["object"][field] = file
        item["object"]["request_counts"] = {
            "total": len(numbers), "completed": good[0], "failed": bad[0],
        }  # fmt: skip
        await self._end(tenant, item, end, *more)

    async def _end(self, tenant: str, item: JsonObject, status: str, *more: Statement) -> None:
        now, name = int(self._clock()), item["object"]["id"]
        item["object"] |= {"status": status, f"{status}_at": now}
        await self._store.put(tenant, "batch", name, item, *more, expires=now + KEEP_SECONDS)
        self._cancelled.discard(name)
