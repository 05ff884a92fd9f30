"""The metrics of several engines (replicas, or models of one server) as one Prometheus text, and
those of the engine processes that one model had in turn.

merge(): the text of each engine comes in; one text goes out in which each metric appears once, with
the samples of all engines below it: Prometheus refuses a text with two TYPE lines for one metric.
add_counters(): the counters of a model never decrease when a new engine process counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from verbatim.observe.engine_metrics import escape, show_value


def merge(label: str, texts: Mapping[str, str]) -> str:
    """`texts`: Prometheus text by the value of `label`.

    >>> print(merge("replica", {"a": "# HELP x X\\n# TYPE x gauge\\nx 1\\n"}), end="")
    # HELP x X
    # TYPE x gauge
    x{replica="a"} 1
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for value, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                if line not in heads.setdefault(name, []):
                    heads[name].append(line)
            elif line:
                samples.setdefault(name, []).append(_labelled(line, f'{label}="{escape(value)}"'))
    lines = [line for name in samples for line in (*heads.get(name, ()), *samples[name])]
    return "\n".join(lines) + "\n" if lines else ""


def add_counters(earlier: str, now: str) -> str:
    """The metrics of an engine process, with the counters and histograms of the processes before
    it added. Gauges are those of `now`.

    >>> print(add_counters("# TYPE x counter\\nx 1\\n", "# TYPE x counter\\nx 2\\n"), end="")
    # TYPE x counter
    x 3
    """
    if not earlier:
        return now
    metrics = _parse(now)
    for name, (heads, samples) in _parse(earlier).items():
        if heads[-1].endswith((" counter", " histogram")):
            sums = metrics.setdefault(name, (heads, {}))[1]
            for key, value in samples.items():
                sums[key] = sums.get(key, 0) + value
    lines = []
    for heads, samples in metrics.values():
        lines += [*heads, *(f"{key} {show_value(value)}" for key, value in samples.items())]
    return "\n".join(lines) + "\n"


def _parse(text: str) -> dict[str, tuple[list[str], dict[str, float]]]:
    """Metric name -> its HELP and TYPE lines, and its samples by name and labels."""
    metrics: dict[str, tuple[list[str], dict[str, float]]] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            heads, samples = metrics.setdefault(line.split(" ", 3)[2], ([], {}))
            heads.append(line)
        else:
            key, _, value = line.rpartition(" ")
            samples[key] = float(value)
    return metrics


def _labelled(line: str, label: str) -> str:
    """A sample with the label in front of its others. A label value may contain spaces, so the
    name ends at the first brace or, without labels, at the first space."""
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
