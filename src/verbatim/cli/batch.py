"""`verbatim batch IN OUT`: a file of requests in OpenAI's batch format in, a file of answers out, many at once, resumable.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

The requests go through the server's own handlers, in this process and without a socket, so an answer is what the server would have sent.
What OUT already holds is not asked again: run the same line once more after a crash. A request that is refused for now (429, 503) is asked
again, with fewer beside it; what still has no answer at the end (429 and 5xx) is in OUT, and the next run asks again and takes its line out.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import BackendError, ModelError, ParameterError
from verbatim.base.params import no_key_twice
from verbatim.cli.options import (
    Command,
    Option,
    check_output,
    engine_of,
    engine_options,
    model_options,
)
from verbatim.cli.terminal import note

if TYPE_CHECKING:
    from verbatim.server.settings import Settings

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ALONE = 3  # times that a request which is refused for now is asked with nothing beside it, before that is its answer
LONGEST_PAUSE = 10.0  # seconds, whatever Retry-After says
RESTART_SECONDS = 900.0  # an engine that died has this long to read its model again
Line = dict[str, Any]


@click.command(cls=Command)
@click.argument("source", metavar="IN", type=click.Path(exists=True, dir_okay=False))
@click.argument("target", metavar="OUT", type=click.Path(dir_okay=False))
@click.option(
    "--concurrency",
    cls=Option,
    default=64,
    type=click.IntRange(1, 4096),
    help="requests at once [64]",
)
@click.option(
    "--served-model-name",
    "names",
    cls=Option,
    multiple=True,
    metavar="NAME",
    help="a name requests may use instead of MODEL; repeatable",
)
@click.option("-q", "--quiet", cls=Option, is_flag=True, help="no progress bar, no closing line")
@click.option(
    "--test-engine",
    cls=Option,
    default="",
    hidden=True,
    help="tests: an engine of verbatim.testing instead of a model",
)
@model_options
@engine_options
def command(
    source: str,
    target: str,
    concurrency: int,
    names: tuple[str, ...],
    quiet: bool,
    test_engine: str,
    **flags: Any,
) -> int:
    """Answer every request of IN (OpenAI's batch format, one a line) into OUT. Interrupted, it goes on where it stopped.

    A request that names another model than this one is refused, as a server would. Exit code 1: OUT holds a refusal, now or from an earlier
    run, and says why.
    """
    try:
        from verbatim.server.settings import Limits, Settings
    except ImportError as error:
        raise BackendError(
            f"batch needs {error.name}; install the extra 'server': pip install '.[server]' in the checkout"
        ) from None
    check_output("OUT", target)
    if Path(target).exists() and Path(source).samefile(target):
        raise ParameterError("OUT", f"{target} is IN itself; choose another file for the answers")
    lines = read_requests(Path(source))
    held = answered(Path(target), {line["custom_id"] for line in lines})
    todo = [line for line in lines if line["custom_id"] not in held]
    there = sum(status == 200 for status in held.values())
    limits = Limits(max_queue=concurrency, request_seconds=86_400.0)
    settings = Settings(
        model=flags["model"], served_names=names, engine=engine_of(flags), revision=flags.get("revision"), offline=bool(flags.get("offline")),
        test_engine=test_engine, limits=limits, store_items=0,
    )  # fmt: skip
    if quiet:  # the engine's process has a log of its own
        os.environ.setdefault("VERBATIM_LOG", "WARNING")
    if todo:
        with (
            open(target, "a", encoding="utf-8") as out,
            progress(len(lines), len(held), quiet) as advance,
        ):

            def write(answer: Line) -> None:
                out.write(json.dumps(answer, ensure_ascii=False) + "\n")
                out.flush()
                held[answer["custom_id"]] = status_of(answer)
                advance()

            asyncio.run(answer_all(settings, todo, concurrency, write))
    good = sum(status == 200 for status in held.values())
    if not quiet:
        note(
            f"{len(lines)} requests: {there} were there, {good - there} answered, {len(lines) - good} refused"
        )
    return 0 if good == len(lines) else 1


def read_requests(path: Path) -> list[Line]:
    """Every line is checked before anything runs: a typo in the last one should not cost the night."""
    out: list[Line] = []
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                line = json.loads(raw.decode("utf-8"), object_pairs_hook=no_key_twice)
            except UnicodeDecodeError:
                raise ParameterError(
                    "IN", f"line {number} is not UTF-8; save the file in that encoding"
                ) from None
            except (json.JSONDecodeError, RecursionError):
                raise ParameterError("IN", f"line {number} is not JSON") from None
            except ValueError as error:
                raise ParameterError("IN", f"line {number}: {error}") from None
            if (
                not isinstance(line, dict)
                or not isinstance(line.get("custom_id"), str)
                or not isinstance(line.get("body"), dict)
            ):
                raise ParameterError(
                    "IN", f"line {number} needs custom_id (a string) and body (an object)"
                )
            if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
                raise ParameterError(
                    "IN", f"line {number}: no such key of a request: {min(unknown)[:40]!r}"
                )
            if line.get("method", "POST") != "POST" or line.get("url") not in URLS:
                raise ParameterError(
                    "IN", f"line {number}: method must be POST and url one of {', '.join(URLS)}"
                )
            if any("\ud800" <= letter <= "\udfff" for letter in line["custom_id"]):
                raise ParameterError(
                    "IN",
                    f"line {number}: custom_id {line['custom_id'][:40]!a} holds half a character",
                )
            if line["custom_id"] in seen:
                raise ParameterError(
                    "IN", f"line {number}: custom_id {line['custom_id'][:40]!r} appears twice"
                )
            if line["body"].get("stream"):
                raise ParameterError("IN", f"line {number}: a batch cannot be streamed")
            seen.add(line["custom_id"])
            out.append(line)
    return out


def status_of(answer: Line) -> int:
    status: int = answer["response"]["status_code"]
    return status


def unsettled(status: int) -> bool:
    """Not the request's fault: asked again, it may have an answer."""
    return status == 429 or status >= 500


def answered(path: Path, wanted: set[str]) -> dict[str, int]:
    """The statuses of wanted requests that are done. What is not settled, and a last line cut by a crash, is removed; anything else that is not ours is
    an error, not overwritten."""
    if not path.exists():
        return {}
    raw = path.read_bytes()
    done: dict[str, int] = {}
    kept: list[bytes] = []
    for number, text in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            answer = json.loads(text)
            ours, settled = answer["custom_id"] in wanted, not unsettled(status_of(answer))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ParameterError(
                "OUT", f"line {number} of {path} is not an answer of a batch; choose another file"
            ) from None
        if settled or not ours:
            kept.append(text + b"\n")
        if settled and ours:
            done[answer["custom_id"]] = status_of(answer)
    keep_only(path, raw, b"".join(kept))
    return done


def keep_only(path: Path, raw: bytes, whole: bytes) -> None:
    """Brings a file from `raw` to `whole`, which is part of it. A crash in the middle loses nothing."""
    if raw.startswith(whole):
        if len(whole) < len(raw):
            os.truncate(path, len(whole))
        return
    path = path.resolve()  # a link stays one
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    beside.write_bytes(whole)
    shutil.copymode(path, beside)
    beside.replace(path)


class progress:
    """A bar on a terminal, nothing elsewhere; gives a function to call after each answer."""

    def __init__(self, total: int, before: int, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        columns = (TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task("batch", total=total, completed=before)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


async def answer_all(
    settings: Settings, todo: list[Line], concurrency: int, write: Callable[[Line], None]
) -> None:
    """Starts the engine, asks, ends it."""
    from verbatim.server.app import make_app
    from verbatim.server.process.supervisor import Supervisor
    from verbatim.server.server_state import State

    supervisor = Supervisor(settings)
    state = State(settings, supervisor)
    app = make_app(state)
    supervisor.start()
    try:
        await asyncio.wait(
            (asyncio.ensure_future(supervisor.ready.wait()), supervisor.fatal),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if supervisor.fatal.done():
            raise ModelError(supervisor.fatal.result())

        async def ask_one(line: Line) -> tuple[Line, float]:
            await restarted(supervisor.ready)
            return await ask(app, state.names()[0], line)

        await answer_in_rounds(ask_one, todo, concurrency, write)
    finally:
        await supervisor.close()


async def restarted(ready: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(ready.wait(), RESTART_SECONDS)
    except TimeoutError:
        raise BackendError(
            f"the engine died and is not back after {RESTART_SECONDS:g} seconds; its log says why, and the same line goes on from here"
        ) from None


async def answer_in_rounds(
    ask_one: Callable[[Line], Awaitable[tuple[Line, float]]],
    todo: list[Line],
    concurrency: int,
    write: Callable[[Line], None],
) -> None:
    """A queue that is too short for all is long enough for some: what one round refuses for now, the next asks with half as many at once. The last
    rounds ask one by one: nothing else of ours is in the way then, and an engine that dies there died of this very request."""
    limits = [concurrency >> halved for halved in range(concurrency.bit_length() - 1)] + [1] * ALONE
    refused: list[tuple[Line, Line]] = []
    for limit in limits:
        refused = await one_round(ask_one, todo, limit, write)
        todo = [line for line, _ in refused]
    for _, answer in refused:
        write(answer)


async def one_round(
    ask_one: Callable[[Line], Awaitable[tuple[Line, float]]],
    todo: list[Line],
    limit: int,
    write: Callable[[Line], None],
) -> list[tuple[Line, Line]]:
    """`limit` workers take lines in order, and write each answer when it is there. Returns the lines that are refused for now, and the refusals."""
    waiting = iter(todo)
    refused: list[tuple[Line, Line]] = []

    async def work() -> None:
        for line in waiting:
            answer, pause = await ask_one(line)
            if status_of(answer) in (429, 503):
                refused.append((line, answer))
                await asyncio.sleep(min(pause, LONGEST_PAUSE))
            else:
                write(answer)

    await asyncio.gather(*(work() for _ in range(min(limit, len(todo)))))
    return refused


async def ask(app: Any, model: str, line: Line) -> tuple[Line, float]:
    """One request through the application: its answer, and how long to wait before the next where that is a refusal."""
    asked = line["body"]
    if asked.get("model") is None:  # here there is one model, and nobody else's to be mistaken for
        asked = {**asked, "model": model}
    status, headers, body = await call(app, line["url"], asked)
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    answer = {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": line["custom_id"],
        "response": response,
        "error": None,
    }
    return answer, float(headers.get("retry-after", 1))


async def call(app: Any, url: str, body: Line) -> tuple[int, dict[str, str], Any]:
    """The application as a function: no socket, the same checks and the same answer."""
    raw = json.dumps(body).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
    ]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": url,
             "raw_path": url.encode(), "query_string": b"", "headers": headers, "client": None, "server": ("localhost", 0), "root_path": ""}  # fmt: skip
    sent: list[dict[str, Any]] = []
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # this client never leaves
        given = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(m.get("body", b"") for m in sent[1:])
    return (
        sent[0]["status"],
        {k.decode(): v.decode() for k, v in sent[0]["headers"]},
        json.loads(text),
    )
