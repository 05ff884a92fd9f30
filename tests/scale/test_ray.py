"""On a real Ray of one node: replicas and batches whose processes are killed give the answers of a
single engine, each request once. One Ray serves the whole run; VERBATIM_TEST_RAY names a running
one instead."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_watch import descendants, open_ports, processes, read_lines, stable_lines

from eventually import HANG_SECONDS, eventually, eventually_async
from verbatim import LLM, SamplingParams
from verbatim.scale.ray_start import LOCAL_RAY
from verbatim.server.api.routes import BODIES
from verbatim.testing.fakes import server_parts

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.slow]
HERE = Path(__file__).parent
HOSTILE_TESTS = HERE.parent / "server" / "test_server_hostile.py"
KEY = "a-key-of-the-tests"
REQUESTS = 150
ROWS = 300
# A cut answer is an error event; a request that found no replica is refused.
ENDS = {"engine_died", "unavailable"}
RUNNING = os.environ.get("VERBATIM_TEST_RAY")  # HOST:PORT of a Ray with 8 CPUs or more
# Ray's own authentication, between the head and its drivers.
TOKEN = {} if RUNNING else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

HEADS: list[int] = []  # the process that has started Ray


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray")
    if RUNNING:
        yield RUNNING
        return
    head = subprocess.Popen(
        [sys.executable, str(HERE / "ray_head.py"), "8"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **TOKEN},
    )
    assert head.stdin is not None
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    assert address.startswith("127.0.0.1:"), "Ray did not start; the reason is in its stderr"
    HEADS.append(head.pid)
    yield address
    head.stdin.close()
    head.wait()


def ray_env() -> dict[str, str]:
    return {**os.environ, **LOCAL_RAY, **TOKEN, "VERBATIM_API_KEY": KEY}


class RayServer:
    def __init__(self, *words: str) -> None:
        self.log = tempfile.NamedTemporaryFile("a+", suffix=".log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=self.log, stderr=self.log, env=ray_env()
        )
        found = eventually(
            lambda: (
                re.search(r"listening on http://127.0.0.1:(\d+)", self.text())
                or self.process.poll() is not None
            ),
            self.text,
        )
        assert not isinstance(found, bool), self.text()
        self.url = f"http://127.0.0.1:{found[1]}"
        self.headers = {"authorization": f"Bearer {KEY}"}
        health = f"{self.url}/health"
        eventually(lambda: httpx.get(health, timeout=HANG_SECONDS).status_code == 200, self.text)

    def text(self) -> str:
        return Path(self.log.name).read_text()

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=HANG_SECONDS).text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in rows}

    def replicas_up(self) -> int:
        return sum(v for k, v in self.metrics().items() if k.startswith("verbatim_engine_up"))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(300)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()


def three_replicas(address: str) -> tuple[str, ...]:
    words = ("-m", "verbatim", "serve", "--ray", address, "--replicas", "3", "--port", "0")
    return (*words, "--test-engine", "pipeline", "--served-model-name", "m", "--threads", "1")


# ---------------------------- the small version of both proofs (bench/ray_scaling.py has the whole)


def test_a_replica_is_killed_and_every_request_ends_once(ray_address: str) -> None:
    server = RayServer(*three_replicas(ray_address))
    eventually(lambda: server.replicas_up() == 3, server.text)
    check_ports(server)
    prompts = [f"a prefix of more than one block, then request {i % 25}" for i in range(REQUESTS)]
    prompts += ["one prompt, many copies"] * 40
    answers = asyncio.run(send_all(server, prompts))
    llm = LLM.from_loaded(server_parts("pipeline"))
    unique = sorted(set(prompts))
    completed = llm.generate(unique, SamplingParams(max_tokens=16, seed=7))
    right = dict(zip(unique, (c.text for c in completed), strict=True))
    good = [(prompt, text) for prompt, text, _ in answers if text is not None]
    lost = Counter(code for _, text, code in answers if text is None)
    assert [p for p, text in good if text != right[p]] == []
    assert set(lost) <= ENDS, lost
    assert len(good) > REQUESTS / 2
    assert len({text for prompt, text in good if prompt.startswith("one prompt")}) == 1
    eventually(lambda: server.replicas_up() == 3, server.text)  # Ray replaced it
    m = server.metrics()
    ended = sum(v for k, v in m.items() if k.startswith("verbatim_requests_ended_total"))
    assert m["verbatim_requests_opened_total"] == ended
    assert m["verbatim_router_prefix_found_total"] >= (
        0.9 * m["verbatim_router_prefix_possible_total"]
    )
    assert m["verbatim_router_prefix_possible_total"] > 0
    check_access(server)
    assert server.stop() == 0, server.text()
    assert "replica" in server.text()
    eventually(lambda: not processes("ServeReplica:verbatim"), "a replica is left")


def check_ports(server: RayServer) -> None:
    """Beyond loopback only one port of each replica is open, and it refuses a call without a
    token."""
    if RUNNING:  # not ours
        return
    import grpc

    roots = [server.process.pid, *HEADS]
    ports = open_ports({*roots, *(pid for root in roots for pid in descendants(root))})
    assert sorted(ports.values()) == processes("ServeReplica:verbatim"), ports
    assert "no token authentication" not in server.text()
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=HANG_SECONDS)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def send_all(server: RayServer, prompts: list[str]) -> list[tuple[str, str | None, str]]:
    """(prompt, text or None, error code) of each. One replica is killed in the middle."""
    done = 0
    slots = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=600) as http:

        async def one(prompt: str) -> tuple[str, str | None, str]:
            nonlocal done
            async with slots:
                body = {"model": "m", "prompt": prompt, "max_tokens": 16, "seed": 7}
                answer = await http.post("/v1/completions", json=body)
                done += 1
                if done == len(prompts) // 3:
                    os.kill(processes("ServeReplica:verbatim")[0], signal.SIGKILL)
                data = answer.json()
                if answer.status_code == 200:
                    return prompt, data["choices"][0]["text"], ""
                return prompt, None, data["error"]["code"]

        return await asyncio.gather(*map(one, prompts))


def check_access(server: RayServer) -> None:
    """Keys and checks are those of a server without Ray: a hostile request gets a 4xx that names
    what is wrong, on every route, and no replica dies of it."""
    url = f"{server.url}/v1/completions"
    for body in ({"prompt": "x", "nonsense": 1}, {"prompt": "x", "max_tokens": -1}, {"model": "n"}):
        answer = httpx.post(url, json=body, headers=server.headers, timeout=HANG_SECONDS)
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"]
    json_head = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, headers=json_head, timeout=600) as http:
        for path in BODIES:
            assert http.post(path, content=b"{}").status_code == 401, path
            for raw in HOSTILE:
                answer = http.post(path, content=raw, headers=server.headers)
                assert 400 <= answer.status_code < 500, (path, raw[:40], answer.text)
                assert answer.json()["error"]
    assert server.replicas_up() == 3


HOSTILE = (b"", b"{", b"[]", b"\x00", b'{"nonsense": NaN}', b'{"nonsense": 1}', b"[" * 100_000)


def test_a_batch_whose_actors_are_killed_equals_one_without_ray(
    ray_address: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "custom_id": f"row-{i}",
            "method": "POST",
            "url": "/v1/completions",
            # Many begin with the same blocks: an actor's prefix cache has them, or has not.
            "body": {"prompt": f"{i % 5} {LONG_PROMPTS[0]}, {i}", "max_tokens": 12, "seed": i},
        }
        for i in range(ROWS)
    ]
    lines[7]["body"] |= {"temperature": -1}
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain, target = tmp_path / "plain.jsonl", tmp_path / "ray.jsonl"
    common = ["--test-engine", "pipeline,pause=0.005", "--served-model-name", "m"]
    common += ["--threads", "1", "--speculate", "off"]  # the number of drafts depends on time
    batch = [sys.executable, "-m", "verbatim", "batch", str(source)]
    run = [*batch, str(target), "--ray", ray_address, "--replicas", "2", "--concurrency", "8"]
    process = subprocess.Popen([*run, *common], env=ray_env(), stderr=subprocess.PIPE, text=True)
    for rows in (20, 120):
        eventually(
            lambda rows=rows: (
                process.poll() is not None
                or (target.exists() and target.read_text().count("\n") >= rows)
            ),
            "no answers",
        )
        victims = processes("MapWorker")
        assert victims or process.poll() is not None
        for victim in victims[:1]:
            os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1, errors  # row 7 is an error
    subprocess.run([*batch, str(plain), *common, "-q"], check=False)
    on_ray = read_lines(target)
    assert [line["custom_id"] for line in on_ray] == [line["custom_id"] for line in lines]
    assert sorted(stable_lines(target)) == sorted(stable_lines(plain))
    check_parquet(lines[:20], on_ray[:20], ray_address, tmp_path, common)


def check_parquet(
    lines: list[Any], answers: list[Any], address: str, folder: Path, common: list[str]
) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {name: [line[name] for line in lines] for name in ("custom_id", "method", "url")}
    columns["body"] = [json.dumps(line["body"]) for line in lines]
    source, target = folder / "in.parquet", folder / "out.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), source)
    words = [sys.executable, "-m", "verbatim", "batch", str(source), str(target), "--ray", address]
    subprocess.run([*words, *common, "-q"], env=ray_env(), check=False)
    rows = pyarrow.parquet.read_table(target).to_pylist()
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
    assert [bool(row["error"]) for row in rows] == [row["status_code"] != 200 for row in rows]
    for row, answer in zip(rows, answers, strict=True):
        assert texts(json.loads(row["body"])) == texts(answer["response"]["body"])


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body.get("choices", ())]


# ----------------------------------------------------------------------------------------- the rest


def test_replicas_follow_the_load_and_one_that_leaves_ends_its_streams(
    ray_address: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("0")
    server = RayServer(str(HERE / "autoscaling_server.py"), ray_address, str(gate))
    assert server.replicas_up() == 1
    texts = asyncio.run(load_and_unload(server, gate))
    llm = LLM.from_loaded(server_parts("pipeline"))
    params = SamplingParams(max_tokens=LONG, seed=7, ignore_eos=True)
    assert texts == [answer.text for answer in llm.generate(LONG_PROMPTS, params)]
    eventually(lambda: len(processes("ServeReplica:verbatim")) == 1, server.text)
    m = server.metrics()
    assert m['verbatim_requests_ended_total{state="length"}'] == m["verbatim_requests_opened_total"]
    assert server.stop() == 0, server.text()


LONG = 400  # tokens of a stream that outlives its replica's removal
LONG_PROMPTS = ["the first replica has this", "the second replica has this"]


async def load_and_unload(server: RayServer, gate: Path) -> list[str]:
    """Texts of two long streams, one per replica. Requests wait until there are two replicas; when
    only the long streams are open, one replica is enough, and Ray removes the other."""

    def wait(condition: Callable[[dict[str, float]], bool]) -> Awaitable[Any]:
        async def check() -> bool:
            return condition(await asyncio.to_thread(server.metrics))

        return eventually_async(check, "the replicas do not follow the load")

    async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=None) as http:

        async def send(prompt: str, tokens: int) -> str:
            body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "seed": 7}
            body |= {"ignore_eos": True, "stream": True}
            answer = await http.post("/v1/completions", json=body)
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            events = [json.loads(line) for line in lines]
            assert events[-1]["choices"][0]["finish_reason"] == "length", answer.text[-300:]
            return "".join(event["choices"][0]["text"] for event in events)

        long = [asyncio.create_task(send(LONG_PROMPTS[0], LONG))]
        await wait(lambda m: m["verbatim_requests_open"] == 1)
        short = [asyncio.create_task(send(f"short {i}", 4)) for i in range(5)]
        await wait(lambda m: m["verbatim_replicas"] == 2)
        long.append(asyncio.create_task(send(LONG_PROMPTS[1], LONG)))
        await wait(lambda m: m["verbatim_requests_open"] == 7)
        gate.write_text("100")
        await asyncio.gather(*short)
        await wait(lambda m: m["verbatim_replicas"] == 1)  # the other drains
        assert not any(task.done() for task in long)
        gate.write_text("1000000")
        return await asyncio.gather(*long)


def test_the_hostile_requests_of_the_server_tests_end_as_without_ray(ray_address: str) -> None:
    """Every test of that file, against servers with two replicas."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(HOSTILE_TESTS),
    ]
    env = {**ray_env(), "VERBATIM_TEST_SERVER_ON_RAY": ray_address}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_a_failed_start_names_the_engines_own_error(ray_address: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    body = {"prompt": "x", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    wrong = ["--test-engine", "pipeline,context=64", "--context", "128", "--ray", ray_address]
    commands = (["serve", "--port", "0"], ["batch", str(source), str(tmp_path / "out.jsonl")])
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "verbatim", *words, *wrong],
            env=ray_env(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("verbatim: context: 128 is more than this model's 64 positions")


def test_a_host_beyond_loopback_needs_a_key() -> None:
    words = [sys.executable, "-m", "verbatim", "serve", "--ray", "--host", "0.0.0.0", "--port", "0"]
    env = {k: v for k, v in os.environ.items() if k != "VERBATIM_API_KEY"}
    done = subprocess.run(
        [*words, "--test-engine", "pipeline"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "key" in done.stderr
