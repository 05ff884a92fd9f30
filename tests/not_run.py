"""Pytest plugin: a table at the end of a run that lists every test that did not run, and why.

In: skip reports, skipped modules, deselected tests, and what a test records with
`record_property("not run", "NAME: REASON")`. Out: the table on the terminal, with or without
pytest-xdist. Invariant: a test that exists and did not run is in the table.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any

import pytest

RECORDED = "not run"  # property in which a test reports the skips of a nested run


def opt_in() -> dict[str, str]:
    """Markers that `make test` deselects, and the command that runs their tests. A test with
    several is listed under the first."""
    folder = os.environ.get("VERBATIM_TEST_MODELS")
    models = "set" if folder else "not set"
    return {
        "qemu": (
            "markers qemu and soak: need ARM emulation (g++-aarch64-linux-gnu, qemu-user-static); "
            "run `make soak`"
        ),
        "soak": "marker soak: heavy; run `make soak`",
        "ray": "marker ray: needs Ray; run `make test-ray`",
        "models": (
            f"marker models: real files; run `make test-models` (VERBATIM_TEST_MODELS is {models})"
        ),
    }


def reason_of(report: Any) -> str:
    """The reason of a skip report. Its longrepr is (path, line, "Skipped: reason")."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())


class NotRun:
    """Collects (test or module, reason). An xdist worker sends its rows to the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.deselected: dict[str, str] = {}
        self.modules: dict[str, str] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        ways = opt_in()
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            found = [why for name, why in ways.items() if name in marks]
            self.deselected[item.nodeid] = found[0] if found else "left out by -m or -k"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.modules[report.nodeid] = reason_of(report)

    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["not_run"] = [self.deselected, self.modules]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects the whole suite, so their rows are equal and are merged by name."""
        for mine, theirs in zip(
            (self.deselected, self.modules),
            getattr(node, "workeroutput", {}).get("not_run", []),
            strict=False,  # a worker that crashed sends nothing
        ):
            mine.update(theirs)

    def rows(self, stats: dict[str, list[Any]]) -> dict[tuple[str, str], int]:
        """{(file, reason): number of tests}: skips first, then deselected tests."""
        skipped = dict(self.modules)
        for report in stats.get("skipped", []):
            skipped.setdefault(report.nodeid, reason_of(report))
        for reports in stats.values():
            for report in reports:
                for key, value in getattr(report, "user_properties", ()):
                    if key == RECORDED:
                        name, _, why = str(value).partition(": ")
                        skipped[name] = why
        counted = Counter((name.split(":")[0], why) for name, why in sorted(skipped.items()))
        left_out = Counter(("", why) for why in self.deselected.values())
        return {**counted, **left_out}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.option.collectonly:
            return
        rows = self.rows(terminalreporter.stats)
        terminalreporter.section("tests that did not run")
        if not rows:
            terminalreporter.write_line("none: every collected test ran")
            return
        by_reason: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for (file, why), count in rows.items():
            by_reason[why].append((file, count))
        for why, files in by_reason.items():
            terminalreporter.write_line(f"{sum(count for _, count in files):6}  {why}")
            for file, count in files:
                if file:
                    terminalreporter.write_line(f"{count:12}  {file}")
        terminalreporter.write_line(f"{sum(rows.values()):6}  in all")


def pytest_configure(config: pytest.Config) -> None:
    """For `-p not_run`; the suite itself registers the plugin in its conftest.py."""
    if not config.pluginmanager.has_plugin("not-run-table"):
        config.pluginmanager.register(NotRun(config), "not-run-table")
