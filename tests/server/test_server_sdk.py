"""The tests of OpenAI's SDK (from its sdist, downloaded by pip into the cache) against a live
server.

sdk_exclusions.txt lists the excluded tests with reasons; every other test of the five resources
must pass.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from client_setup import cache_dir
from sdk_plugin import excludes, exclusions

pytestmark = [pytest.mark.server, pytest.mark.slow]
RESOURCES = [
    "chat",
    "test_completions.py",
    "test_models.py",
    "test_embeddings.py",
    "test_responses.py",
    "responses",
]
HERE = Path(__file__).parent


def sdk_source() -> Path:
    """The unpacked sdist of the installed version. Downloaded once; not part of the repository."""
    version = metadata.version("openai")  # the import of the package takes two seconds
    home = cache_dir() / f"openai-{version}"
    if not (home / "tests").is_dir():
        words = [
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "openai",
            f"openai=={version}",
            "-d",
            str(home.parent),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=250
        )
        archive = home.parent / f"openai-{version}.tar.gz"
        if not archive.exists():
            pytest.skip(f"the sdist of openai {version} could not be fetched: {done.stderr[-300:]}")
        with tarfile.open(archive) as tar:
            tar.extractall(home.parent, filter="data")
    return home


def run_tests(url: str, report: Path, **env: str) -> tuple[str, dict[str, list[str]]]:
    home = sdk_source()
    full = {
        **os.environ,
        "TEST_API_BASE_URL": url + "/v1",
        "PYTHONPATH": str(HERE),
        "SDK_REPORT": str(report),
    }
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "sdk_plugin",
        "-c",
        os.devnull,
        f"--rootdir={home}",
        "-rp",
        "--tb=line",
        "--no-header",
        "--assert=plain",
    ]
    words += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=session"]
    words += [f"tests/api_resources/{r}" for r in RESOURCES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=home,
        env={**full, **env},
        capture_output=True,
        text=True,
        timeout=290,
    )
    return done.stdout + done.stderr, json.loads(report.read_text())


@pytest.mark.soak
@pytest.mark.parametrize("clients", ["", "1"])
def test_every_sdk_test_passes_or_is_excluded_with_its_reason(
    clients: str, fake: Any, tmp_path: Path
) -> None:
    """With one of the SDK's clients, and (soak) with all of them."""
    said, report = run_tests(fake.url, tmp_path / "report.json", SDK_ALL_CLIENTS=clients)
    counts = re.search(r"(\d+) passed", said)
    assert counts is not None, said[-3000:]
    assert " failed" not in said, said[-6000:]
    assert int(counts[1]) == len(report["run"]) > (320 if clients else 120)
    for needles, reason in exclusions():  # every line must exclude a test
        assert any(excludes(needles, t) for t in report["out"]), (needles, reason)
    print(f"SDK tests: {len(report['run'])} passed, {len(report['out'])} excluded")


@pytest.mark.soak
def test_no_excluded_sdk_test_would_pass(fake: Any, tmp_path: Path) -> None:
    """Every exclusion is necessary."""
    said, _ = run_tests(fake.url, tmp_path / "report.json", SDK_ONLY_EXCLUDED="1")
    assert [line for line in said.splitlines() if line.startswith("PASSED")] == []
