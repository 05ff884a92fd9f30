"""The metrics of several engines (replicas, or models of one server) as one Prometheus text.

In: the text of each engine. Out: one text in which each metric appears once, with the samples of
all engines below it: Prometheus refuses a text with two TYPE lines for one metric.
"""

from __future__ import annotations

from collections.abc import Mapping

from verbatim.observe.engine_metrics import escape


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


def _labelled(line: str, label: str) -> str:
    """A sample with the label in front of its others. A label value may contain spaces, so the
    name ends at the first brace or, without labels, at the first space."""
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
