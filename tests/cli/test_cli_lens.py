"""`verbatim lens` prints its page's address and serves the page there."""

from __future__ import annotations

import http.server
import re
import signal
import socket
import subprocess
import threading
from typing import Any

import httpx
import pytest

from cli_result import Call
from eventually import HANG_SECONDS
from verbatim.cli.commands import lens

pytestmark = pytest.mark.server


def test_lens_serves_the_page_at_the_address_it_prints(spawn: Any) -> None:
    process = spawn(
        *("lens", "--no-browser", "--port", "0", "--test-engine", "pipeline"),
        stderr=subprocess.PIPE,
    )
    try:
        for line in process.stderr:
            if found := re.match(rb"the Lens: (http://127\.0\.0\.1:\d+/lens)", line):
                break
        else:
            raise AssertionError("no address was printed")
        answer = httpx.get(found[1].decode(), timeout=HANG_SECONDS)
        assert "<title>Verbatim Lens</title>" in answer.text
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0


def test_lens_opens_no_page_of_another_program(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = verbatim("lens", "--port", str(port))
    assert (result.code, opened) == (2, [])
    assert result.err == (
        f"verbatim: --port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another --port or --host\n"
    )
    assert "99999 is not a port" in verbatim("lens", "--port", "99999").err


class LensHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = b"<title>Verbatim Lens</title>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        pass


def test_lens_opens_the_page_of_a_server_that_runs_already(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), LensHandler) as server:
        monkeypatch.setattr(lens, "PORT", server.server_port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        alone, another = verbatim("lens"), verbatim("lens", "-m", "other.gguf")
        server.shutdown()
    assert (alone.code, opened) == (0, [f"http://127.0.0.1:{server.server_port}/lens"]), alone.err
    assert "no model is loaded" in alone.err
    assert another.code == 2
    assert "-m: a server of Verbatim runs at port" in another.err


def test_a_short_key_of_the_environment_is_named(
    verbatim: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_API_KEY", "secret")
    result = verbatim("serve", "--port", "0")
    assert result.code == 2
    assert "VERBATIM_API_KEY" in result.err
