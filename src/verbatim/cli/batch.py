"""`verbatim batch IN OUT`: a file of requests in OpenAI's batch format in, a file of answers out, many at once, resumable.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

The requests go through the server's own handlers, in this process and without a socket, so an answer is what the server would have sent.
What OUT already holds is not asked again: run the same line once more after a crash.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from verbatim.base.errors import BackendError, ModelError, ParameterError
from verbatim.base.params import no_key_twice
from verbatim.cli.options import Command, Option, check_output, engine_of, engine_options, model_options
from verbatim.cli.screen import note

if TYPE_CHECKING:
    from verbatim.server.settings import Settings

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
Line = dict[str, Any]


@click.command(cls=Command)
@click.argument("source", metavar="IN", type=click.Path(exists=True, dir_okay=False))
@click.argument("target", metavar="OUT", type=click.Path(dir_okay=False))
@click.option("--concurrency", cls=Option, default=64, type=click.IntRange(1, 4096), help="requests at once [64]")
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
    "--test-engine", cls=Option, default="", hidden=True, help="tests: an engine of verbatim.testing instead of a model"
)
@model_options
@engine_options
def command(
    source: str, target: str, concurrency: int, names: tuple[str, ...], quiet: bool, test_engine: str, **flags: Any
) -> int:
    """Answer every request of IN (OpenAI's batch format, one a line) into OUT. Interrupted, it goes on where it stopped.

    A request that names another model than this one is refused, as a server would. Exit code 1: some requests were refused; OUT says why.
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
    done = answered(Path(target))
    todo = [line for line in lines if line["custom_id"] not in done]
    limits = Limits(max_queue=concurrency, request_seconds=86_400.0)
    settings = Settings(
        model=flags["model"], served_names=names, engine=engine_of(flags), revision=flags.get("revision"), offline=bool(flags.get("offline")),
        test_engine=test_engine, limits=limits, store_items=0,
    )  # fmt: skip
    failed = 0
    if quiet:  # the engine's process has a log of its own
        os.environ.setdefault("VERBATIM_LOG", "WARNING")
    if todo:
        with open(target, "a", encoding="utf-8") as out, progress(len(lines), len(lines) - len(todo), quiet) as advance:
            failed = asyncio.run(answer_all(settings, todo, concurrency, out, advance))
    if not quiet:
        note(f"{len(lines)} requests: {len(lines) - len(todo)} were there, {len(todo) - failed} answered, {failed} refused")
    return 1 if failed else 0


def read_requests(path: Path) -> list[Line]:
    """Every line is checked before anything runs: a typo in the last one should not cost the night."""
    out: list[Line] = []
    seen: set[str] = set()
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text, object_pairs_hook=no_key_twice)
            except (json.JSONDecodeError, RecursionError):
                raise ParameterError("IN", f"line {number} is not JSON") from None
            except ValueError as error:
                raise ParameterError("IN", f"line {number}: {error}") from None
            if (
                not isinstance(line, dict)
                or not isinstance(line.get("custom_id"), str)
                or not isinstance(line.get("body"), dict)
            ):
                raise ParameterError("IN", f"line {number} needs custom_id (a string) and body (an object)")
            if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
                raise ParameterError("IN", f"line {number}: no such key of a request: {min(unknown)[:40]!r}")
            if line.get("method", "POST") != "POST" or line.get("url") not in URLS:
                raise ParameterError("IN", f"line {number}: method must be POST and url one of {', '.join(URLS)}")
            if line["custom_id"] in seen:
                raise ParameterError("IN", f"line {number}: custom_id {line['custom_id'][:40]!r} appears twice")
            if line["body"].get("stream"):
                raise ParameterError("IN", f"line {number}: a batch cannot be streamed")
            seen.add(line["custom_id"])
            out.append(line)
    return out


def answered(path: Path) -> set[str]:
    """The ids that are done. A last line cut by a crash is removed; anything else that is not ours is an error, not overwritten."""
    if not path.exists():
        return set()
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    done = set()
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            done.add(json.loads(text)["custom_id"])
        except (ValueError, KeyError, TypeError):
            raise ParameterError("OUT", f"line {number} of {path} is not an answer of a batch; choose another file") from None
    if len(whole) < len(raw):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return done


class progress:
    """A bar on a terminal, nothing elsewhere; gives a function to call after each answer."""

    def __init__(self, total: int, before: int, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task("batch", total=total, completed=before)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


async def answer_all(settings: Settings, todo: list[Line], concurrency: int, out: TextIO, advance: Callable[[], None]) -> int:
    """As many workers as may run at once take lines in order; each answer is written and flushed when it is there."""
    from verbatim.server.app import make_app
    from verbatim.server.state import State
    from verbatim.server.supervisor import Supervisor

    supervisor = Supervisor(settings)
    state = State(settings, supervisor)
    app = make_app(state)
    supervisor.start()
    failed = 0
    try:
        await asyncio.wait(
            (asyncio.ensure_future(supervisor.ready.wait()), supervisor.fatal), return_when=asyncio.FIRST_COMPLETED
        )
        if supervisor.fatal.done():
            raise ModelError(supervisor.fatal.result())
        waiting: Iterator[Line] = iter(todo)

        async def work() -> None:
            nonlocal failed
            for line in waiting:
                answer = await ask(app, supervisor, state.names()[0], line)
                failed += answer["response"]["status_code"] != 200
                out.write(json.dumps(answer, ensure_ascii=False) + "\n")
                out.flush()
                advance()

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(todo)))))
    finally:
        await supervisor.close()
    return failed


async def ask(app: Any, supervisor: Any, model: str, line: Line) -> Line:
    """One request through the application. An engine that died is waited for, and the request asked again: twice is enough."""
    status: int = 0
    headers: dict[str, str] = {}
    body: Any = {}
    asked = line["body"]
    if asked.get("model") is None:  # here there is one model, and nobody else's to be mistaken for
        asked = {**asked, "model": model}
    for _ in range(3):
        status, headers, body = await call(app, line["url"], asked)
        if status != 503:
            break
        await supervisor.ready.wait()
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    return {"id": "batch_req_" + secrets.token_hex(12), "custom_id": line["custom_id"], "response": response, "error": None}


async def call(app: Any, url: str, body: Line) -> tuple[int, dict[str, str], Any]:
    """The application as a function: no socket, the same checks and the same answer."""
    raw = json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
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
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, json.loads(text)
