"""Decisions that need no Ray: the options, the routing, the resource statement, autoscaling, the
merged metrics, Parquet-free parts of a batch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from subprocess import PIPE
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verbatim.scale
from eventually import HANG_SECONDS
from verbatim.base.errors import BackendError, ParameterError
from verbatim.cli.main import main
from verbatim.diagnose.footprint import Footprint, footprint_of_config
from verbatim.observe.merge_metrics import merge
from verbatim.scale import ray_start
from verbatim.scale.autoscale import wanted_replicas
from verbatim.scale.batch import parquet
from verbatim.scale.ray_options import Replicas, parse_address, parse_replicas
from verbatim.scale.ray_start import LOCAL_RAY, connect, local_environment
from verbatim.scale.resources import PROCESS_BYTES, Node, state_needs
from verbatim.scale.routes import routing
from verbatim.scale.routes.routing import Candidate, Decider, PrefixMap, Route

GIB = 1 << 30


def hashes(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode().ljust(8) for name in names)


# --------------------------------------------------------------------------------- start of Ray


class FakeRay(ModuleType):
    """A Ray whose start fails `failures` times and leaves a process each time."""

    def __init__(self, failures: int) -> None:
        super().__init__("ray")
        self.failures = failures
        self.left: list[subprocess.Popen[bytes]] = []
        self.started: list[dict[str, Any]] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.started.append(options)
        if len(self.started) <= self.failures:
            self.left.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE))
            raise Exception("The current node timed out during startup.")

    def shutdown(self) -> None:
        pass


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(0)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_start, "require_ray", lambda: None)
    # So that connect()'s own change is undone.
    monkeypatch.setattr(ray_start.os, "environ", dict(os.environ))
    return fake


def test_a_failed_start_of_ray_is_tried_again(
    fake_ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    fake_ray.failures = 2
    assert connect("local")
    assert len(fake_ray.started) == 3
    assert {(o["address"], o["include_dashboard"]) for o in fake_ray.started} == {("local", False)}
    assert "attempt 2 of" in caplog.text
    assert [process.wait(HANG_SECONDS) for process in fake_ray.left] == [-signal.SIGKILL] * 2


def test_a_ray_that_never_starts_is_an_error_with_a_remedy(fake_ray: FakeRay) -> None:
    fake_ray.failures = 100
    with pytest.raises(BackendError, match=r"timed out during startup.*ray start --head"):
        connect("local")
    assert len(fake_ray.started) == ray_start.ATTEMPTS
    assert all(process.wait(HANG_SECONDS) for process in fake_ray.left)


def test_a_local_ray_has_a_token_that_only_its_processes_know(fake_ray: FakeRay) -> None:
    tokens = set()
    for _ in range(2):
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            os.environ.pop(name, None)
        connect("local")
        assert os.environ["RAY_AUTH_MODE"] == "token"
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
    assert [len(token) for token in tokens] == [64, 64]
    own = local_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "mine"})
    assert "RAY_AUTH_TOKEN" not in own
    assert own.items() >= LOCAL_RAY.items()


def test_a_local_ray_without_authentication_is_refused(fake_ray: FakeRay) -> None:
    os.environ["RAY_AUTH_MODE"] = "Disabled"
    with pytest.raises(ParameterError, match=r"RAY_AUTH_MODE is 'Disabled'.*unset"):
        connect("local")
    assert not fake_ray.started
    assert not connect("auto")  # a cluster of the user's own: warned about, not refused


def test_a_cluster_that_cannot_be_reached_is_an_error_before_ray_tries(fake_ray: FakeRay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not connect(address)
        assert not connect(f"ray://{address}")
    started = [options["address"] for options in fake_ray.started]
    assert started == [address, f"ray://{address}"]
    for gone in (address, f"ray://{address}", "127.0.0.1:99999"):
        with pytest.raises(BackendError, match=f"no Ray cluster at {gone}: .*check that Ray runs"):
            connect(gone)
    assert len(fake_ray.started) == 2


# --------------------------------------------------------------------------------------- options


def test_replicas_are_a_number_or_a_range() -> None:
    assert parse_replicas("3") == Replicas(3, 3)
    assert parse_replicas(2).fixed
    assert parse_replicas("2-8") == Replicas(2, 8)
    assert str(parse_replicas("2-8")) == "2-8"
    for wrong in ("0", "4-2", "-1", "two", "1-", "1.5", ""):
        with pytest.raises(ParameterError, match="replicas"):
            parse_replicas(wrong)


def test_an_address_is_not_a_model() -> None:
    for good in ("local", "auto", "10.0.0.1:6379", "head.cluster:6379", "ray://head:10001"):
        assert parse_address(good) == good
    for wrong in ("smollm2", "org/name", "http://x:1", "./model.gguf", ""):
        with pytest.raises(ParameterError, match="before --ray"):
            parse_address(wrong)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("serve", "--replicas", "2"), "needs --ray"),
        (("serve", "--ray", "smollm2"), "put it before --ray"),
        (("serve", "--ray", "--replicas", "0"), "at least 1"),
        (("serve", "--ray", "--model", "a=smollm2", "--model", "b=smollm2"), "replicas run one"),
        (("serve", "--ray", "--model", "a=smollm2"), "replicas run one model"),
        (("serve", "--ray", "--model", "a=smollm2", "--pin", "a"), "replicas run one model"),
        (("batch", __file__, "out.jsonl", "--replicas", "2"), "needs --ray"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_the_package_exports_two_names() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = verbatim.scale.nothing  # type: ignore[attr-defined]
    assert verbatim.scale.Generate.__name__ == "Generate"


# --------------------------------------------------------------------------------------- routing


def test_the_prefix_wins_until_the_load_outweighs_it() -> None:
    """The worked numbers of routing.py."""
    decider = Decider()
    decider.mean_work = 300.0
    blocks = tuple(bytes([i]) * 8 for i in range(56))
    decider.prefixes.report("a", set(blocks))
    route = Route(blocks, tokens=1000, output=0)
    assert decider.rank(route, [Candidate("a", 2), Candidate("b", 0)]) == ["a", "b"]
    assert decider.rank(route, [Candidate("a", 4), Candidate("b", 0)]) == ["b", "a"]


def test_without_a_prefix_the_shortest_queue_is_first() -> None:
    decider = Decider()
    ranked = decider.rank(
        Route(tokens=100), [Candidate("a", 3), Candidate("b", 1), Candidate("c", 2)]
    )
    assert ranked == ["b", "c", "a"]


def test_a_replica_that_restarts_its_engine_is_last() -> None:
    decider = Decider()
    ranked = decider.rank(Route(), [Candidate("a", 0, ready=False), Candidate("b", 50)])
    assert ranked == ["b", "a"]


def test_blocks_routed_a_moment_ago_are_assumed_and_forgotten() -> None:
    now = 0.0
    prefixes = PrefixMap(lambda: now)
    prefixes.routed("a", hashes("1", "2"))
    assert prefixes.hit("a", hashes("1", "2", "3")) == 2
    prefixes.report("a", {b"other"})
    assert prefixes.hit("a", hashes("1")) == 1
    now = routing.ASSUME_SECONDS + 1
    prefixes.report("a", {b"other"})  # the blocks were evicted
    assert prefixes.hit("a", hashes("1")) == 0
    prefixes.report("a", set(hashes("2")))
    assert prefixes.hit("a", hashes("1", "2")) == 0, "a hit is a run from the first block"
    prefixes.keep({"b"})
    assert prefixes.hit("a", hashes("2")) == 0


def test_assumed_blocks_are_bounded() -> None:
    prefixes = PrefixMap(lambda: 0.0)
    prefixes.routed("a", [str(i).encode() for i in range(routing.MAX_HASHES + 5)])
    assert prefixes.hit("a", [b"4"]) == 0
    assert prefixes.hit("a", [b"5"]) == 1


def test_repeats_are_found_and_counted() -> None:
    decider = Decider()
    for _ in range(3):
        route = Route(hashes("x", "y"), tokens=40, output=8)
        name = decider.rank(route, [Candidate("a", 0), Candidate("b", 0)])[0]
        decider.routed(route, name, ["a", "b"])
    assert (decider.routed_total, decider.possible, decider.found) == (3, 2, 2)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.booleans()),
        unique_by=lambda item: item[0],
        min_size=1,
    ),
    st.lists(st.binary(min_size=8, max_size=8), max_size=6),
    st.randoms(),
)
def test_the_ranking_has_every_replica_once_whatever_the_order(
    state: list[tuple[str, int, bool]], blocks: list[bytes], random: Any
) -> None:
    decider = Decider()
    decider.prefixes.report("a", set(blocks))
    candidates = [Candidate(*item) for item in state]
    ranked = decider.rank(Route(tuple(blocks), 16 * len(blocks) + 1), candidates)
    assert sorted(ranked) == sorted(name for name, _, _ in state)
    random.shuffle(candidates)
    assert decider.rank(Route(tuple(blocks), 16 * len(blocks) + 1), candidates) == ranked


# ------------------------------------------------------------------------------------- resources


def footprint() -> Footprint:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return footprint_of_config(config, "config.json", quant="q8_0")


def test_replicas_of_a_node_share_its_cpus_and_memory() -> None:
    nodes = [Node(16, 0, 64 * GIB)] * 2
    needs = state_needs(footprint(), {}, nodes, Replicas(4, 4))
    assert needs.cpus == 8 == needs.settings["threads"]
    assert needs.weights == int(footprint().weight_bytes)
    assert needs.memory == needs.weights + needs.cache + PROCESS_BYTES
    assert needs.settings["kv_memory"] == needs.cache
    assert 2 * needs.memory <= 64 * GIB
    assert needs.actor_options()["num_gpus"] == 0


def test_a_head_node_without_cpus_holds_no_replica() -> None:
    """KubeRay's advice for the head node is num-cpus: 0."""
    for memory in (32, 64, 512):
        nodes = [Node(0, 0, memory * GIB), Node(16, 0, 64 * GIB)]
        needs = state_needs(footprint(), {}, nodes, Replicas(2, 2))
        assert needs == state_needs(footprint(), {}, nodes[1:], Replicas(2, 2))
        assert needs.cpus == 8
    with pytest.raises(ParameterError, match="no node has that"):
        state_needs(footprint(), {}, nodes[:1], Replicas(1, 1))


def test_given_settings_are_kept() -> None:
    nodes = [Node(16, 0, 64 * GIB)]
    engine = {"threads": 3, "kv_memory": 1 << 29}
    needs = state_needs(footprint(), engine, nodes, Replicas(1, 2))
    assert (needs.cpus, needs.cache) == (3, 1 << 29)


def test_a_model_that_fits_no_node_is_refused_with_the_numbers() -> None:
    nodes = [Node(8, 0, 4 * GIB), Node(4, 0, 2 * GIB)]
    with pytest.raises(ParameterError) as caught:
        state_needs(footprint(), {"context": 4096}, nodes, Replicas(1, 1))
    text = str(caught.value)
    assert "weights 6.7 GiB" in text
    assert "KV cache 2 GiB" in text
    assert "8 CPUs, 4 GiB" in text


def test_more_replicas_than_the_cluster_holds_are_refused() -> None:
    nodes = [Node(2, 0, 64 * GIB)]
    with pytest.raises(ParameterError, match=r"3 replicas need 1 CPUs .* room for 2"):
        state_needs(footprint(), {"threads": 1}, nodes, Replicas(3, 3))
    assert state_needs(None, {"threads": 1}, nodes, Replicas(1, 3)).cpus == 1


def test_all_replicas_run_on_gpus_or_none() -> None:
    nodes = [Node(16, 2, 64 * GIB), Node(16, 0, 64 * GIB)]
    two = state_needs(footprint(), {}, nodes, Replicas(2, 2))
    assert two.gpus == 1
    assert two.settings == {"backend": "cuda"}
    three = state_needs(footprint(), {}, nodes, Replicas(3, 3))
    assert three.gpus == 0
    with pytest.raises(ParameterError, match="a GPU per replica: 3, and the cluster has 2"):
        state_needs(footprint(), {"backend": "cuda"}, nodes, Replicas(3, 3))


def test_the_ranks_of_a_replica_are_on_one_node_with_cpus_and_gpus_for_each() -> None:
    two = {"tensor_parallel": 2}
    needs = state_needs(footprint(), two, [Node(16, 0, 64 * GIB)], Replicas(2, 2))
    assert (needs.cpus, needs.settings["threads"]) == (8, 4)
    assert needs.memory == needs.weights + needs.cache + 2 * PROCESS_BYTES
    cards = [Node(16, 2, 64 * GIB), Node(16, 1, 64 * GIB)]
    assert state_needs(footprint(), two, cards, Replicas(1, 1)).gpus == 2
    assert state_needs(footprint(), two, cards, Replicas(2, 2)).gpus == 0, "no node has two more"
    with pytest.raises(ParameterError, match="rank_address: the ranks of a replica are on one"):
        state_needs(footprint(), {**two, "rank_address": "h:1"}, cards, Replicas(1, 1))


# -------------------------------------------------------------------------- autoscaling, metrics


def test_replicas_follow_the_queue_and_the_cache() -> None:
    assert wanted_replicas(1, 40, 16, [0.2], 0) == 3
    assert wanted_replicas(3, 2, 16, [0.1, 0.2, 0.1], 0) == 1
    assert wanted_replicas(2, 10, 16, [0.95, 0.97], 4) == 3, "blocks are missing"
    assert wanted_replicas(2, 10, 16, [0.95, 0.97], 0) == 2, "full, but nothing waits"
    assert wanted_replicas(3, 2, 16, [0.6, 0.7, 0.6], 0) == 3, "the others could not take it"
    assert wanted_replicas(1, 0, 16, [], 0) == 1


def test_metrics_of_replicas_are_grouped_by_name() -> None:
    text = '# HELP x of {all}\n# TYPE x counter\nx_total{kind="a b"} 2\nx_total 1.5\n'
    merged = merge("replica", {"r1": text, "r2": text})
    assert merged.count("# TYPE x") == 1
    assert merged.splitlines()[2:] == [
        'x_total{replica="r1",kind="a b"} 2',
        'x_total{replica="r1"} 1.5',
        'x_total{replica="r2",kind="a b"} 2',
        'x_total{replica="r2"} 1.5',
    ]
    assert merge("replica", {}) == ""


# ------------------------------------------------------------------------------------- Ray Data


def test_generate_keeps_the_order_and_puts_errors_into_a_column() -> None:
    prompts = ["one", "x" * 5000, "two", "one"]
    generate = verbatim.scale.Generate(
        "m", params={"max_tokens": 4, "seed": 7}, test_engine="pipeline", threads=1
    )
    try:
        out = generate({"id": [1, 2, 3, 4], "prompt": prompts})
        chat = generate({"prompt": [[{"role": "user", "content": "hi"}]]})
        with pytest.raises(ParameterError, match="no column 'prompt'"):
            generate({"text": ["a"]})
    finally:
        generate.close()
    assert out["id"] == [1, 2, 3, 4]
    assert out["text"][0] == out["text"][3]
    assert out["text"][1] is None
    assert "4096" in out["error"][1]
    assert [bool(error) for error in out["error"]] == [False, True, False, False]
    assert chat["error"] == [None]
    assert json.dumps(out)  # plain values


@pytest.mark.parametrize(
    "params", [{"n": 2}, {"tools": [{"type": "function"}]}, {"logprobs": 3}, {"prompt": "x"}]
)
def test_generate_refuses_a_parameter_that_no_column_would_show(params: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(params))):
        verbatim.scale.Generate("m", params=params, test_engine="pipeline")


def test_answers_may_hold_every_separator_of_lines(tmp_path: Path) -> None:
    """JSON leaves U+0085, U+2028 and U+2029 as they are, and str.splitlines() splits there."""
    journal = tmp_path / "out.parquet.jsonl"
    body = {"choices": [{"text": "a\u2028b\u2029c\u0085d\r\n\u000b\u001c"}]}
    line = {"custom_id": "a", "response": {"status_code": 200, "body": body}}
    journal.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert parquet.journal_answers(journal) == {"a": line["response"]}


def parquet_rows(monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[dict[str, Any]]:
    """The lines of a file with one row; pyarrow, which is not needed for its values, is fake."""
    row = {"custom_id": "a", "url": "/v1/completions", "body": "{}", **more}
    batch = SimpleNamespace(to_pylist=lambda: [row])
    file = SimpleNamespace(iter_batches=lambda: [batch])
    arrow = SimpleNamespace(
        parquet=SimpleNamespace(ParquetFile=lambda _: file), ArrowInvalid=KeyError
    )
    monkeypatch.setattr(parquet, "_pyarrow", lambda: arrow)
    return [json.loads(line) for line in parquet.read_rows(Path("x.parquet"))]


def test_a_parquet_row_gets_the_checks_of_a_json_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = json.dumps({"prompt": "\ud800"})  # valid JSON, and no UTF-8
    assert parquet_rows(monkeypatch, body=lone)[0]["body"] == {"prompt": "\ud800"}
    [row] = parquet_rows(monkeypatch, made=datetime(2026, 1, 2, tzinfo=UTC))
    assert row["made"].startswith("2026-01-02")  # read_requests() names the column
    for body in ('{"seed": 1, "seed": 2}', "[" * 100_000, "{"):
        with pytest.raises(ParameterError, match="the body of 'a'"):
            parquet_rows(monkeypatch, body=body)
