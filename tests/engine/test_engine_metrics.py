"""Metrics: the numbers, and the text that Prometheus reads."""

from __future__ import annotations

import re

import pytest

from verbatim.base.records import Choice, Completion, Finish, Timings, Usage
from verbatim.observe.metrics import EngineMetrics, Registry

LINE = re.compile(r'^[a-z_][a-z0-9_]*(\{[a-z_]+="(\\.|[^"\\])*"(,[a-z_]+="(\\.|[^"\\])*")*\})? [-+0-9.eInf]+$')


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
    registry.counter("c_total", "help", who='a"b\\c\nd').add(2)
    registry.counter("c_total", "help", who="x").add(1.5)
    assert registry.counter("c_total", "help", who="x").value == 1.5
    text = registry.render()
    assert text.count("# TYPE c_total counter") == 1
    assert 'c_total{who="a\\"b\\\\c\\nd"} 2\n' in text
    with pytest.raises(AssertionError):
        registry.histogram("c_total", "help", who="x")


def test_every_line_of_the_exposition_is_well_formed() -> None:
    metrics = EngineMetrics()
    metrics.first_token.observe(0.01)
    metrics.gauges(running=3, waiting=0)
    for line in metrics.registry.render().splitlines():
        assert line.startswith("# ") or LINE.match(line), line
    assert metrics.registry.values()["running"] == 3


def test_drafts_are_told_over_all_requests() -> None:
    metrics = EngineMetrics()
    for output, drafted, accepted in ((10, 0, 0), (20, 12, 12), (30, 9, 3)):
        choice = Choice(0, "", (1,) * output, Finish("stop", "eos"))
        usage = Usage(4, output, 0, drafted, accepted)
        metrics.completed(Completion("a", (1,) * 4, (choice,), usage, Timings(0, 0.1, 1.0, 0, 0.25), 0, "vb"))
    values = metrics.registry.values()
    assert values["drafted_tokens_total"] == 21
    assert values["accepted_tokens_total"] == 15
    assert values["mean_accepted_length"] == 60 / 45
    assert values["speculation_saved_seconds"] == 0.75
