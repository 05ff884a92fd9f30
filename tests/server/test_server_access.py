"""Access control and confidentiality: keys, hosts, origins, tenants, logs, error texts."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live

from eventually import HANG_SECONDS, eventually
from verbatim.base.errors import ParameterError
from verbatim.server import app
from verbatim.server.api.routes import ROUTES
from verbatim.server.auth import OPEN_ROUTES
from verbatim.server.http.api_keys import ApiKeys
from verbatim.server.problem import CODES
from verbatim.server.settings import Settings

pytestmark = pytest.mark.server
ONE, TWO = "key-number-one", "key-number-two"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{ONE}\n# two tenants\n{TWO}\n", "utf-8-sig")  # with a byte order mark
    live = Live(
        "--api-key-file",
        str(path),
        "--cors-origin",
        "https://app.example",
        "--log-format",
        "json",
        "--allow-host",
        "llm.example",
        "--metrics-address",
        "127.0.0.1:0",
    )
    live.client.headers["authorization"] = f"Bearer {ONE}"
    yield live.wait_ready()
    assert live.stop() == 0


def bare(live: Live, method: str, path: str, **more: Any) -> httpx.Response:
    # without certificates, whose loading takes 50 ms per client
    return httpx.request(method, live.url + path, timeout=HANG_SECONDS, verify=False, **more)


def test_every_route_but_health_and_the_page_needs_the_key(locked: Live) -> None:
    for route in ROUTES:
        path, method = route.path, route.method
        where = path.replace("{id}", "m").replace("{id:path}", "m")
        answer = bare(locked, method, where, json={})
        if path.startswith("/health") or path in ("/", "/lens"):
            assert answer.status_code == 200
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"].startswith("Bearer ")
    for path in (
        "/",
        "/nope",
        "/docs",
        "/v1",
        "/v1/completions/",
        "//health",
        "/health/../metrics",
        "/%68ealth",
        "/metrics?x=/health",
    ):
        assert bare(locked, "GET", path).status_code in (200, 401), path
        assert "verbatim_requests" not in bare(locked, "GET", path).text


def test_metrics_have_an_address_that_needs_no_key(locked: Live) -> None:
    address = eventually(lambda: re.search(r"metrics at (http://[\d.:]+)", locked.log_text()))[1]
    answer = httpx.get(f"{address}/metrics", timeout=HANG_SECONDS)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "verbatim_http_open_requests 0" in answer.text
    assert bare(locked, "GET", "/metrics").status_code == 401
    assert httpx.get(f"{address}/v1/models", timeout=HANG_SECONDS).status_code == 404
    evil = {"host": "evil.example"}
    named = httpx.get(f"{address}/metrics", headers=evil, timeout=HANG_SECONDS)
    assert named.status_code == 403


@pytest.mark.parametrize("address", ["8001", "127.0.0.1", ":8001", "h:65536", "h:x", ""])
def test_an_address_of_metrics_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ParameterError, match="is not HOST:PORT"):
        Settings(metrics_address=address)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": ONE},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {ONE}"},
        {"authorization": f"Bearer {ONE[:-1]}"},
        {"authorization": f"Bearer {ONE} {TWO}"},
        {"authorization": f"Bearer {ONE.upper()}"},
        {"x-api-key": ONE + "x"},
        {"cookie": f"key={ONE}"},
    ],
)
def test_wrong_keys_are_rejected(locked: Live, headers: dict[str, str]) -> None:
    assert bare(locked, "GET", "/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {TWO}"}, {"authorization": f"bearer {ONE}"}, {"x-api-key": ONE}],
)
def test_right_keys_are_accepted(locked: Live, headers: dict[str, str]) -> None:
    assert bare(locked, "GET", "/v1/models", headers=headers).status_code == 200


def test_keys_are_compared_in_constant_time_and_never_with_equality() -> None:
    source = inspect.getsource(ApiKeys.tenant_of)
    assert "compare_digest" in source
    assert "==" not in source.replace('b"bearer"', "").replace("scheme.lower() ==", "")
    assert "break" not in source


def test_a_host_beyond_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.com"):
        with pytest.raises(ParameterError):
            Settings(host=host)
        assert Settings(host=host, keys=("long-enough-key",)).host == host
    for host in ("127.0.0.1", "localhost", "::1", "127.3.4.5"):
        assert Settings(host=host).host == host
    with pytest.raises(ParameterError):
        Settings(keys=("short",))


def test_the_host_header_is_checked_against_dns_rebinding(locked: Live) -> None:
    for host, status in (
        ("localhost", 200),
        ("127.0.0.1:1234", 200),
        ("[::1]:8000", 200),
        ("llm.example", 200),
        ("LLM.example:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ):
        assert bare(locked, "GET", "/health", headers={"host": host}).status_code == status, host


def test_a_probe_needs_no_host_and_everything_else_does(locked: Live) -> None:
    """Load balancers probe with HTTP/1.0, which has no Host header; a Host that is sent is still
    checked."""

    def status(method: str, path: str, version: str, *headers: str) -> int:
        lines = [
            f"{method} {path} HTTP/{version}",
            f"authorization: Bearer {ONE}",
            "connection: close",
            *headers,
        ]
        with socket.create_connection(("127.0.0.1", locked.port), timeout=HANG_SECONDS) as sock:
            sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
            return int(sock.recv(4096).split()[1])

    for path in OPEN_ROUTES:
        for version, found in (("1.0", 200), ("1.1", 400)):  # RFC 9112, 3.2
            assert [status(method, path, version) for method in ("GET", "HEAD")] == [found] * 2
            assert status("GET", path, version, "host: evil.example") == 403
            assert status("GET", path, version, "host:") == 403
    for path in ("/metrics", "/v1/models", "/health/", "/healthy", "/nowhere", "//health"):
        assert [status("GET", path, version) for version in ("1.0", "1.1")] == [403, 400], path
    for hosts in (
        ("host: evil.example", "host: localhost"),
        ("host: localhost", "host: evil.example"),
        ("host: localhost",) * 2,
    ):
        assert [status("GET", path, "1.1", *hosts) for path in ("/v1/models", "/health")] == [
            400,
            400,
        ]


def test_cors_is_off_by_default(locked: Live, fake: Live) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert (
        bare(locked, "OPTIONS", "/v1/completions", headers=asked).headers[
            "access-control-allow-origin"
        ]
        == "https://app.example"
    )
    other = bare(
        locked, "OPTIONS", "/v1/completions", headers={**asked, "origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in other.headers
    assert (
        "access-control-allow-origin"
        not in fake.client.get("/v1/models", headers={"origin": "https://app.example"}).headers
    )


def test_a_browser_may_send_the_headers_that_openai_s_client_adds(locked: Live) -> None:
    names = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    answer_headers = bare(
        locked,
        "OPTIONS",
        "/v1/completions",
        headers={**asked, "access-control-request-headers": names},
    ).headers
    assert answer_headers["access-control-allow-headers"] == names
    assert "retry-after" in answer_headers["access-control-expose-headers"]
    odd = bare(
        locked,
        "OPTIONS",
        "/v1/completions",
        headers={**asked, "access-control-request-headers": "a;b"},
    ).headers
    assert "a;b" not in odd["access-control-allow-headers"]


def test_cached_prefixes_are_not_shared_between_keys(locked: Live) -> None:
    """Otherwise the time to first token, or the cached count, would reveal another tenant's
    prompt."""
    prompt = "a secret that one tenant asked about, long enough for several blocks of the cache" * 2

    def cached(key: str, **more: Any) -> int:
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, **more}
        answer = bare(
            locked, "POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(ONE) == 0
    assert cached(ONE) > 0
    assert cached(TWO) == 0
    assert cached(ONE, cache_salt="other") == 0
    assert cached(TWO, cache_salt="") > 0


def test_a_stored_answer_is_visible_to_its_own_key_only(locked: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "store": True}
    made = locked.post("/v1/chat/completions", body).json()["id"]
    assert locked.client.get(f"/v1/chat/completions/{made}").status_code == 200
    other = {"authorization": f"Bearer {TWO}"}
    assert bare(locked, "GET", f"/v1/chat/completions/{made}", headers=other).status_code == 404
    assert bare(locked, "DELETE", f"/v1/chat/completions/{made}", headers=other).status_code == 404
    assert bare(locked, "GET", "/v1/chat/completions", headers=other).json()["data"] == []


def log_with(live: Live, *answers: httpx.Response) -> str:
    """The log, once it contains the lines of these answers: a line is written some milliseconds
    after its answer."""
    ids = [answer.headers["x-request-id"] for answer in answers]
    eventually(lambda: all(name in live.log_text() for name in ids), live.log_text)
    return live.log_text()


def test_the_log_has_ids_and_never_text_or_keys(locked: Live) -> None:
    marker = "a-very-recognisable-prompt"
    answer = locked.post("/v1/completions", {"prompt": marker, "max_tokens": 2, "user": "someone"})
    refused = locked.post("/v1/completions", {"prompt": marker, "temperature": marker})
    log = log_with(locked, answer, refused)
    assert marker not in log
    assert ONE not in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (mine,) = [line for line in lines if line.get("id") == answer.headers["x-request-id"]]
    assert (mine["status"], mine["user"], mine["time"][-1]) == (200, "someone", "Z")


def test_a_label_cannot_forge_a_line_of_the_log(fake: Any) -> None:
    forged = "x\n2026-01-01 00:00:00,000 INFO id=req_forged method=GET"
    answer = fake.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 1, "user": forged, "seed": 1}
    )
    assert answer.status_code == 200
    claude = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "metadata": {"user_id": "some one"},
    }
    other = fake.post("/v1/messages", claude)
    assert other.status_code == 200
    log = log_with(fake, answer, other)
    assert not any(line.startswith("2026-01-01") for line in log.splitlines())
    assert 'user="x\\n2026-01-01' in log
    assert 'user="some one"' in log


def test_error_bodies_come_from_a_closed_list_and_hold_no_path(locked: Live) -> None:
    here = str(Path(app.__file__).parent)
    for path, body in (
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": "x", "grammar": "start: ("}),
        ("/v1/nope", {}),
        ("/v1/responses/x", {}),
    ):
        answer = locked.post(path, body)
        error = answer.json()["error"]
        assert error["code"] in CODES
        assert CODES[error["code"]][0] == answer.status_code
        assert set(error) == {"message", "type", "param", "code"}
        assert here not in answer.text
        assert "Traceback" not in answer.text
        assert ONE not in answer.text


def test_server_code_has_no_eval_pickle_or_http_client() -> None:
    """No pickle, eval, exec or HTTP client in the server's code; the only subprocess is the
    engine."""
    for file in Path(app.__file__).parent.rglob("*.py"):
        source = file.read_text()
        for word in (
            "pickle",
            "eval(",
            "exec(",
            "import httpx",
            "import requests",
            "urllib.request",
            "yaml.load",
            "os.system",
            "shell=True",
        ):
            assert word not in source.replace("subprocess_exec(", ""), (file.name, word)


def test_tls_needs_both_flags() -> None:
    with pytest.raises(ParameterError):
        Settings(tls_cert="x")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_server_with_a_certificate(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run(
        [*words, "-addext", names, "-days", "2", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    live = Live(
        "--tls-cert", cert, "--tls-key", key, "--header-seconds", "20", engine="hash", clock=True
    )
    trust = ssl.create_default_context(cafile=cert)
    live.client = httpx.Client(
        base_url=live.url.replace("http:", "https:"), verify=trust, timeout=HANG_SECONDS
    )
    live.wait_ready()
    whole = live.complete("x", max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    events = live.events(
        "/v1/completions", {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "seed": 7}
    )
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == whole
    plain = socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS)
    with trust.wrap_socket(plain, server_hostname="localhost") as sock:
        live.send_and_wait(sock, b"GET /hea")
        live.advance(20.1)
        assert sock.recv(10) == b""  # the limits apply to TLS too
    with socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" not in sock.recv(100)
    assert live.stop() == 0


def test_spans_have_the_route_and_the_parent_trace_and_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenTelemetry's own SDK records a span per request; without the package nothing happens."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from verbatim.server import traces

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("test"))
    route = type("Route", (), {"path": "/v1/completions"})()
    headers = [
        (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        (b"authorization", ONE.encode()),
    ]
    with traces.trace({"method": "POST", "headers": headers, "route": route}, "req_1"):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "verbatim.request_id": "req_1",
        "http.route": "/v1/completions",
    }
    assert span.parent is not None
    assert f"{span.parent.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    monkeypatch.setattr(traces, "_tracer", None)
    with traces.trace({"method": "GET", "headers": []}, "req_2"):
        pass
