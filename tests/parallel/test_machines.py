"""One model over several machines: ranks that join over TCP. Here the machines are one, and the
ranks still know each other by addresses only."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_parallel import LONG, NEEDLES, PROMPT, bits, needles

from eventually import HANG_SECONDS, eventually
from verbatim import LLM
from verbatim.base.errors import BackendError, ModelError, ParameterError
from verbatim.parallel import rendezvous
from verbatim.parallel.backend import ParallelBackend
from verbatim.parallel.rendezvous import RefusedError, join, lead

SECRET = "0123456789abcdef-of-the-tests"
SETTINGS: dict[str, Any] = {"threads": 1, "backend": "cpu"}


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """A free port of this machine, and the secret in the environment."""
    monkeypatch.setenv(rendezvous.SECRET, SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def machine(model: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """`verbatim rank`, as on another machine."""
    command = [sys.executable, "-m", "verbatim", "rank", str(model), "--rank-address", address]
    with subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ranks_that_join_have_the_bits_of_one_process(tiny: Path, address: str) -> None:
    """They also join again after their group has ended, or one of them has died."""
    small = {"kv_blocks": 14, "step_tokens": 40}
    several = {"tensor_parallel": 3, "rank_address": address}
    with LLM(tiny, **SETTINGS, **small) as llm:
        expected = (llm.fingerprint, needles(llm))
    with machine(tiny, address), machine(tiny, address) as dies:
        with LLM(tiny, **SETTINGS, **small, **several) as llm:
            assert (llm.fingerprint, needles(llm)) == expected
        with LLM(tiny, **SETTINGS, **several) as llm:
            stream = llm.stream(PROMPT, LONG)
            next(stream)
            dies.kill()
            with pytest.raises(BackendError, match=r"rank \d of 3, on this machine, has ended"):
                list(stream)
        several = {"pipeline_parallel": 3, "rank_address": address}
        with machine(tiny, address) as dies, LLM(tiny, **SETTINGS, **several) as llm:
            assert bits([llm.generate(PROMPT, NEEDLES[0])]) == expected[1][0]
            dies.kill()
            eventually(lambda: llm.loaded.failure(), "an idle group does not notice")


def test_another_model_is_refused_by_name(tiny: Path, address: str, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = bytearray(tiny.read_bytes())
    data[-64:] = bytes(64)
    other.write_bytes(data)
    with machine(other, address) as process:
        with pytest.raises(ModelError, match=r"rank 1 has the model and numerics .*, and rank 0"):
            LLM(tiny, **SETTINGS, tensor_parallel=2, rank_address=address)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert "rank 0 refuses this group: rank 1 has the model" in said
    assert process.returncode == 1


def members(address: str, count: int) -> tuple[Any, list[Any]]:
    """What lead() returns, and what join() returns in each of the other ranks."""
    with ThreadPoolExecutor(count) as pool:
        leader = pool.submit(lead, address, count, SECRET.encode())
        others = [pool.submit(join, address, SECRET.encode()) for _ in range(count - 1)]
        return leader.result(), [other.result() for other in others]


def test_every_two_ranks_are_connected(address: str) -> None:
    led, joined = members(address, 4)
    by_rank = {sockets.index(None): sockets for sockets in joined}
    by_rank[0] = [None, *(member.socket for member in led)]
    assert sorted(by_rank) == [0, 1, 2, 3]
    for rank, sockets in by_rank.items():
        assert [other for other, end in enumerate(sockets) if end is None] == [rank]
        for end in filter(None, sockets):
            end.sendall(bytes([rank]))
    for rank, sockets in by_rank.items():
        found = [end.recv(1)[0] if end else rank for end in sockets]
        assert found == [0, 1, 2, 3]
    for end in (end for sockets in by_rank.values() for end in sockets if end):
        end.close()


def test_strangers_do_not_join_and_do_not_stop_the_others(address: str) -> None:
    host, port = address.split(":")
    done: list[Any] = []
    waiting = threading.Thread(
        target=lambda: done.append(lead(address, 2, SECRET.encode())), daemon=True
    )
    waiting.start()

    def connected() -> socket.socket | None:
        try:
            return socket.create_connection((host, int(port)), timeout=HANG_SECONDS)
        except ConnectionRefusedError:
            return None

    silent = eventually(connected)  # says nothing at all
    with eventually(connected) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n" * 4)
        said = b"".join(iter(lambda: noisy.recv(4096), b""))
        assert len(said) == len(rendezvous.MAGIC) + 2 * rendezvous.NONCE
        assert said.endswith(bytes(rendezvous.NONCE)), "a stranger was sent a proof"
    with pytest.raises(RefusedError, match="has another VERBATIM_RANK_SECRET"):
        join(address, b"another secret of the same kind")
    assert not done
    joined = join(address, SECRET.encode())
    waiting.join(HANG_SECONDS)
    assert joined.index(None) == len(done) == 1
    with pytest.raises(ConnectionRefusedError):  # nothing listens any more
        socket.create_connection((host, int(port)), timeout=HANG_SECONDS)
    for end in (silent, joined[0], done[0][0].socket):
        end.close()


def test_a_rank_checks_that_rank_0_knows_the_secret() -> None:
    """A server that sends the joiner's own proof back is not rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joining = pool.submit(join, address, SECRET.encode())
        with server.accept()[0] as end:
            end.sendall(rendezvous.MAGIC + bytes(rendezvous.NONCE))
            end.sendall(end.recv(64)[32:])
            with pytest.raises(RefusedError, match="another VERBATIM_RANK_SECRET"):
                joining.result()


def test_another_version_is_refused_by_name_on_both_sides(address: str) -> None:
    host, port = address.split(":")
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(lead, address, 2, SECRET.encode())

        def admitted() -> socket.socket | None:
            try:
                return rendezvous._connect(host, int(port), SECRET.encode())
            except ConnectionRefusedError:
                return None

        with eventually(admitted) as end:
            rendezvous._send(end, {"version": "0.0.1", "port": 1})
            assert "runs verbatim 0.0.1, and rank 0 " in rendezvous._receive(end)["refused"]
        with pytest.raises(BackendError, match=r"127\.0\.0\.1 runs verbatim 0\.0\.1"):
            leader.result()


def test_memory_is_counted_per_machine() -> None:
    """Ranks 0 and 1 are on this machine, rank 2 alone on another with less memory."""
    ranks = [SimpleNamespace(block_bytes=(40, 4), memory=m) for m in (900, 800, 500)]
    backend: Any = SimpleNamespace(group=SimpleNamespace(hosts=("", "", "10.0.0.2")), _ranks=ranks)
    assert ParallelBackend.block_bytes(backend) == (80, 8)
    assert ParallelBackend.available_memory(backend) == 500


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 1}, "rank_address: needs tensor_parallel or pipeline_parallel"),
        ({"rank_address": "10.0.0.1"}, "rank_address: '10.0.0.1' is not HOST:PORT"),
        ({"adapters": {"a": "a.gguf"}}, "adapters: do not run with rank_address"),
        ({}, "rank_address: the variable VERBATIM_RANK_SECRET must have at least 16 characters"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    tiny: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rendezvous.SECRET, "too short")
    with pytest.raises(ParameterError, match=message):
        LLM(tiny, **{**SETTINGS, "tensor_parallel": 2, "rank_address": "127.0.0.1:1", **settings})
