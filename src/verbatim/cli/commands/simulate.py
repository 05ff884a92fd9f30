"""`verbatim simulate`: throughput and latencies of a service of many replicas, without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import Command, declared, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import BASE_MODEL, JSON, Values, engine_options, model_options
from verbatim.cli.lib.tables import console, section
from verbatim.cli.lib.terminal import note, write_json

if TYPE_CHECKING:
    from verbatim.scale.simulate.costs import ReplicaCosts
    from verbatim.scale.simulate.fleet_report import FleetReport, Target
    from verbatim.scale.simulate.traffic import Arrival

    Arrivals = Callable[[], Iterable[Arrival]]  # starts the same arrivals anew

HEADER = (
    *("replicas", "tokens/s", "requests/s", "TTFT ms, p50", "p99", "ms/token, p50", "p99", "busy"),
    "prefix hits",
)


def simulated(help: str, *names: str, **rule: Any) -> Any:
    return flag(help, *names, section="What to simulate", common=True, **rule)


@click.command(cls=Command)
@declared(
    model_options,
    engine_options(("speculate", "max_waiting", "suffix_tenants", "defaults"), unused=BASE_MODEL),
)
def command(
    rate: float | None = simulated("requests per second, at random times [1]"),
    requests: int | None = simulated("requests in all [1000]", least=1, most=10_000_000),
    prompt: str | None = simulated("tokens of a prompt [100-1000]", metavar="N[-N]"),
    output: str | None = simulated("tokens of an output [100-400]", metavar="N[-N]"),
    prefix: str | None = simulated(
        "tokens of a shared prefix, of M different ones [0]", metavar="N[xM]"
    ),
    keys: int | None = simulated("API keys that share the service [1]", least=1, most=100_000),
    trace: str | None = simulated(
        "requests of a trace in Mooncake's JSON lines instead", metavar="FILE"
    ),
    speed: float | None = simulated("times as fast as the trace [1]"),
    replicas: str | None = simulated("fleets to simulate [1]", metavar="N[,N]"),
    ttft_ms: float | None = simulated("find the smallest fleet with this time to first token"),
    tpot_ms: float | None = simulated("find the smallest fleet with this time per token"),
    percentile: float | None = simulated("share of the requests that must meet it [99]"),
    costs: str | None = simulated("costs of a replica, as --save-costs wrote them", metavar="FILE"),
    save_costs: str | None = simulated("write the measured costs of a replica", metavar="FILE"),
    device: str | None = simulated(
        "lower bounds of a data sheet, as in `verbatim plan`", metavar="NAME"
    ),
    tp: int | None = simulated("devices per replica, with --device [1]", least=1, most=64),
    seed: int | None = simulated("seed of the arrivals [0]"),
    as_json: bool = JSON,
    **flags: Any,
) -> int:
    """Simulate a service: how many replicas does this traffic need at this latency?

    The scheduler and the router are those of the service, with a virtual clock. The seconds of a
    step are measured on this machine with the model, or come from --costs, or from a data sheet.
    """
    mixed: Values = {"rate": rate, "requests": requests, "prompt": prompt, "output": output}
    mixed |= {"prefix": prefix, "keys": keys, "seed": seed}
    if trace:
        arrivals = _traced(trace, speed, mixed)
    elif speed is not None:
        raise ParameterError("speed", "needs --trace; --rate is the speed of random arrivals")
    else:
        arrivals = _mixed(**mixed)
    target = _target(ttft_ms, tpot_ms, percentile)
    fleets = _fleets(replicas, target)
    cost = _costs(costs, device, tp, flags)
    if save_costs:
        cost.save(Path(save_costs))
    reports = _run(cost, fleets, arrivals, target, flags["e_prefix_cache"] is not False)
    if as_json:
        write_json({"costs": asdict(cost), "fleets": [asdict(report) for report in reports]})
    else:
        _print(cost, reports, target)
    return 0


def _traced(path: str, speed: float | None, mixed: Values) -> Arrivals:
    from verbatim.scale.simulate.traffic import read_trace

    if odd := [name for name, value in mixed.items() if value is not None]:
        raise ParameterError(odd[0], "a trace has its own; leave it out or leave out --trace")
    trace = read_trace(Path(path), _positive("speed", 1.0 if speed is None else speed))
    return lambda: trace


def _mixed(
    *,
    rate: float | None,
    requests: int | None,
    prompt: str | None,
    output: str | None,
    prefix: str | None,
    keys: int | None,
    seed: int | None,
) -> Arrivals:
    from verbatim.scale.simulate.traffic import Mix

    shared, _, prefixes = (prefix or "0").partition("x")
    length, lengths = _whole("prefix", shared, least=0), _range("prompt", prompt or "100-1000")
    if length >= lengths[0]:
        raise ParameterError("prefix", f"{length} is not below the shortest prompt, {lengths[0]}")
    mix = Mix(
        _positive("rate", 1.0 if rate is None else rate),
        lengths,
        _range("output", output or "100-400"),
        length,
        _whole("prefix", prefixes or "1"),
        keys or 1,
    )
    return lambda: mix.arrivals(requests or 1000, seed or 0)


def _whole(name: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ParameterError(name, f"{text!r:.40} is not a whole number from {least} on")
    return int(text)


def _range(name: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    first = _whole(name, low)
    last = _whole(name, high or low)
    if last < first:
        raise ParameterError(name, f"{text} ends below its start")
    return first, last


def _positive(name: str, value: float) -> float:
    if not 0 < value < 1e9:
        raise ParameterError(name, f"{value:g} is not above 0 and below 1e9")
    return value


def _target(first: float | None, between: float | None, share: float | None) -> Target | None:
    from verbatim.scale.simulate.fleet_report import Target

    if first is None and between is None:
        if share is not None:
            raise ParameterError("percentile", "needs --ttft-ms or --tpot-ms")
        return None
    for name, value in (("ttft_ms", first), ("tpot_ms", between)):
        if value is not None:
            _positive(name, value)
    if share is not None and not 0 < share <= 100:
        raise ParameterError("percentile", f"{share:g} is not in 0 to 100")
    return Target(first, between, 99.0 if share is None else share)


def _fleets(replicas: str | None, target: Target | None) -> list[int]:
    if target is not None:
        if replicas:
            raise ParameterError("replicas", "--ttft-ms or --tpot-ms finds the number")
        return []
    return [_whole("replicas", part) for part in (replicas or "1").split(",")]


# Engine settings that a simulation reads with --costs, and with --device.
WITH_COSTS = ("prefix_cache",)
WITH_DEVICE = (*WITH_COSTS, "quant", "kv_type", "max_running", "step_tokens")


def _refuse_unused(flags: Values, read: tuple[str, ...], source: str) -> None:
    """Settings of an engine that is not opened would be ignored."""
    for key, value in flags.items():
        name = key.removeprefix("e_")
        if key != name and value is not None and name not in read:
            raise ParameterError(name, f"has no effect with {source}, which opens no engine")


def _costs(file: str | None, device: str | None, tp: int | None, flags: Values) -> ReplicaCosts:
    """The costs of a replica, from the one source that was named."""
    from verbatim.scale.simulate.costs import ReplicaCosts, measure_costs

    if file and device:
        raise ParameterError("device", "--costs has the costs of a device; leave one out")
    if tp is not None and not device:
        raise ParameterError("tp", "needs --device; costs are those of a whole replica")
    if file:
        _refuse_unused(flags, WITH_COSTS, "--costs")
        return ReplicaCosts.load(Path(file))
    if device:
        _refuse_unused(flags, WITH_DEVICE, "--device")
        return _data_sheet(device, tp or 1, flags)
    from verbatim.bench.measure import Ours

    with open_llm({**flags, "e_prefix_cache": False, "e_speculate": "off"}, generates=True) as llm:
        note("measuring the steps of one replica; about a minute, and the machine should be quiet")
        return measure_costs(llm, Ours(llm))


def _data_sheet(device: str, tp: int, flags: Values) -> ReplicaCosts:
    from verbatim.base.config import GPU_STEP_TOKENS
    from verbatim.diagnose.devices import parse_device
    from verbatim.diagnose.footprint import read_footprint
    from verbatim.hub.catalog import resolve
    from verbatim.scale.simulate.costs import roofline_costs

    footprint = read_footprint(
        flags["model"],
        quant=flags["e_quant"],
        kv_type=flags["e_kv_type"] or "f16",
        resolve=lambda name: resolve(name, offline=True),
    )
    running, tokens = flags["e_max_running"] or 256, flags["e_step_tokens"] or GPU_STEP_TOKENS
    return roofline_costs(footprint, parse_device(device), tp, running, tokens)


def _run(
    costs: ReplicaCosts,
    fleets: Sequence[int],
    arrivals: Arrivals,
    target: Target | None,
    prefix_cache: bool,
) -> list[FleetReport]:
    from verbatim.scale.simulate.fleet_report import simulate, smallest_fleet

    if target is not None:
        tried: list[FleetReport] = []
        found = smallest_fleet(
            costs, arrivals, target, prefix_cache=prefix_cache, note=tried.append
        )
        return sorted((r for r in tried if r.replicas <= found.replicas), key=lambda r: r.replicas)
    return [simulate(costs, n, arrivals(), prefix_cache=prefix_cache)[0] for n in fleets]


def _print(costs: ReplicaCosts, reports: Sequence[FleetReport], target: Target | None) -> None:
    out = console()
    section(out, costs.name, [_row(r) for r in reports], right=range(len(HEADER)), header=HEADER)
    refused = reports[-1].refused
    lines = [f"{refused:,} requests are larger than the KV cache of a replica"] if refused else []
    if target is not None:
        lines.append(f"{reports[-1].replicas:,} replicas meet it")
    lines.append(f"simulated in {sum(r.wall for r in reports):.1f} s")
    out.print()
    for line in lines:
        out.print(line)


def _row(r: FleetReport) -> tuple[str, ...]:
    return (
        f"{r.replicas:,}",
        f"{r.output_rate:,.0f}",
        f"{r.request_rate:,.2f}",
        *(f"{ms:,.0f}" for ms in r.first_ms),
        *(f"{ms:,.1f}" for ms in r.between_ms),
        f"{r.busy:.0%}",
        f"{r.prefix_hits:.0%}",
    )
