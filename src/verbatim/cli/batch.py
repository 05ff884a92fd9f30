"""`verbatim batch IN OUT`: a file of requests in OpenAI's batch format in, a file of answers out.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "...", "body": {...}}}

Requests run concurrently through the server's own handlers, in this process and without a socket,
so an answer is what the server would send. The command resumes: requests that OUT already answers
are skipped. A 429 or 503 is retried at a lower concurrency. Requests that still fail at the end
(429 and 5xx) are written to OUT; the next run retries them and replaces their lines.
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
from verbatim.base.param_checks import no_key_twice
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
SERIAL_RETRIES = 3  # last rounds with concurrency 1, before a 429 or 503 becomes the answer
MAX_PAUSE = 10.0  # seconds; caps Retry-After
RESTART_SECONDS = 900.0  # timeout for a restarted engine to load its model again
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
    """Answer every request of IN (OpenAI's batch format, one per line) into OUT. Run again to
    resume.

    A request that names another model fails, as on a server. Exit code 1: OUT contains an error
    response, from this run or an earlier one.
    """
    try:
        from verbatim.server.settings import Limits, Settings
    except ImportError as error:
        raise BackendError(
            f"batch needs {error.name}; install the extra 'server': "
            "pip install '.[server]' in the checkout"
        ) from None
    check_output("OUT", target)
    if Path(target).exists() and Path(source).samefile(target):
        raise ParameterError("OUT", f"{target} is IN itself; choose another file for the answers")
    lines = read_requests(Path(source))
    statuses = read_answers(Path(target), {line["custom_id"] for line in lines})
    todo = [line for line in lines if line["custom_id"] not in statuses]
    already = sum(status == 200 for status in statuses.values())
    limits = Limits(max_queue=concurrency, request_seconds=86_400.0)
    settings = Settings(
        model=flags["model"],
        served_names=names,
        engine=engine_of(flags),
        revision=flags.get("revision"),
        offline=bool(flags.get("offline")),
        test_engine=test_engine,
        limits=limits,
        store_items=0,
    )
    # The engine process logs by itself; its start and end are no news to a batch.
    os.environ.setdefault("VERBATIM_LOG", "WARNING")
    if todo:
        with (
            open(target, "a", encoding="utf-8") as out,
            progress(len(lines), len(statuses), quiet) as advance,
        ):

            def write(answer: Line) -> None:
                out.write(json.dumps(answer, ensure_ascii=False) + "\n")
                out.flush()
                statuses[answer["custom_id"]] = status_of(answer)
                advance()

            asyncio.run(answer_all(settings, todo, concurrency, write))
    good = sum(status == 200 for status in statuses.values())
    if not quiet:
        note(
            f"{len(lines)} requests: {already} were already answered, "
            f"{good - already} answered now, {len(lines) - good} failed"
        )
    return 0 if good == len(lines) else 1


def read_requests(path: Path) -> list[Line]:
    """Read and check every line before any request runs: a typo in the last line fails at once."""
    out: list[Line] = []
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            where = f"{path}: line {number}"
            try:
                line = json.loads(raw.decode("utf-8"), object_pairs_hook=no_key_twice)
            except UnicodeDecodeError:
                raise ParameterError(
                    "IN", f"{where} is not UTF-8; save the file in that encoding"
                ) from None
            except (json.JSONDecodeError, RecursionError):
                raise ParameterError("IN", f"{where} is not JSON") from None
            except ValueError as error:
                raise ParameterError("IN", f"{where}: {error}") from None
            if (
                not isinstance(line, dict)
                or not isinstance(line.get("custom_id"), str)
                or not isinstance(line.get("body"), dict)
            ):
                raise ParameterError(
                    "IN", f"{where} needs custom_id (a string) and body (an object)"
                )
            if unknown := line.keys() - {"custom_id", "method", "url", "body"}:
                raise ParameterError(
                    "IN", f"{where}: no such key of a request: {min(unknown)[:40]!r}"
                )
            if line.get("method", "POST") != "POST" or line.get("url") not in URLS:
                raise ParameterError(
                    "IN",
                    f"{where}: method must be POST and url one of {', '.join(URLS)}",
                )
            if any("\ud800" <= letter <= "\udfff" for letter in line["custom_id"]):
                raise ParameterError(
                    "IN",
                    f"{where}: custom_id {line['custom_id'][:40]!a} contains an unpaired surrogate",
                )
            if line["custom_id"] in seen:
                raise ParameterError(
                    "IN",
                    f"{where}: custom_id {line['custom_id'][:40]!r} appears twice",
                )
            if line["body"].get("stream"):
                raise ParameterError("IN", f"{where}: a batch cannot be streamed")
            seen.add(line["custom_id"])
            out.append(line)
    return out


def status_of(answer: Line) -> int:
    status: int = answer["response"]["status_code"]
    return status


def is_retryable(status: int) -> bool:
    """Whether a retry may succeed: the status is not caused by the request itself."""
    return status == 429 or status >= 500


def read_answers(path: Path, wanted: set[str]) -> dict[str, int]:
    """The final statuses in `path` of the wanted requests, by custom_id. Retryable answers, and a
    last line that a crash cut, are removed from the file. A file with other content is an error."""
    if not path.exists():
        return {}
    raw = path.read_bytes()
    done: dict[str, int] = {}
    kept: list[bytes] = []
    for number, text in enumerate(raw.split(b"\n")[:-1], 1):
        try:
            answer = json.loads(text)
            ours, final = answer["custom_id"] in wanted, not is_retryable(status_of(answer))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ParameterError(
                "OUT", f"{path}: line {number} is not an answer of a batch; choose another file"
            ) from None
        if final or not ours:
            kept.append(text + b"\n")
        if final and ours:
            done[answer["custom_id"]] = status_of(answer)
    shrink_file(path, raw, b"".join(kept))
    return done


def shrink_file(path: Path, old: bytes, new: bytes) -> None:
    """Replace the content `old` of a file with `new`, a subset of its lines, atomically."""
    if old.startswith(new):
        if len(new) < len(old):
            os.truncate(path, len(new))
        return
    path = path.resolve()  # replace the target of a symlink, not the link
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    temporary.write_bytes(new)
    shutil.copymode(path, temporary)
    temporary.replace(path)


class progress:
    """A progress bar if stderr is a terminal. Entering it returns the function to call per
    answer."""

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
    """Start the engine, run all requests, close the engine."""
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

        async def send_one(line: Line) -> tuple[Line, float]:
            await wait_for_engine(supervisor.ready)
            return await send_request(app, state.names()[0], line)

        await answer_in_rounds(send_one, todo, concurrency, write)
    finally:
        await supervisor.close()


async def wait_for_engine(ready: asyncio.Event) -> None:
    try:
        await asyncio.wait_for(ready.wait(), RESTART_SECONDS)
    except TimeoutError:
        raise BackendError(
            f"the engine died and did not restart within {RESTART_SECONDS:g} seconds; see its log; "
            "run the same command again to resume"
        ) from None


async def answer_in_rounds(
    send_one: Callable[[Line], Awaitable[tuple[Line, float]]],
    todo: list[Line],
    concurrency: int,
    write: Callable[[Line], None],
) -> None:
    """Run all requests; retry those with a 429 or 503 in further rounds, each at half the
    concurrency. The last rounds run one request at a time: then the queue holds nothing else, and
    an engine that dies there was killed by this very request."""
    limits = [concurrency >> halved for halved in range(concurrency.bit_length() - 1)] + [
        1
    ] * SERIAL_RETRIES
    refused: list[tuple[Line, Line]] = []
    for limit in limits:
        refused = await one_round(send_one, todo, limit, write)
        todo = [line for line, _ in refused]
    for _, answer in refused:
        write(answer)


async def one_round(
    send_one: Callable[[Line], Awaitable[tuple[Line, float]]],
    todo: list[Line],
    limit: int,
    write: Callable[[Line], None],
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
                write(answer)

    await asyncio.gather(*(work() for _ in range(min(limit, len(todo)))))
    return refused


async def send_request(app: Any, model: str, line: Line) -> tuple[Line, float]:
    """Send one request through the application. Returns its answer, and the seconds to wait before
    the next request if this one was rejected."""
    request_body = line["body"]
    if request_body.get("model") is None:  # a batch has only one model
        request_body = {**request_body, "model": model}
    status, headers, body = await call(app, line["url"], request_body)
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    answer = {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": line["custom_id"],
        "response": response,
        "error": None,
    }
    return answer, float(headers.get("retry-after", 1))


async def call(app: Any, url: str, body: Line) -> tuple[int, dict[str, str], Any]:
    """Call the ASGI application without a socket: the same checks and the same answer."""
    raw = json.dumps(body).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": ("localhost", 0),
        "root_path": "",
    }
    sent: list[dict[str, Any]] = []
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # this client never disconnects
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
