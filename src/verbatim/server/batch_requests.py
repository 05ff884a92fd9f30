"""Runs the requests of a batch through the server's own handlers, in this process and without a
socket.

In: request lines of OpenAI's batch format, checked. Out: one answer line per request, as the
server would send it, without cached_tokens: their number depends on which requests ran before, and
an answer depends on its request alone. A 429 or 503 is retried at a lower concurrency.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from verbatim.base.errors import BackendError, ModelError
from verbatim.base.json_io import JsonObject
from verbatim.server.app import make_app
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

SERIAL_RETRIES = 3  # last rounds with concurrency 1, before a 429 or 503 becomes the answer
MAX_PAUSE = 10.0  # seconds; caps Retry-After
RESTART_SECONDS = 900.0  # timeout for a restarted engine to load its model again
Line = JsonObject
Send = Callable[[Line], Awaitable[tuple[Line, float]]]  # (answer, seconds to wait if refused)
Write = Callable[[Line], Awaitable[None]]


def status_of(answer: Line) -> int:
    status: int = answer["response"]["status_code"]
    return status


class BatchEngine:
    """An engine process and the application over it. Requests run through the same handlers as on a
    server."""

    def __init__(self, settings: Settings) -> None:
        self._supervisor = Supervisor(settings)
        self._state = State(settings, self._supervisor)
        self._app = make_app(self._state)

    async def start(self) -> None:
        """Returns when the model is loaded; raises a ModelError if it cannot be."""
        self._supervisor.start()
        if why := await self._supervisor.load_error():
            raise ModelError(why)

    async def answer(
        self, todo: list[Line], concurrency: int, write: Callable[[Line], None]
    ) -> None:
        """Call write() once per request, in the order of completion."""

        async def send_one(line: Line) -> tuple[Line, float]:
            await wait_for_engine(self._supervisor.ready)
            return await send_request(self._app, self._state.names()[0], line)

        async def put(answer: Line) -> None:
            write(answer)

        await answer_in_rounds(send_one, todo, concurrency, put)

    async def close(self) -> None:
        await self._supervisor.close()


async def answer_all(
    settings: Settings, todo: list[Line], concurrency: int, write: Callable[[Line], None]
) -> None:
    """Start the engine, run all requests, close the engine."""
    engine = BatchEngine(settings)
    try:
        await engine.start()
        await engine.answer(todo, concurrency, write)
    finally:
        await engine.close()


async def wait_for_engine(ready: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(ready.wait(), RESTART_SECONDS)
    except TimeoutError:
        why = f"the engine died and did not restart within {RESTART_SECONDS:g} seconds"
        remedy = "see its log; run the same command again to resume"
        raise BackendError(f"{why}; {remedy}") from None


async def answer_in_rounds(
    send_one: Send, todo: list[Line], concurrency: int, write: Write
) -> None:
    """Run all requests; retry those with a 429 or 503 in further rounds, each at half the
    concurrency. The last rounds run one request at a time: then the queue holds nothing else, and
    an engine that dies there was killed by this very request."""
    limits = [concurrency >> halved for halved in range(concurrency.bit_length() - 1)]
    limits += [1] * SERIAL_RETRIES
    refused: list[tuple[Line, Line]] = []
    for limit in limits:
        refused = await one_round(send_one, todo, limit, write)
        todo = [line for line, _ in refused]
    for _, answer in refused:
        await write(answer)


async def one_round(
    send_one: Send, todo: list[Line], limit: int, write: Write
) -> list[tuple[Line, Line]]:
    """`limit` workers take requests in order and write each answer as it completes. Returns the
    requests that got a 429 or 503, with those answers."""
    pending = iter(todo)
    refused: list[tuple[Line, Line]] = []

    async def work() -> None:
        for line in pending:
            answer, pause = await send_one(line)
            if status_of(answer) in (429, 503):
                refused.append((line, answer))
                await asyncio.sleep(min(pause, MAX_PAUSE))
            else:
                await write(answer)

    await asyncio.gather(*(work() for _ in range(min(limit, len(todo)))))
    return refused


async def send_request(
    app: object, model: str | None, line: Line, known: JsonObject | None = None
) -> tuple[Line, float]:
    """Send one request through the application. Returns its answer, and the seconds to wait before
    the next request if this one was rejected. `model`: that of a request that names none. `known`:
    what the application has decided about the caller, who is then not checked."""
    request_body = line["body"]
    if request_body.get("model") is None and model is not None:
        request_body = {**request_body, "model": model}
    status, headers, body = await call(app, line["url"], request_body, known or {})
    drop_cached_tokens(body)
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    answer: Line = {"id": new_line_id(), "custom_id": line["custom_id"]}
    answer |= {"response": response, "error": None}
    return answer, float(headers.get("retry-after", 1))


def new_line_id() -> str:
    return "batch_req_" + secrets.token_hex(12)


def drop_cached_tokens(body: Line) -> None:
    """Remove the one count of `usage` that depends on the order of the requests."""
    usage = body.get("usage") or {}
    for name in ("prompt_tokens_details", "input_tokens_details"):  # chat, responses
        usage.get(name, {}).pop("cached_tokens", None)


async def call(
    app: Any, url: str, body: Line, known: JsonObject
) -> tuple[int, dict[str, str], JsonObject]:
    """Call the ASGI application without a socket: the same checks and the same answer."""
    raw = json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(raw)).encode()))
    scope: JsonObject = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"}
    scope |= {"scheme": "http", "method": "POST", "path": url, "raw_path": url.encode()}
    scope |= {
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": ("localhost", 0),
    }
    scope |= known
    sent: list[JsonObject] = []
    given = False

    async def receive() -> JsonObject:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # this client never disconnects
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: JsonObject) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(m.get("body", b"") for m in sent[1:])
    names = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], names, json.loads(text)
