"""Replicas and batches on Ray, against the same engines without it:
`python bench/ray_scaling.py [--model MODEL] [--threads T] [--only PART] [--out DIR]`.

    scaling  throughput of 1, 2 and 4 replicas with T threads each at 16 streams per replica,
             interleaved with as many bare servers; with 1 replica: the overhead per token
    kill     3 replicas, 2,000 requests over HTTP, one replica killed with SIGKILL: every request
             ends once, and every completed answer is the one of a bare server
    batch    20,000 rows on 3 actors of which two are killed: every row once and in order, equal to
             `verbatim batch` without Ray except random ids and times

The limit is printed before the result: N replicas cannot be faster than N bare servers, which share
the same memory bandwidth. The client, the gateway and Ray run on the cores that the engines leave.
Each result is printed, and written to DIR/ray_scaling.json, as soon as it is there. A Ray of this
machine's own is started on loopback. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from server import PROMPT, Client, cpu_seconds, request

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "server"), str(TESTS / "scale")]

from live_server import Live, check_states  # noqa: E402
from ray_watch import processes, read_lines, stable_lines  # noqa: E402
from streams import stream  # noqa: E402

from eventually import eventually  # noqa: E402
from verbatim.scale.ray_start import LOCAL_RAY  # noqa: E402

STREAMS = 16  # per replica
REPLICAS = "ServeReplica:verbatim"  # in the titles of Ray's processes
ACTORS = "MapWorker"


class Bench:
    """The options, the address of Ray, the deadline, and the results so far."""

    def __init__(self, args: argparse.Namespace, ray: str) -> None:
        self.args, self.ray = args, ray
        self.end = time.monotonic() + args.seconds
        self.made: dict[str, Any] = {"bench": "ray_scaling", "model": Path(args.model).name}
        self.made |= {"cores": len(os.sched_getaffinity(0)), "threads": args.threads}

    def left(self) -> float:
        return max(self.end - time.monotonic(), 1.0)

    def add(self, part: str, result: dict[str, Any]) -> None:
        self.made[part] = result
        if self.args.out:
            path = Path(self.args.out) / "ray_scaling.json"
            path.write_text(json.dumps(self.made, indent=1) + "\n")

    def engine(self, threads: int) -> list[str]:
        """Drafts are off: how many there are depends on time."""
        words = ["--model", self.args.model, "--backend", "cpu", "--speculate", "off", "--offline"]
        return [*words, "--context", "2048", "--threads", str(threads)]

    @contextlib.contextmanager
    def server(self, threads: int, *flags: str) -> Iterator[Live]:
        live = Live(*self.engine(threads), *flags, engine=None, env=LOCAL_RAY)
        try:
            yield live.wait_ready()
        except BaseException:
            print(live.log_text()[-3000:], file=sys.stderr)
            raise
        finally:
            live.stop()

    @contextlib.contextmanager
    def replicas(self, count: int, threads: int) -> Iterator[Live]:
        flags = ("--ray", self.ray, "--replicas", str(count), "--drain-seconds", "1")
        with self.server(threads, *flags) as live:
            eventually(lambda: up(live) == count, live.log_text, self.left())
            yield live


def up(live: Live) -> int:
    return int(sum(v for k, v in live.metrics().items() if k.startswith("verbatim_engine_up")))


@contextlib.contextmanager
def local_ray(cpus: int) -> Iterator[str]:
    """HOST:PORT of a Ray with `cpus` CPUs, on loopback and without a dashboard. Its token is in the
    environment of every process that is started here."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    words = [sys.executable, str(TESTS / "scale" / "ray_head.py"), str(cpus)]
    head = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert head.stdin is not None
    assert head.stdout is not None
    try:
        address = head.stdout.readline().strip()
        assert address, "Ray did not start"
        yield address
    finally:
        head.stdin.close()
        head.wait()


# --- scaling


def wave(bench: Bench, ports: list[int], streams: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of `streams` streams that start together, spread evenly over the ports; and
    the median seconds between two tokens of a stream."""

    async def send_all() -> tuple[float, float]:
        clients = [Client(port) for port in ports]
        began = time.perf_counter()
        sent = [clients[i % len(ports)].send(request(tokens, i)) for i in range(streams)]
        done = await asyncio.wait_for(asyncio.gather(*sent), bench.left())
        seconds = time.perf_counter() - began
        for client in clients:
            client.close()
        assert {exchange.status for exchange in done} == {200}
        gaps = [(e.times[-1] - e.times[0]) / (len(e.times) - 1) for e in done]
        return streams * tokens / seconds, median(gaps)

    return uvloop.run(send_all())


def scaling(bench: Bench) -> dict[str, Any]:
    args, rows = bench.args, []
    print(f"each engine has {args.threads} threads; N replicas: at most N bare servers' rate")
    with contextlib.ExitStack() as bare:
        servers: list[Live] = []
        for count in args.replicas:
            while len(servers) < count:
                servers.append(bare.enter_context(bench.server(args.threads)))
            with bench.replicas(count, args.threads) as live:
                rows.append(compare(bench, servers, live, count))
            bench.add("scaling", {"rows": rows})
    first = rows[0]
    for row in rows:
        row["speedup"] = row["ray_tokens_s"] / first["ray_tokens_s"]
        row["speedup_limit"] = row["bare_tokens_s"] / first["bare_tokens_s"]
        row["efficiency"] = row["speedup"] * first["replicas"] / row["replicas"]
        print(
            f"{row['replicas']} replicas: {row['speedup']:.2f} times the throughput of "
            f"{first['replicas']} (limit by bare servers: {row['speedup_limit']:.2f}): "
            f"efficiency {row['efficiency']:.0%}"
        )
    return {"rows": rows}


def compare(bench: Bench, servers: list[Live], live: Live, count: int) -> dict[str, Any]:
    args, streams = bench.args, STREAMS * count
    pids = {
        "bare": [server.process.pid for server in servers],  # their HTTP processes
        "gateway": [live.process.pid],
        "replicas": processes(REPLICAS),  # without their engines
    }
    targets = {"bare": [server.port for server in servers], "ray": [live.port]}
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "ray": []}
    cpu = dict.fromkeys(pids, 0.0)
    for turn in range(-1, args.rounds):  # interleaved, so that a busy moment affects both
        for name, ports in targets.items():
            before = {who: sum(map(cpu_seconds, some)) for who, some in pids.items()}
            result = wave(bench, ports, streams, args.tokens)
            if turn < 0:  # turn -1 warms up
                continue
            found[name].append(result)
            for who, some in pids.items():
                if (who == "bare") == (name == "bare"):
                    cpu[who] += sum(map(cpu_seconds, some)) - before[who]
    tokens = args.rounds * streams * args.tokens
    per_token = {f"{who}_cpu_ms_per_token": cpu[who] * 1e3 / tokens for who in pids}
    bare, ray = (median(rate for rate, _ in found[name]) for name in ("bare", "ray"))
    gap = {name: median(gap for _, gap in found[name]) for name in found}
    row = {
        "replicas": count,
        "streams": streams,
        "bare_tokens_s": bare,
        "ray_tokens_s": ray,
        "overhead_per_token": median(
            b / r - 1 for (b, _), (r, _) in zip(found["bare"], found["ray"], strict=True)
        ),
        "bare_token_ms": gap["bare"] * 1e3,
        "ray_token_ms": gap["ray"] * 1e3,
        **per_token,
        "rates": {name: [round(rate) for rate, _ in found[name]] for name in found},
    }
    print(
        f"{streams} streams: {count} bare servers {bare:.0f} tokens/s (the limit), "
        f"{count} replicas {ray:.0f}: overhead per token {row['overhead_per_token']:.1%}; "
        f"between two tokens of a stream {gap['bare'] * 1e3:.2f} and {gap['ray'] * 1e3:.2f} ms; "
        f"ms of CPU per token: gateway {row['gateway_cpu_ms_per_token']:.3f}, replicas without "
        f"engines {row['replicas_cpu_ms_per_token']:.3f}, HTTP of the bare servers "
        f"{row['bare_cpu_ms_per_token']:.3f}"
    )
    return row


# --- kill


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "seed": 7, "stream": True}


def random_prompts(count: int) -> list[str]:
    """A tenth are copies of one prompt; the others repeat 200 prompts with eight shared starts."""
    rng = random.Random(24)
    starts = [f"Here is chapter {i} of a book. {PROMPT * 3}" for i in range(8)]
    prompts = [f"{rng.choice(starts)}Question {rng.randrange(25)}:" for _ in range(count * 9 // 10)]
    prompts += [f"One prompt, many copies. {PROMPT * 2}"] * (count - len(prompts))
    rng.shuffle(prompts)
    return prompts


async def answer_all(
    port: int, prompts: list[str], tokens: int, slots: int, kill_at: int = -1
) -> list[tuple[str, list[str]]]:
    """(text, error codes) of each prompt, streamed; `kill_at`: after so many answers a replica is
    killed."""
    room, done = asyncio.Semaphore(slots), 0

    async def one(prompt: str) -> tuple[str, list[str]]:
        nonlocal done
        async with room:
            got = await stream(port, "/v1/completions", body(prompt, tokens))
        done += 1
        if done == kill_at:
            os.kill(processes(REPLICAS)[0], signal.SIGKILL)
        codes = [error["code"] for error in got.errors]
        # An answer is whole or an error: nothing else is an end.
        assert got.whole, got.head
        assert bool(codes) != got.finished, got.events[-2:]
        return got.text, codes

    return await asyncio.gather(*map(one, prompts))


def kill(bench: Bench) -> dict[str, Any]:
    args, prompts = bench.args, random_prompts(bench.args.requests)
    unique, tokens = sorted(set(prompts)), 24
    with bench.server(args.threads) as bare:
        run = answer_all(bare.port, unique, tokens, 64)
        single = uvloop.run(asyncio.wait_for(run, bench.left()))
    right = {prompt: text for prompt, (text, _) in zip(unique, single, strict=True)}
    with bench.replicas(3, args.threads) as live:
        began = time.perf_counter()
        run = answer_all(live.port, prompts, tokens, 48, kill_at=len(prompts) // 3)
        answers = uvloop.run(asyncio.wait_for(run, bench.left()))
        seconds = time.perf_counter() - began
        eventually(lambda: up(live) == 3, live.log_text, bench.left())  # Ray replaced it
        m, gone = live.metrics(), live.log_text().count(" died; ")
    assert gone, "no replica died"
    check_states(m)
    good = [(p, text) for p, (text, codes) in zip(prompts, answers, strict=True) if not codes]
    possible = m["verbatim_router_prefix_possible_total"]
    result = {
        "requests": len(prompts),
        "completed": len(good),
        "errors": Counter(code for _, codes in answers for code in codes),
        "different": sum(text != right[p] for p, text in good),
        "answers_of_copies": len({text for p, text in good if p.startswith("One prompt")}),
        "prefix_found": m["verbatim_router_prefix_found_total"] / max(possible, 1),
        "prefix_possible": possible,
        "seconds": seconds,
    }
    print(
        f"kill: {len(prompts)} requests on 3 replicas, one killed: {len(good)} completed in "
        f"{seconds:.0f} s, errors {dict(result['errors'])}; {result['different']} answers differ "
        f"from one bare server's; the copies have {result['answers_of_copies']} answer; the router "
        f"found the prefix in {result['prefix_found']:.1%} of {possible:.0f} cases"
    )
    assert result["different"] == 0
    assert result["answers_of_copies"] == 1
    return result


# --- batch


def write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            body = {"prompt": f"Row {i}: the sea", "max_tokens": 4 + i % 8, "seed": i}
            line = {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def batch(bench: Bench) -> dict[str, Any]:
    args, kills = bench.args, 0
    with tempfile.TemporaryDirectory() as folder:
        source, plain, target = (Path(folder) / f"{n}.jsonl" for n in ("in", "plain", "ray"))
        write_rows(source, args.rows)
        words = [sys.executable, "-m", "verbatim", "batch", str(source)]
        began = time.perf_counter()
        command = [*words, str(plain), "-q", *bench.engine(3 * args.threads)]
        subprocess.run(command, check=True, timeout=bench.left())
        plain_seconds = time.perf_counter() - began
        print(f"batch: {args.rows} rows without Ray on one engine: {plain_seconds:.0f} s")
        began = time.perf_counter()
        command = [*words, str(target), "--ray", bench.ray, "--replicas", "3", "-q"]
        process = subprocess.Popen(
            [*command, *bench.engine(args.threads)], env={**os.environ, **LOCAL_RAY}
        )
        try:
            for share in (0.2, 0.5):
                some = int(share * args.rows)
                eventually(
                    lambda some=some: lines_in(target) >= some or process.poll() is not None,
                    "no answers",
                    bench.left(),
                )
                for victim in processes(ACTORS)[:1]:
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
            code = process.wait(bench.left())
        finally:
            process.kill()
            process.wait()
        ray_seconds = time.perf_counter() - began
        answers = read_lines(target)
        digests = [
            hashlib.sha256("\n".join(sorted(stable_lines(path))).encode()).hexdigest()[:16]
            for path in (target, plain)
        ]
    ids = [line["custom_id"] for line in answers]
    result = {
        "rows": len(answers),
        "kills": kills,
        "exit_code": code,
        "in_order": ids == [f"row-{i}" for i in range(args.rows)],
        "equal": digests[0] == digests[1],
        "sha256": digests,
        "plain_seconds": plain_seconds,
        "ray_seconds": ray_seconds,
    }
    print(
        f"batch: {len(answers)} rows on 3 actors, {kills} kills, {ray_seconds:.0f} s; in order: "
        f"{result['in_order']}; equal to the batch without Ray: {result['equal']} ({digests[0]})"
    )
    assert result["in_order"]
    assert result["equal"]
    assert kills == 2
    return result


PARTS = {"scaling": scaling, "kill": kill, "batch": batch}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=os.environ.get("VERBATIM_MODEL", "smollm2"))
    parser.add_argument("--threads", type=int, default=3, help="per engine")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=128, help="per stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=1800, help="the deadline of everything")
    parser.add_argument("--out", help="a folder for the results")
    args = parser.parse_args()
    cpus = max(*args.replicas, 3) * args.threads
    failed = []
    with local_ray(cpus) as address:
        bench = Bench(args, address)
        for part in args.only:
            try:
                bench.add(part, PARTS[part](bench))
            except Exception as error:  # the other parts still give their result
                failed.append(part)
                print(f"{part} failed: {type(error).__name__}: {error}", flush=True)
                bench.add(f"{part}_error", {"error": repr(error)})
    print(json.dumps(bench.made))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
