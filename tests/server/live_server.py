"""A live server for tests: a real process on loopback, with a fake engine of verbatim.testing or a
model."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import fork_server
import httpx

from eventually import HANG_SECONDS, eventually

NAMES = ("m", "gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small")
NEVER = "1e9"  # seconds
# HOST:PORT of a Ray: every server here has two replicas on it (tests/scale/test_ray.py sets it).
ON_RAY = os.environ.get("VERBATIM_TEST_SERVER_ON_RAY", "")
RAY_FLAGS = ("--ray", ON_RAY, "--replicas", "2", "--threads", "1") if ON_RAY else ()
REPLICA = re.compile(r'replica="[^"]*",?')
LISTENING = re.compile(r"listening on (https?)://[^ ]*?:(\d+) ")


class Live:
    """One `verbatim serve` process. Its log goes to a file, which is shown if it fails to start.
    With clock=True the clock of its HTTP process moves only by advance() (clocked_server.py).
    Requests without a seed get 1, 2, 3 and so on, unless random_seeds. Unless `fresh`, both
    processes are forks of one that has imported their modules (fork_server.py)."""

    def __init__(
        self,
        *flags: str,
        engine: str | None = "pipeline",
        env: dict[str, str] | None = None,
        clock: bool = False,
        random_seeds: bool = False,
        names: tuple[str, ...] = NAMES,
        port: int = 0,
        fresh: bool = False,
    ) -> None:
        self.log = tempfile.NamedTemporaryFile("a+", suffix=".log")  # noqa: SIM115
        self.last_log = ""  # what it held when it was closed
        self.clocked = clock
        words = ["serve", "--port", str(port)]
        words += [w for n in names for w in ("--served-model-name", n)]
        # A loaded machine can keep an engine silent for a minute.
        if "--engine-silence-seconds" not in flags:
            words += ["--engine-silence-seconds", NEVER]
        words += ["--test-engine", engine] if engine else []
        # `verbatim batch`, run in a test's own process, sets this variable.
        inherited = {k: v for k, v in os.environ.items() if k != "VERBATIM_LOG"}
        script = "clocked" if clock else "plain" if random_seeds else "counted"
        start = fork_server.start_fresh if fresh or ON_RAY else fork_server.start
        self.process = start(
            script, [*words, *RAY_FLAGS, *flags], {**inherited, **(env or {})}, self.log.fileno()
        )
        found = eventually(
            lambda: LISTENING.search(self.log_text()) or self.process.poll() is not None,
            self.log_text,
        )
        assert not isinstance(found, bool), f"the server did not start:\n{self.log_text()}"
        self.port = int(found[2])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=HANG_SECONDS)

    # ------------------------------------------------------------------------------------ the clock

    def _command(self, *words: object) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def advance(self, seconds: float) -> None:
        """Move the clock and run the due timers."""
        self._command("advance", seconds)

    def let_clock_run(self) -> None:
        self._command("run")

    def received(self) -> int:
        """Bytes that the server has read from clients."""
        return self._command("received")

    def send_and_wait(self, sock: socket.socket, data: bytes) -> None:
        """Send bytes and wait until the server has read them, so that later bytes arrive in a
        separate read."""
        before = self.received()
        sock.sendall(data)
        eventually(lambda: self.received() >= before + len(data), "the server does not read")

    # ------------------------------------------------------------------------------------- the rest

    def log_text(self) -> str:
        return self.last_log if self.log.closed else Path(self.log.name).read_text()

    def wait_ready(self) -> Live:
        def ready() -> bool:
            assert self.process.poll() is None, self.log_text()
            status = self.client.get("/health").status_code
            assert status in (200, 503), self.log_text()
            return status == 200

        try:
            eventually(ready, self.log_text)
        except BaseException:  # no fixture stops a server that it never got
            self.process.kill()
            raise
        return self

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(
            path, json={"model": "m", **body} if body is not None else None, **more
        )

    def complete(self, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
        answer = self.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 8, "seed": 7, **more}
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of every event of a stream; [DONE] as a string."""
        with self.client.stream(
            "POST", path, json={"model": "m", "stream": True, **body}
        ) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def metrics(self) -> dict[str, float]:
        """Summed over the replicas, if there are any."""
        rows = (
            line.rsplit(" ", 1)
            for line in self.client.get("/metrics").text.splitlines()
            if line and line[0] != "#"
        )
        found: Counter[str] = Counter()
        for name, value in rows:
            found[REPLICA.sub("", name).replace("{}", "")] += float(value)  # type: ignore[assignment]
        return dict(found)

    def wait_at_rest(self) -> dict[str, float]:
        """Wait until no request is open and every KV block is free; returns the metrics. The
        engine's metrics come with its heartbeats, so this waits for one sent after its last request
        ended."""
        here = ("verbatim_http_open_requests", "verbatim_requests_open")
        there = ("verbatim_requests", "verbatim_blocks_used")
        report, m = math.inf, {}

        def at_rest() -> bool:
            nonlocal report, m
            m = self.metrics()
            if any(m[name] for name in here) or not m["verbatim_engine_up"]:
                report = math.inf
            else:
                report = min(report, m["verbatim_engine_reports_total"])
            return m["verbatim_engine_reports_total"] > report and not any(
                m.get(name, 0) for name in there
            )

        eventually(
            at_rest,
            lambda: f"not at rest: { {k: v for k, v in m.items() if v and 'bucket' not in k} }",
        )
        return m

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a metric has at least this value."""
        eventually(
            lambda: self.metrics().get(name, 0) >= value,
            lambda: f"{name} is {self.metrics().get(name)}",
        )

    def barrier(self) -> None:
        """Wait until the engine process has read every earlier message: messages are ordered, and a
        tokenize request needs no engine step."""
        assert self.post("/tokenize", {"prompt": "x"}).status_code == 200

    def engine_pid(self) -> int:
        """The only child of the server."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            if self.clocked:
                self.let_clock_run()
            self.process.send_signal(number)
        try:
            return self.process.wait(HANG_SECONDS)
        finally:
            self.client.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for pipe in filter(None, (self.process.stdin, self.process.stdout)):
                pipe.close()
            self.last_log = self.log_text()
            self.log.close()


USAGE = ("prompt", "output", "cached", "drafted", "accepted")


def reported_usage(m: dict[str, float]) -> dict[str, float]:
    """Usage in tokens reported to clients, over all engine processes."""
    return {kind: m.get(f'verbatim_usage_tokens_total{{kind="{kind}"}}', 0) for kind in USAGE}


def usage_balances(m: dict[str, float]) -> bool:
    """The usage reported to clients equals what the engines counted."""
    return not any(uncounted_usage(m).values())


def check_states(m: dict[str, float]) -> None:
    """Every accepted request ended in exactly one state. (An id that is closed twice or was never
    opened fails an assertion of the ledger; the supervisor then restarts the engine, which the
    restart count shows.)"""
    ended = sum(v for k, v in m.items() if k.startswith("verbatim_requests_ended_total"))
    assert m["verbatim_requests_opened_total"] == ended + m["verbatim_requests_open"]


def uncounted_usage(m: dict[str, float]) -> dict[str, float]:
    """Usage reported to clients less what the engines counted. An engine that is killed loses what
    it counted since its last heartbeat."""
    return {kind: n - m[f"verbatim_{kind}_tokens_total"] for kind, n in reported_usage(m).items()}


def check_ledger(
    m: dict[str, float], restarts: int = 0, lost: dict[str, float] | None = None
) -> None:
    """As check_states, and the usage reported to clients equals what the engines counted, but for
    `lost`: the uncounted usage when the last engine started."""
    check_states(m)
    assert m["verbatim_engine_restarts_total"] == restarts
    for kind, tokens in uncounted_usage(m).items():
        assert tokens == (lost or {}).get(kind, 0), kind


def check_log(live: Live) -> int:
    """Every answered request has one log line with a unique id, except health checks, which have
    none. Returns the number of lines."""
    answers = sum(
        v
        for k, v in live.metrics().items()
        if k.startswith("verbatim_http_answers_total") and "/health" not in k
    )
    assert "route=/health" not in live.log_text()

    def ids() -> list[str]:
        return re.findall(r" id=(req_\w+) ", live.log_text())

    # the metrics request has a line too
    eventually(lambda: len(ids()) >= answers + 1, "lines are missing")
    assert len(ids()) == len(set(ids())) == answers + 1
    return len(ids())


CANCELLED = 'verbatim_requests_ended_total{state="cancel"}'


class Gate:
    """Lets a test engine with gate=FILE run a counted number of steps."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, 0
        self.allow(0)

    def allow(self, steps: int) -> None:
        """Allow this many further steps."""
        self.steps += steps
        new = self.path.with_suffix(".new")
        new.write_text(str(self.steps))
        new.replace(self.path)

    def open(self) -> None:
        self.allow(1 << 40)

    def wait_until_left(self, live: Live, cancelled: float) -> None:
        """Wait until the HTTP process has noticed the disconnect and, after one more step, the
        engine has ended the request. `cancelled`: how many it has ended so by then."""
        metrics = live.metrics
        eventually(
            lambda: metrics()["verbatim_http_open_requests"] == 0, "HTTP notices no disconnect"
        )
        live.barrier()
        self.allow(1)
        eventually(lambda: metrics()["verbatim_requests_open"] == 0, "the request still runs")
        assert metrics()[CANCELLED] == cancelled


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or is a zombie that its parent did not reap (a container may
    lack a reaping init)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def report(line: str) -> None:
    """Print a measured figure; `pytest -s` shows it."""
    print(f"\nmeasured: {line}", flush=True)
