"""docs/proxies.md: its configurations of nginx and Caddy, each in front of a live server."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Gate, Live

from eventually import HANG_SECONDS, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "proxies.md").read_text("utf-8")
pytestmark = [pytest.mark.server, pytest.mark.soak]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nginx(folder: Path, text: str, port: int) -> list[str]:
    names = ("/CN=llm.example", "-keyout", f"{folder}/llm.key", "-out", f"{folder}/llm.pem")
    words = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", *names)
    subprocess.run(words, check=True, capture_output=True)
    text = text.replace("/etc/ssl", str(folder)).replace("/var/log/nginx", str(folder))
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    head = f"user root; daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}"
    (folder / "nginx.conf").write_text(f"{head} http {{ {temporary}\n{text}\n}}\n")
    return ["nginx", "-e", f"{folder}/log", "-c", f"{folder}/nginx.conf"]


def caddy(folder: Path, text: str, port: int) -> list[str]:
    options = "{\n admin off\n auto_https disable_redirects\n skip_install_trust\n local_certs\n"
    text = text.replace("llm.example {", f"https://llm.example:{port} {{\n bind 127.0.0.1")
    (folder / "Caddyfile").write_text(f"{options} storage file_system {folder}\n}}\n{text}")
    return ["caddy", "run", "--config", f"{folder}/Caddyfile", "--adapter", "caddyfile"]


PROXIES: dict[str, Callable[[Path, str, int], list[str]]] = {"nginx": nginx, "caddy": caddy}


@pytest.fixture(params=PROXIES)
def behind(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Live, Gate, httpx.Client]]:
    name = request.param
    for program in (name, "openssl"):
        assert shutil.which(program), f"apt-get install {program}"
    gate, port = Gate(tmp_path / "steps"), free_port()
    live = Live("--allow-host", "llm.example", engine=f"hash,gate={gate.path}").wait_ready()
    [text] = re.findall(rf"```{name}\n(.*?)```", PAGE, re.S)
    command = PROXIES[name](
        tmp_path, text.replace("127.0.0.1:8000", f"127.0.0.1:{live.port}"), port
    )
    with (tmp_path / "out").open("wb") as out:
        proxy = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    client = httpx.Client(
        base_url=f"https://127.0.0.1:{port}",
        headers={"host": "llm.example"},
        verify=False,
        timeout=HANG_SECONDS,
    )

    def answers() -> bool:
        assert proxy.poll() is None, (tmp_path / "out").read_text()
        try:
            extensions = {"sni_hostname": "llm.example"}
            return client.get("/health", extensions=extensions).status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(answers, lambda: (tmp_path / "out").read_text())
        yield live, gate, client
    finally:
        proxy.terminate()
        proxy.wait()
        gate.open()
        assert live.stop() == 0


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 8, "ignore_eos": True, "seed": 1},
    "/api/generate": {"options": {"num_predict": 8, "seed": 1}},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_arrives_event_by_event(
    behind: tuple[Live, Gate, httpx.Client], path: str
) -> None:
    _, gate, client = behind
    body = {"model": "m", "prompt": "hi", "stream": True, **BODIES[path]}
    extensions = {"sni_hostname": "llm.example"}
    with client.stream("POST", path, json=body, extensions=extensions) as answer:
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.status_code == 200, answer.read()
        gate.allow(2)
        lines = filter(None, answer.iter_lines())
        assert len([next(lines), next(lines)]) == 2  # the engine waits for the third step
        gate.open()
        rest = list(lines)
    assert "[DONE]" in rest[-1] or '"done":true' in rest[-1]


def test_a_disconnect_reaches_the_server(behind: tuple[Live, Gate, httpx.Client]) -> None:
    live, gate, client = behind
    extensions = {"sni_hostname": "llm.example"}
    body = {"model": "m", "prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, extensions=extensions) as answer:
        gate.allow(2)
        next(answer.iter_lines())
    gate.wait_until_left(live, 1)


def test_bodies_of_any_size_get_the_servers_answer(behind: tuple[Live, Gate, httpx.Client]) -> None:
    _, _, client = behind
    for size, code in ((7 << 20, "context_length_exceeded"), (9 << 20, "body_too_large")):
        body = {"model": "m", "prompt": "x" * size}
        answer = client.post(
            "/v1/completions", json=body, extensions={"sni_hostname": "llm.example"}
        )
        assert answer.json()["error"]["code"] == code
