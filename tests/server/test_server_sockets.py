"""Hostile and unusual clients at the socket level. Each test was once a bug here or in the HTTP
protocol class that ours replaced."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import CANCELLED, Gate, Live, check_ledger, resident
from streams import stream

from eventually import HANG_SECONDS, eventually
from verbatim.server.http.asgi_cycle import Exchange
from verbatim.server.http.connection import TLS_CLOSE_SECONDS, HttpProtocol
from verbatim.server.settings import Limits

pytestmark = pytest.mark.server

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def body(**more: Any) -> bytes:
    return json.dumps(
        {"model": "m", "prompt": "x", "max_tokens": 3, "seed": 1, "ignore_eos": True, **more}
    ).encode()


def post(data: bytes, *lines: bytes, head: bytes = HEAD) -> bytes:
    return (
        head
        + b"".join(line + b"\r\n" for line in lines)
        + b"Content-Length: %d\r\n\r\n" % len(data)
        + data
    )


IDLE, HEADER, LINGER = 75.0, 20.0, 5.0  # seconds; the server's defaults


@pytest.fixture(scope="module")
def quick() -> Iterator[Live]:
    """A server with a manual clock: no timeout is reached unless a test moves the clock."""
    live = Live("--max-header-bytes", "16384", engine="hash", clock=True).wait_ready()
    yield live
    check_ledger(live.wait_at_rest())
    assert live.stop() == 0
    assert "Traceback" not in live.log_text(), live.log_text()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate") / "steps")


@pytest.fixture(scope="module")
def stepped(gate: Gate) -> Iterator[Live]:
    """A server whose engine runs only the steps that a test allows, so no request ends before its
    client disconnects."""
    live = Live("--step-tokens", "16", engine=f"hash,gate={gate.path}", clock=True).wait_ready()
    yield live
    gate.open()
    check_ledger(live.wait_at_rest())
    assert live.stop() == 0
    assert "Traceback" not in live.log_text(), live.log_text()


def open_socket(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=HANG_SECONDS)


def read_all(sock: socket.socket) -> bytes:
    out = b""
    try:
        while piece := sock.recv(65536):
            out += piece
    except ConnectionResetError:
        pass
    return out


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """Read one response with a content-length from a connection that stays open."""
    out = b""
    while b"\r\n\r\n" not in out:
        out += sock.recv(1) or pytest.fail(f"closed after {out!r}")
    length = int(re.search(rb"content-length: (\d+)", out)[1])  # type: ignore[index]
    data = b""
    while len(data) < length:
        data += sock.recv(length - len(data)) or pytest.fail("closed inside an answer")
    return int(out.split(b" ", 2)[1]), data


def ask(live: Live, data: bytes) -> bytes:
    with open_socket(live) as sock:
        sock.sendall(data)
        return read_all(sock)


def text_of(answer: bytes) -> str:
    return str(json.loads(answer)["choices"][0]["text"])


# ----------------------------------------------------------------------- HTTP versions and framing


def test_an_http_1_0_stream_is_not_chunked(quick: Live) -> None:
    answer = ask(quick, post(body(stream=True), head=HEAD.replace(b"1.1", b"1.0")))
    head, _, data = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert data.startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")


def test_an_offered_upgrade_is_declined_and_the_body_is_read(quick: Live) -> None:
    """Java's client offers HTTP/2 with its first request; browsers offer WebSockets. httptools
    would drop the body."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQAAP__",
    )
    whole = post(body(), *offer)
    with open_socket(quick) as sock:
        for cut in (
            len(whole),
            len(whole) - 20,
            whole.index(b"\r\n\r\n") + 4,
            30,
        ):  # whole, split in the body, split in the head
            quick.send_and_wait(sock, whole[:cut])
            sock.sendall(whole[cut:])
            assert read_answer(sock)[0] == 200
        sock.sendall(
            HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            + HEALTH
        )
        assert [read_answer(sock)[0] for _ in range(2)] == [200, 200]


def test_100_continue_is_sent_only_if_the_body_is_read(quick: Live) -> None:
    data = body()
    with open_socket(quick) as sock:
        sock.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(data)
        assert read_answer(sock)[0] == 200
    with open_socket(quick) as sock:
        sock.sendall(
            HEAD.replace(b"json", b"pdf")
            + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        assert read_answer(sock)[0] == 415


@pytest.mark.parametrize(
    ("line", "status", "name"),
    [
        (b"Transfer-Encoding: gzip, chunked", 400, "transfer-encoding"),
        (b"Content-Encoding: gzip", 415, "content-encoding"),
    ],
)
def test_unknown_transfer_encodings_are_rejected(
    quick: Live, line: bytes, status: int, name: str
) -> None:
    data = body()
    if b"Transfer" in line:
        answer = ask(quick, HEAD + line + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
    else:
        answer = ask(quick, post(data, line, b"Connection: close"))
    assert int(answer.split(b" ", 2)[1]) == status
    assert name in answer.partition(b"\r\n\r\n")[2].decode()


def test_malformed_chunks_are_rejected(quick: Live) -> None:
    for size in (b"ZZ", b"-5", b"f" * 40, b"5 5", b"0x5", b""):
        answer = ask(quick, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n{}\r\n")
        assert answer.split(b" ", 2)[1:2] == [b"400"], (size, answer)


def test_malformed_requests_are_counted_and_logged_with_an_id(quick: Live) -> None:
    name = 'verbatim_http_answers_total{route="broken",status="400"}'
    before = quick.metrics().get(name, 0)
    answer = ask(quick, b"NOT HTTP\r\n\r\n")
    found = re.search(rb"x-request-id: (req_\w+)", answer)
    assert found is not None
    assert quick.metrics()[name] == before + 1
    quick.advance(1)  # log lines are written in batches
    assert f"id={found[1].decode()} method=- route=broken status=400" in quick.log_text()


def test_a_request_split_at_any_byte_is_parsed(quick: Live) -> None:
    data = body()
    chunked = (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x;x=y\r\n%s\r\n%x\r\n%s\r\n0\r\nX: y\r\n\r\n"
    )
    wholes = (post(data), chunked % (9, data[:9], len(data) - 9, data[9:]))
    with open_socket(quick) as sock:
        texts = set()
        for whole in wholes:
            for cut in range(1, len(whole), 17):
                quick.send_and_wait(sock, whole[:cut])
                sock.sendall(whole[cut:])
                status, answer = read_answer(sock)
                assert status == 200, (cut, answer)
                texts.add(text_of(answer))
    assert len(texts) == 1


@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/2.0"], ids=["none", "0.9", "2.0"])
def test_other_versions_of_http_are_refused(quick: Live, version: bytes) -> None:
    """Without a version it is HTTP/0.9, whose response has no head: a proxy that sends such a
    request was tricked into it."""
    answer = ask(quick, b"GET /health" + version + b"\r\n" + CLOSE)
    head, _, data = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 "), answer
    assert "HTTP/1.1" in json.loads(data)["error"]["message"]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/health", 200),
        (b"http://127.0.0.1:8000/health", 200),
        (b"http://[::1]:8000/health", 200),
        (b"http://evil.example/health", 403),
        (b"http://user@evil.example/health", 403),
        (b"http://evil.example:80/health", 403),
    ],
)
def test_the_host_of_an_absolute_target_is_checked_like_the_header(
    quick: Live, target: bytes, status: int
) -> None:
    """RFC 9112, 3.2.2: the host of an absolute target comes before the header's."""
    for head in (b"1.1\r\nHost: localhost", b"1.0"):  # a probe of HTTP/1.0 has no Host
        answer = ask(quick, b"GET %s HTTP/%s\r\n%s" % (target, head, CLOSE))
        assert int(answer.split(b" ", 2)[1]) == status, answer
    assert b" 400 " in ask(quick, b"GET %s HTTP/1.1\r\n%s" % (target, CLOSE))[:20]
    answer = ask(quick, b"GET %s HTTP/1.1\r\nHost: evil.example\r\n%s" % (target, CLOSE))
    assert int(answer.split(b" ", 2)[1]) == 403


# ---------------------------------------------------------------------------------------- timeouts


def test_the_header_timeout_applies_to_later_requests_of_a_connection(quick: Live) -> None:
    with open_socket(quick) as sock:
        for late in (0.1, -0.1):
            sock.sendall(HEALTH)
            assert read_answer(sock)[0] == 200
            quick.send_and_wait(sock, b"GET /he")
            quick.advance(HEADER / 2)
            quick.send_and_wait(sock, b"al")  # further bytes do not reset the timeout
            quick.advance(HEADER / 2 - late)
            quick.send_and_wait(
                sock, b"th HTTP/1.1\r\nHost: localhost\r\n\r\n" if late > 0 else b""
            )
            assert late < 0 or read_answer(sock)[0] == 200
        assert read_all(sock) == b""


def test_an_idle_connection_is_closed_after_idle_seconds_and_not_before(quick: Live) -> None:
    """The idle timeout is longer than that of a head: a client that is slow to start (a program
    that opens a thousand connections) is no attack."""
    with open_socket(quick) as fresh, open_socket(quick) as used:
        used.sendall(HEALTH)
        assert read_answer(used)[0] == 200
        wait_until_accepted(quick, fresh)
        quick.advance(IDLE - 0.1)
        for sock in (fresh, used):
            sock.sendall(HEALTH)
            assert read_answer(sock)[0] == 200
        quick.advance(IDLE + 0.1)
        assert read_all(used) == b""
        assert read_all(fresh) == b""


def wait_until_accepted(live: Live, sock: socket.socket) -> None:
    """Wait until the server has accepted a silent connection: it has answered a later one."""
    with open_socket(live) as later:
        later.sendall(HEALTH)
        assert read_answer(later)[0] == 200


def push_until_cut(live: Live, sock: socket.socket, data: bytes, seconds: float = 0) -> None:
    """Send the same bytes repeatedly, `seconds` of the server's clock apart, until the server
    closes the connection."""
    try:
        for _ in range(500):
            sock.sendall(data)
            live.advance(seconds)
    except ConnectionError:
        return
    pytest.fail("the server takes everything")


def test_an_ignored_body_is_read_for_a_limited_time(quick: Live) -> None:
    junk = b"1\r\nx\r\n" * 1000
    for framing in (b"Content-Length: 99999999999", b"Transfer-Encoding: chunked"):
        with open_socket(quick) as sock:
            sock.sendall(HEAD.replace(b"json", b"pdf") + framing + b"\r\n\r\n")
            assert read_answer(sock)[0] == 415
            quick.send_and_wait(sock, junk)
            quick.advance(LINGER - 0.1)
            quick.send_and_wait(sock, junk)  # still read, and the timeout is not reset
            quick.advance(0.2)
            push_until_cut(quick, sock, junk)


def test_a_connection_survives_a_body_that_arrives_after_its_response(quick: Live) -> None:
    data = body()
    with open_socket(quick) as sock:
        sock.sendall(HEAD.replace(b"json", b"pdf") + b"Content-Length: %d\r\n\r\n" % len(data))
        assert read_answer(sock)[0] == 415
        sock.sendall(data + post(data))
        assert read_answer(sock)[0] == 200


@pytest.mark.parametrize("ending", [b"0\r\n", b"0;"])
def test_endless_trailers_and_chunk_extensions_are_limited(quick: Live, ending: bytes) -> None:
    data, before = body(), resident(quick.process.pid)
    with open_socket(quick) as sock:
        sock.sendall(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(data), data) + ending
        )
        push_until_cut(
            quick,
            sock,
            b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 5000
            if ending[-1:] == b"\n"
            else b"y" * 100_000,
            1,
        )
    assert resident(quick.process.pid) < before + (32 << 20)


# -------------------------------------------------------------------------------------- pipelining


def test_pipelined_requests_are_answered_in_order(quick: Live) -> None:
    lengths = [5, 1, 4, 2, 3]
    with open_socket(quick) as sock:
        sock.sendall(b"".join(post(body(max_tokens=n)) for n in lengths) + HEALTH)
        counts = [json.loads(read_answer(sock)[1])["usage"]["completion_tokens"] for _ in lengths]
        assert counts == lengths
        assert read_answer(sock)[0] == 200


# needs no step of the engine; white space is part of JSON
LARGE = post(
    b'{"prompt": "x"}' + b" " * 30_000, head=HEAD.replace(b"/v1/completions", b"/tokenize")
)


@pytest.mark.parametrize(
    ("flood", "answered"),
    [
        (HEALTH * 40, 17),  # one runs and 16 wait
        (LARGE * 5, 3),  # one runs and two wait within 64 KiB
    ],
)
def test_too_many_pipelined_requests_get_an_error_after_the_answers(
    stepped: Live, gate: Gate, flood: bytes, answered: int
) -> None:
    name = "verbatim_requests_refused_total"
    before = stepped.metrics()[name]
    with open_socket(stepped) as sock:
        stepped.send_and_wait(sock, post(body(max_tokens=1)) + flood)
        gate.allow(1)
        found = [read_answer(sock) for _ in range(answered + 1)]
        assert [status for status, _ in found] == [200] * answered + [429]
        assert json.loads(found[-1][1])["error"]["code"] == "overloaded"
        assert read_all(sock) == b""
    assert stepped.metrics()[name] == before + 1


@pytest.mark.parametrize("flood", [HEALTH * 500, post(body(prompt="x" * 3000)) * 30])
def test_pipelined_requests_are_limited(quick: Live, flood: bytes) -> None:
    """Without a limit, a client that sends and never reads would fill the server's memory."""
    before = resident(quick.process.pid)
    with open_socket(quick) as sock:
        push_until_cut(quick, sock, flood, 1)
    assert resident(quick.process.pid) < before + (32 << 20)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_disconnect_with_a_pipelined_request_frees_both(
    stepped: Live, gate: Gate, streamed: bool
) -> None:
    before = stepped.metrics().get(CANCELLED, 0)
    with open_socket(stepped) as sock:
        stepped.send_and_wait(sock, post(body(max_tokens=3000, stream=streamed)) * 2)
        stepped.wait_for("verbatim_requests_open", 1)
        gate.allow(3)
        assert stepped.metrics()["verbatim_http_open_requests"] == 1
    gate.wait_until_left(stepped, before + 1)


def test_bytes_after_a_request_do_not_enter_its_stream(stepped: Live, gate: Gate) -> None:
    before = stepped.metrics().get(CANCELLED, 0)
    with open_socket(stepped) as sock:
        sock.sendall(post(body(max_tokens=20, stream=True)))
        gate.allow(3)
        got = b""
        while b"data: " not in got:
            got += sock.recv(2000)
        sock.sendall(b"\x00 this is not HTTP \r\n\r\n")
        got += read_all(sock)
    assert b" 400 " not in got
    assert got.count(b"HTTP/1.1") == 1
    gate.wait_until_left(stepped, before + 1)


def test_a_disconnect_during_prefill_frees_the_request(stepped: Live, gate: Gate) -> None:
    """1,500 tokens in chunks of 16 take 94 steps; after 3 of them the client leaves."""
    before = stepped.metrics().get(CANCELLED, 0)
    with open_socket(stepped) as sock:
        sock.sendall(post(body(prompt="y" * 1500, max_tokens=5, stream=True, cache_salt="prefill")))
        stepped.wait_for("verbatim_requests_open", 1)
        gate.allow(3)
    gate.wait_until_left(stepped, before + 1)


# -------------------------------------------------------------------------- connections, shutdown


def test_connections_above_the_limit_get_503() -> None:
    live = Live("--max-connections", "4", engine="hash", clock=True).wait_ready()
    live.client.close()
    held: list[socket.socket] = []

    def hold() -> bool:
        """Open one more connection; False if it is rejected."""
        held.append(open_socket(live))
        held[-1].sendall(HEALTH)
        if read_answer(held[-1])[0] == 200:
            return True
        held.pop().close()
        return False

    try:
        for _ in range(3):
            assert hold()
        eventually(hold, "the client's closed connection is counted for ever")
        answer = ask(live, HEALTH)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
        held.pop().close()
        eventually(hold, "the freed place is not given away")
    finally:
        for sock in held:
            sock.close()
        assert live.stop() == 0


def test_shutdown_does_not_wait_for_a_tls_client_without_close_notify() -> None:
    """Closing TLS waits for the peer's close_notify, at shutdown for at most half a second."""
    done, later = [], []
    shared = SimpleNamespace(connections=set())
    transport: Any = SimpleNamespace(
        close=lambda: done.append("close"), abort=lambda: done.append("abort")
    )
    transport.get_write_buffer_size = lambda: 0
    transport.get_extra_info = lambda name: object() if name == "sslcontext" else None
    loop: Any = SimpleNamespace(
        call_later=lambda *what: later.append(what) or SimpleNamespace(cancel=lambda: None)
    )
    config: Any = SimpleNamespace(loaded=True, loaded_app=None)
    protocol = HttpProtocol(config, shared, {}, loop)  # type: ignore[arg-type]
    protocol.connection_made(transport)
    protocol.shutdown()
    seconds, call = later[-1]
    assert (done, seconds) == (["close"], TLS_CLOSE_SECONDS)
    call()
    assert done == ["close", "abort"]


class AnsweringProtocol(HttpProtocol):
    """Answers with 1,000 bytes, to a client that reads only what a test takes from `unread`.
    `timers` has the running timeout, `ended` says how the connection was ended."""

    limits = Limits(max_stream_bytes=5000)

    def __init__(self) -> None:
        self.unread, self.ended = 0, ""
        self.timers: list[Any] = []
        loop: Any = SimpleNamespace(call_later=self._call_later)
        config: Any = SimpleNamespace(loaded=True, loaded_app=None)
        shared: Any = SimpleNamespace(connections=set(), total_requests=0, default_headers=[])
        super().__init__(config, shared, {}, loop)
        closed_socket = SimpleNamespace(fileno=lambda: -1)
        transport: Any = SimpleNamespace(
            get_extra_info=lambda name: closed_socket if name == "socket" else None,
            get_write_buffer_size=lambda: self.unread,
            is_closing=lambda: bool(self.ended),
            write=self._add_unread,
            close=lambda: setattr(self, "ended", "close"),
            abort=lambda: setattr(self, "ended", "abort"),
        )
        self.connection_made(transport)

    def _call_later(self, seconds: float, *callback: Any) -> Any:
        self.timers.append(callback)
        return SimpleNamespace(cancel=lambda: self.timers.remove(callback))

    def _add_unread(self, data: bytes) -> None:
        self.unread += len(data)

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange

    def answer(self, requests: bytes) -> None:
        self.data_received(requests)
        while self._active is not None and not self._active.complete and not self.ended:
            self._active.answer(200, [(b"content-length", b"1000")], b"x" * 1000)

    def expire(self) -> None:
        [(callback, *arguments)] = self.timers
        self.timers.clear()
        callback(*arguments)


def test_a_connection_that_reads_no_responses_is_cut() -> None:
    connection = AnsweringProtocol()
    for _ in range(100):
        connection.answer(3 * HEALTH)
    assert connection.ended == "abort"
    assert connection.unread < 8000  # the limit, and the requests that came with the last one


@pytest.mark.parametrize("last", [False, True])
def test_a_timeout_cuts_a_client_that_does_not_read_its_response(last: bool) -> None:
    """close() waits until the client has read everything, for ever if it does not read."""
    connection = AnsweringProtocol()
    connection.answer(HEALTH.replace(b"Host:", b"Connection: close\r\nHost:") if last else HEALTH)
    connection.unread -= 400
    connection.expire()  # a slow client still reads
    assert connection.ended == ("close" if last else "")
    connection.expire()
    assert connection.ended == "abort"


def test_a_timeout_closes_a_connection_whose_client_has_read_everything() -> None:
    connection = AnsweringProtocol()
    connection.answer(HEALTH)
    connection.unread = 0
    connection.expire()
    assert (connection.ended, connection.timers) == ("close", [])


def test_answers_are_unchanged_after_the_socket_tests(quick: Live) -> None:
    first = asyncio.run(
        stream(quick.port, "/v1/completions", json.loads(body(stream=True, max_tokens=8)))
    )
    assert (
        first.text
        == quick.complete("x", max_tokens=8, seed=1, ignore_eos=True)["choices"][0]["text"]
    )
