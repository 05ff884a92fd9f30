"""`verbatim simulate`: the event loop against queueing theory and against a real engine's steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from click.testing import CliRunner

from verbatim import LLM, SamplingParams
from verbatim.base.errors import ParameterError
from verbatim.base.records import StepPlan
from verbatim.cli.commands.simulate import command
from verbatim.diagnose.devices import parse_device
from verbatim.diagnose.footprint import read_footprint
from verbatim.observe.roofline import cost_card
from verbatim.scale.routes.routing import Candidate, Decider, Route
from verbatim.scale.simulate.costs import ReplicaCosts, roofline_costs
from verbatim.scale.simulate.fleet import Fleet, Served, SimulatedReplica
from verbatim.scale.simulate.fleet_report import Target, simulate, smallest_fleet
from verbatim.scale.simulate.traffic import TRACE_BLOCK, Arrival, Mix, read_trace
from verbatim.schedule.invariants import check_scheduler
from verbatim.schedule.scheduler import Scheduler
from verbatim.testing.fakes import fake_parts

COSTS = ReplicaCosts(
    "test", ((1, 0.01), (4, 0.016), (8, 0.02)), 1e-6, 0.001, 0.0, 1, 0, 400, 16, 512, 64, None
)


def test_one_request_takes_the_seconds_of_its_steps() -> None:
    report, [served] = simulate(COSTS, 1, [Arrival(2.0, 100, 3)])
    decode = 2 * 0.01 + 1e-6 * (101 + 102)
    assert served.wait == pytest.approx(0.1)
    assert served.last - served.first == pytest.approx(decode)
    assert served.between == pytest.approx(decode / 2)
    assert report.seconds == pytest.approx(0.1 + decode)
    assert report.busy == pytest.approx(1.0)


def test_rows_between_and_beyond_the_measured_sizes() -> None:
    assert COSTS.rows_seconds(4) == 0.016
    assert COSTS.rows_seconds(2) == pytest.approx(0.012)
    assert COSTS.rows_seconds(12) == pytest.approx(0.024)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_place_is_the_queue_of_pollaczek_and_khinchine(load: float) -> None:
    """With one place, one output token and equal prompts a replica is an M/D/1 queue: the mean wait
    before the service is load / (2 (1 - load)) services. The tolerance is four standard errors of
    2,000 independent groups of requests, which the seed makes one fixed outcome."""
    service = 0.1
    costs = replace(COSTS, max_running=1, rows=((1, 0.0),))
    mix = Mix(load / service, (100, 100), (1, 1))
    served = Fleet(costs, 1, prefix_cache=False).run(mix.arrivals(6000, seed=1))
    waited = mean(s.wait for s in served) - service
    assert waited == pytest.approx(service * load / (2 * (1 - load)), rel=0.12)


def test_the_steps_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests in a real engine over a fake model: the same tokens in every step."""
    prompts, tokens = [700, 40, 1200, 16], 12
    plans: list[list[int]] = []
    plan = Scheduler.plan

    def recorded(scheduler: Scheduler) -> StepPlan | None:
        made = plan(scheduler)
        if made is not None:
            plans.append([len(step.tokens) for step in made.sequences])
        return made

    monkeypatch.setattr(Scheduler, "plan", recorded)
    settings = {"kv_blocks": 400, "step_tokens": 512, "max_running": 64, "speculate": "off"}
    with LLM.from_loaded(fake_parts(), **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.generate([[1 + i] * n for i, n in enumerate(prompts)], params)
        card = cost_card(llm.core.backend.spec, llm.core.backend.info)
    engine, plans = plans, []
    costs = replace(COSTS, prompt_ops=card.prompt_ops_token, position_ops=card.ops_position)
    replica = SimulatedReplica(costs, prefix_cache=True)
    for number, n in enumerate(prompts):  # all are there before the first step
        arrival = Arrival(0.0, n, tokens)
        replica.add(number, Served(arrival, 0), arrival.tokens(number))
    while replica.start() is not None:
        replica.finish(1.0)
    assert plans == engine


def test_every_request_ends_and_leaves_nothing() -> None:
    mix = Mix(20.0, (10, 900), (1, 60), prefix=8, prefixes=3, tenants=5)
    fleet = Fleet(replace(COSTS, blocks=120), 3)
    served = fleet.run(mix.arrivals(300, seed=2))
    assert len(served) == 300
    assert all(s.arrival.at < s.first <= s.last for s in served)
    assert sum(r.scheduler.preemptions for r in fleet.replicas) > 0, "the cache was never short"
    for replica in fleet.replicas:
        check_scheduler(replica.scheduler)
        assert not replica.open
        assert not replica.scheduler.sequences


def test_the_same_traffic_gives_the_same_numbers() -> None:
    mix = Mix(5.0, (50, 300), (5, 50))
    first, second = (simulate(COSTS, 2, mix.arrivals(60))[0] for _ in range(2))
    assert replace(first, wall=0.0) == replace(second, wall=0.0)


def test_requests_go_where_their_prefix_is() -> None:
    arrivals = [Arrival(2.0 * i, 600, 2, ((i % 4, 512),)) for i in range(40)]
    report, served = simulate(COSTS, 4, arrivals)
    places = {s.arrival.segments[0][0]: set[int]() for s in served}
    for s in served[4:]:
        places[s.arrival.segments[0][0]].add(s.replica)
    assert all(len(replicas) == 1 for replicas in places.values())
    assert report.prefix_hits > 0.7
    assert simulate(COSTS, 4, arrivals, prefix_cache=False)[0].prefix_hits == 0


def test_few_candidates_give_the_decision_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, compared = Decider.rank, 0
    fleet = Fleet(COSTS, 7)

    def ranked(decider: Decider, route: Route, some: Sequence[Candidate]) -> list[str]:
        nonlocal compared
        names = [f"{i:06}" for i in range(7)]
        every = [Candidate(n, len(r.open)) for n, r in zip(names, fleet.replicas, strict=True)]
        assert rank(decider, route, some)[0] == rank(decider, route, every)[0]
        compared += len(some) < 7
        return rank(decider, route, some)

    monkeypatch.setattr(Decider, "rank", ranked)
    fleet.run(Mix(40.0, (100, 600), (5, 60), prefix=64, prefixes=9).arrivals(200))
    assert compared > 50
    assert fleet.decider.found < fleet.decider.possible, "load never outweighs a prefix"


def test_a_request_larger_than_the_cache_is_refused() -> None:
    report, _ = simulate(COSTS, 1, [Arrival(0.0, 400 * 16, 100), Arrival(0.0, 20, 2)])
    assert (report.requests, report.refused) == (2, 1)


def test_the_smallest_fleet_meets_the_target_and_one_less_does_not() -> None:
    mix, target = Mix(12.0, (200, 400), (20, 40)), Target(first=1000.0, percentile=95.0)
    found = smallest_fleet(COSTS, lambda: mix.arrivals(150), target)
    assert found.replicas > 1
    for replicas, met in ((found.replicas, True), (found.replicas - 1, False)):
        report, served = simulate(COSTS, replicas, mix.arrivals(150))
        assert report.meets(target, served) is met
    with pytest.raises(ParameterError, match="one request alone is too slow"):
        smallest_fleet(COSTS, lambda: mix.arrivals(3), Target(first=0.001))


def test_a_trace_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
    early = {**line, "timestamp": 1000, "hash_ids": [7, 9], "tenant": "b"}
    path.write_text("\n".join(map(json.dumps, (line, early))))
    first, second = read_trace(path, speed=2.0)
    assert (first.at, second.at, first.tenant) == (0.5, 1.5, "b")
    one, other = first.tokens(0), second.tokens(1)
    assert len(one) == len(other) == 600
    shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    assert shared == TRACE_BLOCK
    for wrong in ({**line, "model": "x"}, {"timestamp": 1}, {**line, "output_length": 0}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ParameterError, match="line 1"):
            read_trace(path)


def test_costs_survive_a_file_and_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    COSTS.save(path)
    assert ReplicaCosts.load(path) == COSTS
    path.write_text(json.dumps({**json.loads(path.read_text()), "speed": 1}))
    with pytest.raises(ParameterError, match="keys must be"):
        ReplicaCosts.load(path)


def test_costs_of_a_data_sheet_are_its_bounds(tmp_path: Path) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "llama", **shape, **heads, "torch_dtype": "bfloat16"})
    )
    footprint = read_footprint(str(path), quant=None, kv_type="f16", resolve=lambda _: path)
    one, two = (roofline_costs(footprint, parse_device("h200"), n, 64, 8192) for n in (1, 2))
    assert one.rows_seconds(1) == pytest.approx(15.0e9 / 4.8e12, rel=0.02)
    assert two.rows_seconds(1) == pytest.approx(one.rows_seconds(1) / 2)
    assert two.blocks > 2 * one.blocks
    assert one.prompt == pytest.approx(2 * 7.0e9 / 989e12, rel=0.1)
    with pytest.raises(ParameterError, match="does not fit"):
        roofline_costs(footprint, parse_device("1000,100,8"), 1, 64, 8192)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "rate: 0 is not above 0"),
        (("--prompt", "20-10"), "prompt: 20-10 ends below its start"),
        (("--prefix", "200", "--prompt", "100"), "prefix: 200 is not below the shortest"),
        (("--trace", "x", "--rate", "2"), "rate: a trace has its own"),
        (("--speed", "2"), "speed: needs --trace"),
        (("--percentile", "50"), "percentile: needs --ttft-ms or --tpot-ms"),
        (("--replicas", "2", "--ttft-ms", "9"), "finds the number"),
        (("--replicas", "0"), "replicas: '0' is not a whole number from 1 on"),
        (("--tp", "2"), "tp: needs --device"),
        (("--threads", "4"), "threads: has no effect with --costs"),
        (("--max-running", "8"), "max_running: has no effect with --costs"),
        (("--device", "h100"), "device: --costs has the costs of a device"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    COSTS.save(tmp_path / "costs.json")
    done = CliRunner().invoke(command, ["--costs", str(tmp_path / "costs.json"), *arguments])
    assert isinstance(done.exception, ParameterError)
    assert message in str(done.exception)


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "costs.json")
    traffic = ["--rate", "4", "--requests", "20", "--output", "4-8"]
    arguments = ["--costs", str(tmp_path / "costs.json"), *traffic]
    table = CliRunner().invoke(command, [*arguments, "--ttft-ms", "2000"])
    assert table.exit_code == 0, table.output
    assert "meet it" in table.output
    done = CliRunner().invoke(command, [*arguments, "--replicas", "1,3", "--json"])
    fleets = json.loads(done.stdout)["fleets"]
    assert [fleet["replicas"] for fleet in fleets] == [1, 3]
    assert all(fleet["requests"] == 20 for fleet in fleets)
