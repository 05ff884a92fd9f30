"""`verbatim batch IN OUT`: a file of requests in OpenAI's batch format in, a file of answers out.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "...", "body": {...}}}

Requests run concurrently through the server's own handlers, in this process and without a socket,
so an answer is what the server would send. The command resumes: requests that OUT already answers
are skipped. A 429 or 503 is retried at a lower concurrency. Requests that still fail at the end
(429 and 5xx) are written to OUT; the next run retries them and replaces their lines.

With --ray the requests run on several engines, and the answers are in the order of IN. IN and OUT
may be Parquet files (names that end in .parquet).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO

import click

from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.param_checks import no_key_twice
from verbatim.cli.lib.common_options import check_output
from verbatim.cli.lib.options import Command, Option, engine_of, engine_options, model_options
from verbatim.cli.lib.terminal import note

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ANSWER_START = b'{"id":"batch_req_'  # of a line in OUT, without its spaces
Line = dict[str, Any]


@click.command(cls=Command)
@click.argument("files", nargs=-1, metavar="IN OUT")
@click.option(
    "-i",
    "--input-file",
    "source",
    cls=Option,
    metavar="IN",
    type=click.Path(exists=True, dir_okay=False),
    help="the requests, instead of the argument IN",
)
@click.option(
    "-o",
    "--output-file",
    "target",
    cls=Option,
    metavar="OUT",
    type=click.Path(dir_okay=False),
    help="the answers, instead of the argument OUT",
)
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
@click.option(
    "--ray",
    cls=Option,
    section="Replicas",
    is_flag=False,
    flag_value="local",
    default=None,
    metavar="[ADDRESS]",
    help="run the requests on Ray: HOST:PORT, auto (this machine's cluster), or a new local one",
)
@click.option(
    "--replicas",
    cls=Option,
    section="Replicas",
    default=None,
    metavar="N|MIN-MAX",
    help="engines that share the requests; needs --ray [1]",
)
@click.option("-q", "--quiet", cls=Option, is_flag=True, help="no progress bar, no closing line")
@click.option(
    "--test-engine",
    cls=Option,
    default="",
    hidden=True,
    help="tests: an engine of verbatim.testing.fakes instead of a model",
)
@model_options
@engine_options
def command(
    files: tuple[str, ...],
    source: str | None,
    target: str | None,
    concurrency: int,
    names: tuple[str, ...],
    quiet: bool,
    test_engine: str,
    ray: str | None,
    replicas: str | None,
    **flags: Any,
) -> int:
    """Answer every request of IN (OpenAI's batch format, one per line) into OUT. Run again to
    resume.

    A request that names another model fails, as on a server. Exit code 1: OUT contains an error
    response, from this run or an earlier one.
    """
    source, target = in_and_out(files, source, target)
    try:
        from verbatim.server.batch_requests import answer_all
        from verbatim.server.settings import Limits, Settings
    except ImportError as error:
        raise BackendError(
            f"batch needs {error.name}; install the extra 'server': "
            "pip install '.[server]' in the checkout"
        ) from None
    if ray is None and replicas is not None:
        raise ParameterError("replicas", "needs --ray; without it one engine runs the batch")
    if ray is not None:
        from verbatim.scale.ray_options import (
            RayOptions,
            parse_address,
            parse_replicas,
            require_ray,
        )

        on_ray = RayOptions(parse_address(ray), parse_replicas(replicas or 1))
        require_ray()
    check_output("OUT", target)
    journal = journal_of(Path(target))
    for path in (Path(target), journal):
        if path.exists() and not path.is_file():  # reading a device may never end
            raise ParameterError("OUT", f"{str(path)!r} is not a regular file; choose another path")
    if Path(target).exists() and Path(source).samefile(target):
        raise ParameterError("OUT", f"{target} is IN itself; choose another file for the answers")
    if journal != Path(target):
        from verbatim.scale.parquet import require_pyarrow

        require_pyarrow()
    lines = read_requests(Path(source))
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
    out, statuses = open_answers(journal, {line["custom_id"] for line in lines})
    with out:
        todo = [line for line in lines if line["custom_id"] not in statuses]
        already = sum(status == 200 for status in statuses.values())
        with progress(len(lines), len(statuses), quiet or not todo) as advance:

            def write(answer: Line) -> None:
                out.write(json.dumps(answer, ensure_ascii=False) + "\n")
                out.flush()
                statuses[answer["custom_id"]] = answer["response"]["status_code"]
                advance()

            if todo and ray is None:
                asyncio.run(answer_all(settings, todo, concurrency, write))
            elif todo:
                from verbatim.scale.batch_on_ray import answer_on_ray

                answer_on_ray(settings, on_ray, todo, concurrency, write)
        if journal != Path(target):
            from verbatim.scale.parquet import write_answers

            write_answers(journal, Path(target), [line["custom_id"] for line in lines])
    good = sum(status == 200 for status in statuses.values())
    if not quiet:
        note(
            f"{len(lines)} requests: {already} were already answered, "
            f"{good - already} answered now, {len(lines) - good} failed"
        )
    return 0 if good == len(lines) else 1


def in_and_out(files: tuple[str, ...], source: str | None, target: str | None) -> tuple[str, str]:
    """IN and OUT, each an argument or a flag (-i and -o, as `vllm run-batch` has them)."""
    rest = list(files)
    if source is None and rest:
        source = rest.pop(0)
    if target is None and rest:
        target = rest.pop(0)
    if rest:
        raise ParameterError("files", f"{rest[0]!r} is a third file; batch takes two, IN and OUT")
    if source is None or target is None:
        name = "IN" if source is None else "OUT"
        raise ParameterError(name, "is missing; write verbatim batch IN OUT")
    if not Path(source).is_file():
        raise ParameterError("IN", f"{source!r} is not a file; give the file of requests")
    return source, target


def journal_of(target: Path) -> Path:
    """The JSONL file that answers are appended to: OUT itself, or beside an OUT in Parquet, which
    cannot be appended to and is written at the end."""
    return target.with_name(target.name + ".jsonl") if is_parquet(target) else target


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def raw_lines(path: Path) -> Generator[bytes, None, None]:
    if is_parquet(path):
        from verbatim.scale.parquet import read_rows

        yield from read_rows(path)
        return
    with open(path, "rb") as file:
        yield from file


def read_requests(path: Path) -> list[Line]:
    """Read and check every line before any request runs: a typo in the last line fails at once."""
    out: list[Line] = []
    seen: set[str] = set()
    with contextlib.closing(raw_lines(path)) as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            where = f"{path}: line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")  # editors add a BOM
                line = json.loads(text, object_pairs_hook=no_key_twice)
            except UnicodeDecodeError:
                raise ParameterError(
                    "IN", f"{where} is not UTF-8; save the file in that encoding"
                ) from None
            except (json.JSONDecodeError, RecursionError):
                raise ParameterError(
                    "IN", f"{where} is not JSON; a line is one object {{…}}"
                ) from None
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
                    "IN",
                    f"{where} has the key {min(unknown)[:40]!r}; the keys of a request are"
                    " custom_id, method, url and body",
                )
            if line.get("method", "POST") != "POST" or line.get("url") not in URLS:
                raise ParameterError(
                    "IN",
                    f"{where}: method must be POST and url one of {', '.join(URLS)}",
                )
            if any("\ud800" <= letter <= "\udfff" for letter in line["custom_id"]):
                raise ParameterError(
                    "IN",
                    f"{where}: custom_id {line['custom_id'][:40]!a} contains an unpaired surrogate,"
                    " which is not text; use another id",
                )
            if line["custom_id"] in seen:
                raise ParameterError(
                    "IN",
                    f"{where}: custom_id {line['custom_id'][:40]!r} appears twice; each request"
                    " needs its own",
                )
            if line["body"].get("stream"):
                raise ParameterError("IN", f"{where}: a batch cannot be streamed; leave out stream")
            seen.add(line["custom_id"])
            out.append(line)
    return out


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
    *lines, cut = raw.split(b"\n")
    start = cut.replace(b" ", b"")[: len(ANSWER_START)]
    if not ANSWER_START.startswith(start):  # a file that is no batch's, and would be erased
        lines.append(cut)
    for number, text in enumerate(lines, 1):
        try:
            answer = json.loads(text)
            status = answer["response"]["status_code"]
            ours, final = answer["custom_id"] in wanted, not is_retryable(status)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ParameterError(
                "OUT", f"{path}: line {number} is not an answer of a batch; choose another file"
            ) from None
        if final or not ours:
            kept.append(text + b"\n")
        if final and ours:
            done[answer["custom_id"]] = status
    shrink_file(path, raw, b"".join(kept))
    return done


def open_answers(path: Path, wanted: set[str]) -> tuple[TextIO, dict[str, int]]:
    """OUT, open for appending, and what read_answers() finds in it. The file is locked until it is
    closed: a second batch would answer every request again, and remove the line being written."""
    while True:
        out = open(path, "a", encoding="utf-8")  # noqa: SIM115  the caller closes it
        try:
            _lock(out, path)
            # Another batch may have replaced the file between open() and the lock. Its new file is
            # locked by that batch, and read_answers() would remove the line being written.
            if _is_open_file(out, path):
                statuses = read_answers(path, wanted)
                if _is_open_file(out, path):
                    return out, statuses
        except BaseException:
            out.close()
            raise
        out.close()  # read_answers() wrote a new file, which is not locked yet


def _is_open_file(file: TextIO, path: Path) -> bool:
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def _lock(file: TextIO, path: Path) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ParameterError(
            "OUT", f"another batch is writing {path}; wait for it, or choose another file"
        ) from None
    except (ImportError, OSError):  # Windows; a file system without locks
        pass


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
