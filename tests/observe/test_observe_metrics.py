"""Metrics: their values and the Prometheus text format."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from verbatim.base.params import SamplingParams
from verbatim.base.records import Choice, Completion, Finish, Timings, Usage
from verbatim.engine.calls.llm import LLM
from verbatim.observe.engine_metrics import EngineMetrics, Registry
from verbatim.testing.fakes import fake_parts

LINE = re.compile(
    r'^[a-z_][a-z0-9_]*(\{[a-z_]+="(\\.|[^"\\])*"(,[a-z_]+="(\\.|[^"\\])*")*\})? [-+0-9.eInf]+$'
)


def test_histogram_bounds_are_inclusive_and_cumulative() -> None:
    registry = Registry()
    histogram = registry.histogram("h_seconds", "help", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    lines = registry.render().splitlines()
    assert lines[2:] == [
        'h_seconds_bucket{le="1"} 2',
        'h_seconds_bucket{le="2"} 4',
        'h_seconds_bucket{le="+Inf"} 5',
        "h_seconds_sum 14",
        "h_seconds_count 5",
    ]
    assert registry.values() == {"h_seconds_count": 5, "h_seconds_sum": 14.0}


def test_labels_are_escaped_and_one_family_has_one_head() -> None:
    registry = Registry()
    registry.number("c_total", "help", label='a"b\\c\nd').add(2)
    registry.number("c_total", "help", label="x").add(1.5)
    assert registry.number("c_total", "help", label="x").value == 1.5
    text = registry.render()
    assert text.count("# TYPE c_total counter") == 1
    assert 'c_total{label="a\\"b\\\\c\\nd"} 2\n' in text
    registry.histogram("h", "help")
    with pytest.raises(AssertionError):
        registry.number("h", "help")


def test_every_line_of_the_exposition_is_well_formed() -> None:
    metrics = EngineMetrics()
    metrics.first_token.observe(0.01)
    metrics.sample(running=3, waiting=0)
    for line in metrics.registry.render().splitlines():
        assert line.startswith("# ") or LINE.match(line), line
    assert metrics.registry.values()["running"] == 3


def test_draft_counts_are_summed_over_all_requests() -> None:
    metrics = EngineMetrics()
    for output, drafted, accepted in ((10, 0, 0), (20, 12, 12), (30, 9, 3)):
        choice = Choice(0, "", (1,) * output, Finish("stop", "eos"))
        usage = Usage(4, output, 0, drafted, accepted)
        metrics.completed(
            Completion("a", (1,) * 4, (choice,), usage, Timings(0, 0.1, 1.0, 0, 0.25), 0, "vb")
        )
    values = metrics.registry.values()
    assert values["drafted_tokens_total"] == 21
    assert values["accepted_tokens_total"] == 15
    assert values["mean_accepted_length"] == 60 / 45
    assert values["speculation_saved_seconds"] == 0.75


def test_the_metric_name_implies_its_kind() -> None:
    registry = Registry()
    registry.number("c_total", "help").add(12345678901)
    registry.number("g", "help").value = 0.25
    registry.histogram("h_seconds", "help", (1.0,))
    lines = registry.render().splitlines()
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE c_total counter",
        "# TYPE g gauge",
        "# TYPE h_seconds histogram",
    ]
    assert {"c_total 12345678901", "g 0.25"} <= set(lines), "counters are exact"


def test_the_reference_parser_reads_the_same_numbers() -> None:
    """prometheus_client's parser as an oracle: kinds, values, and a label with escapes."""
    metrics = EngineMetrics()
    metrics.registry.number("odd_total", "help", label='a"b\\c\nd').add(3)
    metrics.first_token.observe(0.01)
    metrics.sample(running=3, preemptions_total=7)
    families = list(text_string_to_metric_families(metrics.registry.render()))
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert samples[("verbatim_running",)] == 3
    assert samples[("verbatim_preemptions_total",)] == 7
    assert samples[("odd_total", 'a"b\\c\nd')] == 3
    assert samples[("verbatim_first_token_seconds_bucket", "0.005")] == 0
    assert samples[("verbatim_first_token_seconds_bucket", "0.01")] == 1
    kinds = {s.name: f.type for f in families for s in f.samples}
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())


def test_running_requests_and_cache_usage_are_those_of_the_scheduler() -> None:
    """One request of three sequences, and one that is still waiting."""
    with LLM.from_loaded(fake_parts(), max_running=3, prefix_cache=False, speculate="off") as llm:
        core = llm.core
        for n in (3, 1):
            core.add(
                core.request(
                    [1, 2, 3],
                    SamplingParams(n=n, max_tokens=40, temperature=1.0, seed=1, ignore_eos=True),
                )
            )
            for _ in range(3):
                core.step()
        stats = core.stats()
        assert (stats["requests"], stats["requests_running"]) == (2, 1)
        assert (stats["running"], stats["waiting"]) == (3, 1)
        assert stats["kv_cache_usage_ratio"] == stats["blocks_used"] / stats["blocks"] > 0
        while core.busy:
            core.step()
        assert core.stats()["requests_running"] == core.stats()["kv_cache_usage_ratio"] == 0
