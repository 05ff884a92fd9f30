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
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.error_lines import missing_extra
from verbatim.cli.lib.options import (
    engine_of,
    engine_options,
    fake_engine_option,
    model_options,
    ray_options,
)
from verbatim.cli.lib.terminal import note
from verbatim.cli.lib.texts import check_output
from verbatim.server.batch_files import (
    Line,
    check_files,
    is_parquet,
    journal_of,
    open_answers,
    read_requests,
)
from verbatim.server.settings import Limits, Settings

# runs requests: (settings, requests, concurrency, write an answer)
Runner = Callable[[Settings, list[Line], int, Callable[[Line], None]], None]


@as_command(
    ray_options("requests", "engines that share the requests"),
    fake_engine_option,
    model_options,
    engine_options(),
)
def command(
    files: tuple[str, ...] = argument("IN OUT", nargs=-1),
    source: str | None = flag(
        "the requests, instead of the argument IN",
        *("-i", "--input-file"),
        metavar="IN",
        type=click.Path(exists=True, dir_okay=False),
    ),
    target: str | None = flag(
        "the answers, instead of the argument OUT",
        *("-o", "--output-file"),
        metavar="OUT",
        type=click.Path(dir_okay=False),
    ),
    concurrency: int = flag("requests at once", default=64, least=1, most=4096),
    names: tuple[str, ...] = flag(
        "a name requests may use instead of MODEL", "--served-model-name", metavar="NAME"
    ),
    quiet: bool = flag("no progress bar, no closing line", "-q", "--quiet"),
    *,
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
    run = _runner(ray, replicas)
    check_output("OUT", target)
    check_files(Path(source), Path(target))
    lines = _requests(Path(source), Path(target))
    settings = Settings(
        served_names=names,
        engine=engine_of(flags),
        limits=Limits(max_queue=concurrency, request_seconds=86_400.0),
        store_items=0,
        **{name: flags[name] for name in ("model", "revision", "offline", "test_engine")},
    )
    # The engine process logs by itself; its start and end are no news to a batch.
    os.environ.setdefault("VERBATIM_LOG", "WARNING")
    return _answer(lambda *job: run(settings, *job), lines, Path(target), concurrency, quiet)


def _answer(
    run: Callable[[list[Line], int, Callable[[Line], None]], None],
    lines: list[Line],
    path: Path,
    concurrency: int,
    quiet: bool,
) -> int:
    """Run the requests that `path` does not answer yet. 1: an answer is an error."""
    out, statuses = open_answers(journal_of(path), {line["custom_id"] for line in lines})
    with out:
        todo = [line for line in lines if line["custom_id"] not in statuses]
        already = sum(status == 200 for status in statuses.values())
        with progress(len(lines), len(statuses), quiet or not todo) as advance:

            def write(answer: Line) -> None:
                out.write(json.dumps(answer, ensure_ascii=False) + "\n")
                out.flush()
                statuses[answer["custom_id"]] = answer["response"]["status_code"]
                advance()

            if todo:
                run(todo, concurrency, write)
        if is_parquet(path):
            from verbatim.scale.batch.parquet import write_answers

            write_answers(journal_of(path), path, [line["custom_id"] for line in lines])
    good = sum(status == 200 for status in statuses.values())
    if not quiet:
        now, failed = good - already, len(lines) - good
        before = f"{len(lines)} requests: {already} were already answered"
        note(f"{before}, {now} answered now, {failed} failed")
    return 0 if good == len(lines) else 1


def _runner(ray: str | None, replicas: str | None) -> Runner:
    """The function that runs requests: in this process, or on Ray."""
    try:
        from verbatim.server.batch_requests import answer_all
    except ImportError as error:
        raise missing_extra("batch", error) from None
    if ray is None:
        if replicas is not None:
            raise ParameterError("replicas", "needs --ray; without it one engine runs the batch")
        return lambda *job: asyncio.run(answer_all(*job))
    from verbatim.scale.ray_options import RayOptions, parse_address, parse_replicas, require_ray

    on_ray = RayOptions(parse_address(ray), parse_replicas(replicas or 1))
    require_ray()
    from verbatim.scale.batch.batch_on_ray import answer_on_ray

    return lambda settings, *job: answer_on_ray(settings, on_ray, *job)


def _requests(source: Path, target: Path) -> list[Line]:
    if not (is_parquet(source) or is_parquet(target)):
        return read_requests(source)
    from verbatim.scale.batch.parquet import read_rows, require_pyarrow

    require_pyarrow()
    return read_requests(source, read_rows(source) if is_parquet(source) else None)


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
