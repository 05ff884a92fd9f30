"""The context of one HTTP request: body validation, engine submission, disconnects, streaming.

In: a Starlette Request. Out: `Running` engine requests, JSON responses, or an event stream. When a
client disconnects, its engine requests are aborted within one step, streamed or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.base.json_io import JsonMapping, JsonObject, dumps
from verbatim.base.records import Usage
from verbatim.server.api.common.default_params import with_defaults
from verbatim.server.api.common.field_effects import take_ignored, translate
from verbatim.server.api.common.field_rules import RequestBody
from verbatim.server.api.common.json_body import parse_json
from verbatim.server.api.common.route import ApiProtocol, ApiRoute
from verbatim.server.api.common.to_params import check_finish, with_client_names
from verbatim.server.api.common.tool_errors import name_tool
from verbatim.server.api.common.validate import check
from verbatim.server.model_pool import ModelPool, ServedModel
from verbatim.server.problem import Problem, invalid, problem_of, shutting_down
from verbatim.server.process.messages import Generate, Generated, Result, WireFinish, Work
from verbatim.server.process.running import Running, Signal
from verbatim.server.server_state import State

log = logging.getLogger("verbatim.server")
R = TypeVar("R", bound=Result)
B = TypeVar("B", bound=RequestBody)
FORM = "multipart/form-data"
CURL_TYPES = ("", "application/x-www-form-urlencoded", "text/plain")  # sent by `curl -d`
WRITE_GRACE = 10.0  # seconds a client has to read the last bytes before it is disconnected
SLOW_GRACE = 1.0  # seconds, for a client that has already proved to read too slowly


class ClientDisconnected(Exception):
    """The client disconnected before its response was ready."""


class Json(Response):
    media_type = "application/json"

    @classmethod
    def of(cls, **fields: Any) -> Json:
        """An object with these fields, and status 200."""
        return cls(fields)

    def render(self, content: Any) -> bytes:
        return dumps(content)


class RequestContext:
    def __init__(
        self, request: Request, state: State, route: ApiRoute, protocol: ApiProtocol
    ) -> None:
        self.request = request
        # Of several models, the first, until choose_model().
        self.state = state if state.pool is None else state.for_model(state.pool.first)
        self.route = route
        self.protocol = protocol
        self.id: str = request.scope["verbatim.id"]
        self.tenant: str = request.scope["verbatim.tenant"]
        self.arrived: float = request.scope["verbatim.arrived"]
        # A batch's line has the rest of its window (storage/batch_runner.py).
        self.seconds: float = request.scope.get("verbatim.seconds", state.limits.request_seconds)
        self.query: dict[str, str] = {}  # validated against the route's queries
        # engine parameter name -> client field name, for errors that the engine reports
        self.names: Mapping[str, str] = {}
        self.aliases: Mapping[str, str] = {}  # this server's field -> the client's (translate())
        self.shift = 0  # number of messages that the server put before the client's messages
        # the client's field behind each message, where it sends no messages in OpenAI's form
        self.places: Sequence[str] = ()
        self.given: JsonObject = {}  # the validated body as JSON, in this server's names
        self.tools: Sequence[JsonMapping] = ()  # those whose schemas bind the output
        self.notices: list[str] = []  # warnings about fields that have no effect here
        self.load_seconds = 0.0  # this request waited so long for its model to be loaded
        self.signal = Signal()
        self.runs: list[Running] = []
        self._not_abortable: list[str] = []  # ids of messages that the engine does not abort
        self.deadline: asyncio.Timeout | None = None  # timeout of the open event stream
        # resources taken at admission; a stream holds them until its last byte
        self.admission = contextlib.ExitStack()
        self._timer: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------- body

    async def body(self, model: type[B]) -> B:
        """The request as the route's model. `given` is the same as plain JSON, in this server's
        names: chat templates and sampling parameters are made from that."""
        raw = await self.read_raw()
        await self.first_load()
        data = parse_json(raw, self.state.limits.max_json_depth, self.state.max_json_values)
        if self.state.settings.log_prompts:
            log.info("request %s body %s", self.id, raw.decode(errors="replace"))
        body, made = check(self.route, data)
        assert isinstance(made, model), self.route.path
        self.notices = take_ignored(type(made), body)
        self.aliases = translate(self.route.fields, body)
        self.request.scope["verbatim.labels"] = labels_of(body)
        if self.protocol.any_case and "model" in body:
            body["model"] = self.state.served_case(body["model"])
        self.given = body
        await self.choose_model(body.get("model"), body)
        return made

    def served_model(self) -> str:
        """The served name of the model that the body names."""
        return self.state.check_model(self.given.get("model"))

    async def choose_model(self, name: str | None, body: JsonMapping | None = None) -> None:
        """Of several models: load the one that the request names, and hold it until the end, unless
        the route says that this request loads nothing."""
        pool = self.state.pool
        if pool is None:
            return
        name = self.state.check_model(name)
        name = pool.adapters.get(name, name)
        model = pool.models[name]
        if self.route.loads_nothing(body or {}, model):
            self.state = self.state.for_model(model)
            return
        start, is_loaded = self.state.clock(), model.supervisor.ready.is_set()
        wait = self.arrived + self.seconds - start
        [model] = await self._unless_disconnected(self._hold(pool, name, max(wait, 0)))
        self.state = self.state.for_model(model)
        self.load_seconds = 0.0 if is_loaded else self.state.clock() - start

    async def first_load(self) -> None:
        """Wait until the only model has been loaded for the first time, the server drains, or
        load_wait_seconds have passed; a 503 follows. Before the body is parsed, because a limit on
        its values depends on the model's context."""
        state, waits = self.state, self.route.is_queued or self.route.shows_model
        if not waits or state.pool is not None or state.supervisor.facts is not None:
            return
        start = state.clock()
        left = self.arrived + min(state.settings.load_wait_seconds, state.limits.request_seconds)
        events = (state.supervisor.ready, state.admission.draining)
        await self._unless_disconnected(_first_of(events), max(left - start, 0))
        if state.supervisor.facts is None and state.admission.draining.is_set():
            raise shutting_down()
        self.load_seconds = state.clock() - start

    async def _hold(self, pool: ModelPool, name: str, seconds: float) -> list[ServedModel]:
        model = await pool.hold(name, seconds)
        self.admission.callback(pool.release, name)
        return [model]

    async def read_raw(self, wanted: str = "application/json", limit: int = 0) -> bytes:
        """The body, of the type `wanted` and at most `limit` bytes; 0: max_body_bytes."""
        limit = limit or self.state.limits.max_body_bytes
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A web page of another site can send a body of these types without asking first, but never
        # without its Origin.
        curl = self.protocol.any_content_type and "origin" not in self.request.headers
        if kind != wanted and not (curl and kind in CURL_TYPES):
            flag = "-F FIELD=VALUE" if wanted == FORM else f"-H 'Content-Type: {wanted}'"
            why = f"send the body as {wanted}; with curl: {flag}"
            raise Problem("unsupported_media_type", why, "content-type")
        if self.request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            why = "send the body as it is, without content-encoding"
            raise Problem("unsupported_media_type", why, "content-encoding")
        length = self.request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limit:
            raise Problem("body_too_large", f"the body is larger than {limit} bytes")
        raw = await self.state.admission.bodies.read(self.tenant, self.request.stream(), limit)
        self.admit()
        return raw

    def admit(self) -> None:
        """Take a place in the queue, on a route that needs one. Raises the rejection."""
        if self.route.is_queued:
            self.admission.enter_context(self.state.admission.admit(self.tenant))

    # ------------------------------------------------------------------------------ engine

    def next_id(self) -> str:
        """The id of the next message to submit. A list of prompts has one message per prompt."""
        return self.id if not self.runs else f"{self.id}-{len(self.runs)}"

    def submit(self, message: Work) -> Running:
        if self._timer is None:
            wait = self.arrived + self.seconds - self.state.clock()
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0), self._expire)
        if isinstance(message, Generate):
            if self.adapter:
                params = {**message.params, "adapter": self.adapter}
                message = replace(message, params=params)
            message = with_defaults(message, self.given, self.state, self.protocol.defaults)
        running = self.state.supervisor.submit(message, self.signal)
        running.on_fail, running.localize = self._failed, self._with_client_names
        running.on_usage = self._count_usage if self.tenant else None
        self.runs.append(running)
        if not isinstance(message, Generate):
            self._not_abortable.append(message.request_id)
        return running

    def _count_usage(self, usage: Usage) -> None:
        self.state.admission.spend(self.tenant, "tokens_per_minute", usage.total_tokens)
        self.state.metrics.used(self.tenant, usage)

    @property
    def adapter(self) -> str:
        """The LoRA adapter that `model` or `adapter` names; empty: the base model."""
        named, field = self.state.adapter_of(self.given.get("model")), self.given.get("adapter", "")
        if named and field and field != named:
            raise invalid("adapter", f"model names another adapter, {named!r}")
        return str(named or field)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model with the request's adapter."""
        facts = self.state.facts
        return facts.adapters.get(self.adapter, facts.fingerprint)

    def _with_client_names(self, problem: Problem) -> Problem:
        named = with_client_names(problem, self.names, self.shift, self.places)
        return name_tool(named, self.tools, self.names)

    def in_client_names(self, warning: str) -> str:
        """A warning of the engine about a field, under the client's name of it."""
        named = Problem("invalid_parameter", warning, warning.partition(":")[0])
        return self._with_client_names(named).message

    def _expire(self) -> None:
        why = f"the request took longer than {self.seconds:g} seconds"
        for running in self.runs:
            if not running.ended:
                running.fail(Problem("timeout", why))
                self.state.supervisor.abort(running)

    def _failed(self) -> None:
        """Shorten the stream's deadline after a failure: only the error event is left to send, and
        a client that does not read must not hold the connection."""
        now = asyncio.get_running_loop().time()
        problems = (run.problem for run in self.runs if run.problem is not None)
        slow = any(problem.code == "slow_reader" for problem in problems)
        end = now + (SLOW_GRACE if slow else WRITE_GRACE)
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(min(self.deadline.when() or end, end))

    def close(self) -> None:
        """Abort what still runs and release admission. May be called twice. Messages that the
        engine cannot abort may still queue there, so max_queue counts them until their end."""
        for running in self.runs:
            running.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._release()

    def _release(self) -> None:
        for request_id in self._not_abortable:
            if self.state.supervisor.ledger.on_close(request_id, self._release_soon):
                return
        self.admission.close()

    def _release_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._release)

    async def accepted(self) -> None:
        """Wait until the engine has accepted all parts, so that a rejection gets an HTTP status.

        Returns after a keep-alive interval even if the request still queues: the client then gets
        its 200 and keep-alives, and a later rejection is an error event."""
        seconds = self.state.settings.keepalive_seconds
        await self._unless_disconnected(self._all(Running.wait_accepted), seconds)

    async def results(self, kind: type[R]) -> list[R]:
        """The results of all messages, in order; each is of type `kind`."""
        results = await self._unless_disconnected(self._all(Running.result))
        for done in results:
            assert isinstance(done, kind), f"{type(done).__name__} is not a {kind.__name__}"
            for choice in done.choices if isinstance(done, Generated) else ():
                self.check_finish(choice.finish)
        return results

    def check_finish(self, finish: WireFinish | None) -> None:
        """Raise the Problem of a choice that ended in an error, about a tool if it has one."""
        try:
            check_finish(finish, self.names)
        except Problem as problem:
            raise name_tool(problem, self.tools, self.names) from None

    async def _all(self, wait: Callable[[Running], Awaitable[Any]]) -> list[Any]:
        return [await wait(running) for running in self.runs]

    async def _unless_disconnected(
        self, work: Awaitable[list[Any]], timeout: float | None = None
    ) -> list[Any]:
        """The result of `work`; an empty list after `timeout` seconds. Raises if the client
        disconnects first."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(wait_for_disconnect(self.request.receive))
        try:
            await asyncio.wait((task, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not task.done():
                raise ClientDisconnected
            return task.result() if task.done() else []
        finally:
            gone.cancel()
            task.cancel()
            # Wait until both tasks have released the signal and receive().
            await asyncio.gather(gone, task, return_exceptions=True)


async def _first_of(events: Sequence[asyncio.Event]) -> list[object]:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return []


def labels_of(body: JsonObject) -> dict[str, str]:
    """The end-user labels of a request, for the log line."""
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


BODY = {"type": "http.response.body"}
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def error_event(problem: Problem) -> bytes:
    return sse(problem.body()) + DONE


class EventStream(Response):
    """Sends what `events` yields and watches for a disconnect.

    A disconnect closes the runs, which ends `events`. The request context is closed in every case.
    If `events` raises, `failed` formats the final error event."""

    def __init__(
        self,
        call: RequestContext,
        events: AsyncIterator[bytes],
        failed: Callable[[Problem], bytes] = error_event,
        media_type: str = "text/event-stream",
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, headers=headers, media_type=media_type)
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
                head = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
                # Bypass the middleware that only inspects response headers.
                send_body = scope.get("verbatim.send", send)
                while (piece := await self._next()) is not None:
                    await send_body({**BODY, "body": piece, "more_body": True})
                await send({**BODY, "body": b"", "more_body": False})
        except (TimeoutError, ClientDisconnected):  # the client does not read: cut the connection
            if "verbatim.abort" in scope:
                scope["verbatim.abort"]()
        finally:
            # The engine may fail the runs before it answers their abort; a finished timeout cannot
            # be rescheduled then.
            self._call.deadline = None
            watch.cancel()
            self._call.close()
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _next(self) -> bytes | None:
        """The next event; None at the end of the stream."""
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            return None
        except Exception as error:
            return self._failed(to_problem(error, self._call.id))

    async def _watch(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        for running in self._call.runs:
            running.close()


class Chunks:
    """Serialises the chunks of one stream. Everything but the choice and the running usage is
    serialised once.

    The chunk with a choice's finish_reason is held back until the next one, so that the last of the
    stream can have the warnings: clients read no chunk without choices."""

    def __init__(self, head: JsonObject, tail: JsonObject) -> None:
        self._held = b""  # without its closing brace
        self._before = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._after = _members(tail)

    def add(
        self, choice: JsonObject, padding: str | None = None, usage: dict[str, int] | None = None
    ) -> list[bytes]:
        """The chunks that can be sent now: the one held back, and this one unless it is held."""
        pad = b"" if padding is None else b',"obfuscation":' + dumps(padding)
        after = self._after if usage is None else b',"usage":' + dumps(usage)
        made = b"%s%s]%s%s" % (self._before, dumps(choice), after, pad)
        out, self._held = self.end(), b""
        if choice["finish_reason"] is None:
            return [*out, made + b"}\n\n"]
        self._held = made
        return out

    def end(self, **more: Any) -> list[bytes]:
        """The chunk held back, if any, with further fields."""
        return [self._held + _members(more) + b"}\n\n"] if self._held else []


def _members(fields: JsonObject) -> bytes:
    return b"".join(b"," + dumps(name) + b":" + dumps(value) for name, value in fields.items())


def to_problem(error: BaseException, call_id: str) -> Problem:
    problem = problem_of(error)
    if problem.code == "internal_error" and not isinstance(error, Problem):
        log.error("request %s failed", call_id, exc_info=error)
    return problem
