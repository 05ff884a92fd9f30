"""A live server for tests: a real process on loopback, with the fake engine of verbatim.testing or a model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

NAMES = ("m", "gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small")
LISTENING = re.compile(r"listening on (https?)://[^ ]*?:(\d+) ")


class Live:
    """One `verbatim serve`. Everything it says goes to a file, which is shown when a test fails to start it."""

    def __init__(self, *flags: str, engine: str | None = "pipeline", env: dict[str, str] | None = None) -> None:
        self.log = tempfile.NamedTemporaryFile("a+", suffix=".log", delete=False)  # noqa: SIM115
        words = [
            sys.executable,
            "-m",
            "verbatim",
            "serve",
            "--port",
            "0",
            *(w for n in NAMES for w in ("--served-model-name", n)),
        ]
        words += ["--test-engine", engine] if engine else []
        clean = {k: v for k, v in os.environ.items() if k != "VERBATIM_API_KEY"}
        self.process = subprocess.Popen([*words, *flags], stderr=self.log, stdout=self.log, env={**clean, **(env or {})})
        self.port = self._wait_for_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _wait_for_port(self) -> int:
        for _ in range(600):
            found = LISTENING.search(self.said())
            if found:
                return int(found[2])
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.said()}")

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def wait_ready(self, seconds: float = 120) -> Live:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.said()
            status = self.client.get("/health").status_code
            assert status in (200, 503), self.said()
            if status == 200:
                return self
            time.sleep(0.05)
        raise AssertionError(f"not ready:\n{self.said()}")

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json={"model": "m", **body} if body is not None else None, **more)

    def complete(self, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "seed": 7, **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of every event of a stream; [DONE] as a string."""
        with self.client.stream("POST", path, json={"model": "m", "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def metrics(self) -> dict[str, float]:
        rows = (line.rsplit(" ", 1) for line in self.client.get("/metrics").text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in rows}

    def wait_at_rest(self, seconds: float = 30) -> dict[str, float]:
        """Until no request is open anywhere and every block is free; the numbers then. A fresh heartbeat has to say so."""
        end = time.monotonic() + seconds
        names = ("verbatim_http_open_requests", "verbatim_requests_open", "verbatim_requests", "verbatim_blocks_used")
        calm, m = 0, self.metrics()
        while time.monotonic() < end:
            m = self.metrics()
            calm = 0 if any(m.get(k, 0) for k in names) else calm + 1
            if calm == 6:  # longer than the engine's numbers are old
                return m
            time.sleep(0.3)
        raise AssertionError(f"not at rest: { {k: v for k, v in m.items() if v and 'bucket' not in k} }")

    def engine_pid(self) -> int:
        """The only child of the server."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.client.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.log.close()


USAGE = ("prompt", "output", "cached", "drafted", "accepted")


def told(m: dict[str, float]) -> dict[str, float]:
    """Tokens that clients were told they used, all lives of the engine together."""
    return {kind: m.get(f'verbatim_usage_tokens_total{{kind="{kind}"}}', 0) for kind in USAGE}


def check_states(m: dict[str, float]) -> None:
    """Every accepted request ended in exactly one state. (An id that ends twice, or was never opened, fails an assertion of the ledger itself:
    the supervisor then starts the engine again, which the count of restarts shows.)"""
    ended = sum(v for k, v in m.items() if k.startswith("verbatim_requests_ended_total"))
    assert m["verbatim_requests_opened_total"] == ended + m["verbatim_requests_open"]


def check_ledger(m: dict[str, float], restarts: int = 0, before: dict[str, float] | None = None) -> None:
    """States as above, and what clients were told they used is what the engine counted. An engine that was started again counts from 0:
    `before` is then what had been told when it began."""
    check_states(m)
    assert m["verbatim_engine_restarts_total"] == restarts
    for kind, tokens in told(m).items():
        assert tokens - (before or {}).get(kind, 0) == m[f"verbatim_{kind}_tokens_total"], kind


def check_log(live: Live) -> int:
    """Every request that was answered has one line in the log, under an id of its own. Returns how many there are."""
    time.sleep(0.2)  # lines leave together, a little later
    ids = re.findall(r" id=(req_\w+) ", live.said())
    assert len(ids) == len(set(ids))
    return len(ids)


def tell(line: str) -> None:
    """A measured figure; `pytest -s` shows it."""
    print(f"\nmeasured: {line}", flush=True)
