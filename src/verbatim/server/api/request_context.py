"""One HTTP call: its body checked, its room taken, its client watched. Every generating handler is written against this.

In: a Starlette Request. Out: Running requests, whole answers, or an event stream; a client that leaves frees the engine within a step,
streamed or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.server.api.api_errors import Problem, problem_of
from verbatim.server.api.to_params import check_finish, renamed
from verbatim.server.api.validate import check, parse_json
from verbatim.server.json_io import dumps
from verbatim.server.process.messages import Generated, Result, Work
from verbatim.server.process.running import Running, Signal
from verbatim.server.server_state import State

log = logging.getLogger("verbatim.server")
R = TypeVar("R", bound=Result)
WRITE_GRACE = 10.0  # seconds a reader has to take the last bytes before its connection is cut
SLOW_GRACE = 1.0  # one that is cut because it did not read has had its time


class ClientGone(Exception):
    """Nobody is left to answer."""


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class Call:
    def __init__(self, request: Request, state: State, route: str) -> None:
        self.request = request
        self.state = state
        self.route = route
        self.id: str = request.scope["verbatim.id"]
        self.tenant: str = request.scope["verbatim.tenant"]
        self.arrived: float = request.scope["verbatim.arrived"]
        self.query: dict[str, str] = {}  # checked against the table
        self.names: Mapping[
            str, str
        ] = {}  # the engine's word for a parameter -> the client's, for what the engine refuses
        self.shift = 0  # messages of ours before the client's own
        self.signal = Signal()
        self.runs: list[Running] = []
        self.deadline: asyncio.Timeout | None = None  # of an open event stream
        self.room = (
            contextlib.ExitStack()
        )  # what admission gave; a stream keeps it until its last byte
        self._timer: asyncio.TimerHandle | None = None

    # ----------------------------------------------------------------------------------------------------------- body

    async def body(self, route: str | None = None) -> dict[str, Any]:
        raw = await self.read_raw()
        data = parse_json(raw, self.state.limits.max_json_depth, self.state.max_json_values)
        if self.state.settings.log_prompts:
            log.info("request %s body %s", self.id, raw.decode(errors="replace"))
        body = check(route or self.route, data)
        self.request.scope["verbatim.labels"] = labels_of(body)
        return body

    async def read_raw(self) -> bytes:
        limit = self.state.limits.max_body_bytes
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(
                "unsupported_media_type", "send the body as application/json", "content-type"
            )
        if self.request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Problem(
                "unsupported_media_type",
                "send the body as it is, without content-encoding",
                "content-encoding",
            )
        length = self.request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise Problem("body_too_large", f"the body is larger than {limit} bytes")
        raw = bytearray()
        try:
            async with asyncio.timeout(self.state.limits.body_seconds):
                async for piece in self.request.stream():
                    raw += piece
                    if len(raw) > limit:
                        raise Problem("body_too_large", f"the body is larger than {limit} bytes")
        except TimeoutError:
            raise Problem("timeout", "the body did not arrive in time") from None
        return bytes(raw)

    # ---------------------------------------------------------------------------------------------------------- engine

    def next_id(self) -> str:
        """The id of the next message to submit; a list of prompts is as many messages."""
        return self.id if not self.runs else f"{self.id}-{len(self.runs)}"

    def submit(self, message: Work) -> Running:
        if self._timer is None:
            wait = self.arrived + self.state.limits.request_seconds - self.state.clock()
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0), self._expire)
        running = self.state.supervisor.submit(message, self.signal)
        running.on_fail, running.own = self._failed, self._own
        self.runs.append(running)
        return running

    def _own(self, problem: Problem) -> Problem:
        return renamed(problem, self.names, self.shift)

    def _expire(self) -> None:
        for running in self.runs:
            if not running.ended:
                running.fail(
                    Problem(
                        "timeout",
                        f"the request took longer than {self.state.limits.request_seconds:g} seconds",
                    )
                )
                self.state.supervisor.abort(running)

    def _failed(self) -> None:
        """The request is over and only its last words are left to write: a reader that takes nothing is not waited for."""
        now = asyncio.get_running_loop().time()
        known_slow = any(
            run.problem is not None and run.problem.code == "slow_reader" for run in self.runs
        )
        end = now + (SLOW_GRACE if known_slow else WRITE_GRACE)
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(min(self.deadline.when() or end, end))

    def close(self) -> None:
        """Ends what still runs and gives the room back. Twice is fine."""
        for running in self.runs:
            running.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.room.close()

    async def accepted(self) -> None:
        """All parts of the request are with the engine, or a Problem is raised while an HTTP status can still be sent. Whoever waits in the
        queue for longer than a keep-alive gets its 200 and the keep-alives; a refusal then comes as an event."""
        await self._while_here(
            self._all(Running.wait_accepted), self.state.settings.keepalive_seconds
        )

    async def results(self, kind: type[R]) -> list[R]:
        """The results of all messages, in order; each is a `kind`."""
        results = await self._while_here(self._all(Running.result))
        for done in results:
            assert isinstance(done, kind), f"{type(done).__name__} is not a {kind.__name__}"
            for choice in done.choices if isinstance(done, Generated) else ():
                check_finish(choice.finish, self.names)
        return results

    async def _all(self, wait: Callable[[Running], Awaitable[Any]]) -> list[Any]:
        return [await wait(running) for running in self.runs]

    async def _while_here(
        self, work: Awaitable[list[Any]], patience: float | None = None
    ) -> list[Any]:
        """`work`, unless the client leaves first. After `patience` seconds an empty list."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(wait_for_disconnect(self.request.receive))
        try:
            await asyncio.wait((task, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not task.done():
                raise ClientGone
            return task.result() if task.done() else []
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(
                gone, task, return_exceptions=True
            )  # until they let go of the signal and of receive()


def labels_of(body: dict[str, Any]) -> dict[str, str]:
    """Whom the client says it asks for: written to the log, as the table of fields promises."""
    user = body.get("user") or (body.get("metadata") or {}).get("user_id")
    named = {"user": user, "safety_identifier": body.get("safety_identifier")}
    return {name: value for name, value in named.items() if isinstance(value, str) and value}


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def sse(data: Any, event: str | None = None) -> bytes:
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + dumps(data) + b"\n\n"


KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def error_event(problem: Problem) -> bytes:
    return sse(problem.body()) + DONE


class EventStream(Response):
    """Sends what `events` yields, each piece whole, while watching for the client to leave. `events` ends by itself when the call's
    runs are closed; the call is closed however this ends. Where `events` raises, `failed` spells the last words of the stream."""

    def __init__(
        self,
        call: Call,
        events: AsyncIterator[bytes],
        failed: Callable[[Problem], bytes] = error_event,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(
            None,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type=media_type,
        )
        del self.headers["content-length"]
        self._call = call
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        state, limits = self._call.state, self._call.state.limits
        left = self._call.arrived + limits.request_seconds + WRITE_GRACE - state.clock()
        try:
            async with asyncio.timeout(max(left, WRITE_GRACE)) as self._call.deadline:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                straight = scope.get(
                    "verbatim.send", send
                )  # past the layers that only look at a head
                while (piece := await self._next()) is not None:
                    await straight({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (
            TimeoutError,
            ClientGone,
        ):  # a reader that takes nothing: there is no polite way left
            if "verbatim.abort" in scope:
                scope["verbatim.abort"]()
        finally:
            watch.cancel()
            self._call.close()
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _next(self) -> bytes | None:
        """None: that was all."""
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            return None
        except Exception as error:
            return self._failed(answer_of(error, self._call.id))

    async def _watch(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        for running in self._call.runs:
            running.close()


class Chunks:
    """Spells the chunks of one stream. What is the same in each, all but the choice, is spelled once."""

    def __init__(self, head: dict[str, Any], tail: dict[str, Any]) -> None:
        self._before = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._after = b"".join(
            b"," + dumps(name) + b":" + dumps(value) for name, value in tail.items()
        )

    def spell(self, choice: dict[str, Any], padding: str | None = None) -> bytes:
        pad = b"" if padding is None else b',"obfuscation":' + dumps(padding)
        return b"%s%s]%s%s}\n\n" % (self._before, dumps(choice), self._after, pad)


Handler = Callable[[Call], Awaitable[Response]]


def answer_of(error: BaseException, call_id: str) -> Problem:
    problem = problem_of(error)
    if problem.code == "internal_error" and not isinstance(error, Problem):
        log.error("request %s failed", call_id, exc_info=error)
    return problem
