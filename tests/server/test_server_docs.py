"""The request fields of the installed SDK have their rows; the index in SECURITY.md and the files
in deploy/ name what exists."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from eventually import HANG_SECONDS
from verbatim.base.records import Usage
from verbatim.server.api.routes import BODIES, ROUTES
from verbatim.server.process import ledger as ledger_of
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings

ROOT = Path(__file__).parents[2]

SDK_FIELDS = [
    (
        "/v1/chat/completions",
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsBase",
    ),
    ("/v1/completions", "openai.types.completion_create_params", "CompletionCreateParamsBase"),
    ("/v1/responses", "openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    ("/v1/embeddings", "openai.types.embedding_create_params", "EmbeddingCreateParams"),
    ("/v1/batches", "openai.types.batch_create_params", "BatchCreateParams"),
    ("/v1/files", "openai.types.file_create_params", "FileCreateParams"),
]


@pytest.mark.parametrize(("route", "module", "name"), SDK_FIELDS)
def test_every_field_of_the_installed_sdk_has_its_row(route: str, module: str, name: str) -> None:
    """A new field of OpenAI is supported, stored as a label or rejected by name: never ignored."""
    from importlib import import_module

    kind = getattr(import_module(module), name)
    known = set(BODIES[route].fields)
    asked = (
        set(get_type_hints(kind, vars(import_module(module))))
        if not hasattr(kind, "__annotations__")
        else set(kind.__annotations__)
    )
    assert asked - known == set()


def all_tests() -> set[str]:
    names: set[str] = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        path = file.relative_to(ROOT / "tests").as_posix()
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE):
            names.add(f"{path}::{name}")
    return names


def test_the_index_of_known_failures_names_existing_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    index = text[text.index("## What has gone wrong elsewhere") :]
    named = re.findall(r"`([\w/]+\.py::\w+)`", index)
    assert len(named) > 40
    assert set(named) - all_tests() == set()
    rows = [
        line
        for line in index.splitlines()
        if line.startswith("| ") and not line.startswith(("| failure", "|---"))
    ]
    assert all(re.search(r"`[\w/]+\.py::\w+`", row) for row in rows), "every failure has its test"


def metric_names() -> set[str]:
    from verbatim.observe.engine_metrics import EngineMetrics
    from verbatim.server.http_metrics import Metrics

    async def everything() -> str:
        metrics, ledger = Metrics(), ledger_of.Ledger()
        metrics.answered("/health", 200)
        ledger.open("a")
        ledger.close("a", "stop", Usage(*(1,) * len(ledger_of.USAGE)))
        engine = Supervisor(Settings())
        engine.ledger, engine.metrics = ledger, EngineMetrics().registry.render()
        return metrics.text({"m": engine}, 0, 0, {"m": True})

    return set(re.findall(r"# TYPE (verbatim_\w+)", asyncio.run(everything())))


def test_the_dashboard_queries_existing_metrics() -> None:
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    known = metric_names()
    asked = {
        n
        for panel in board["panels"]
        for t in panel.get("targets", [])
        for n in re.findall(r"verbatim_\w+", t["expr"])
    }
    assert asked
    assert {re.sub(r"_(bucket|sum|count)$", "", n) for n in asked} - known == set()
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_deployment_files_use_existing_flags() -> None:
    from click.testing import CliRunner

    from verbatim.cli.commands.serve import command

    known = {o for p in command.params for o in p.opts}
    for name in ("Dockerfile", "Dockerfile.cuda", "verbatim.service"):
        text = (ROOT / "deploy" / name).read_text().replace("\\\n", "")  # continued lines
        called = " ".join(
            x for x in text.splitlines() if x.startswith(("ENTRYPOINT", "ExecStart="))
        )
        used = set(re.findall(r"--[a-z-]+", called))
        assert used
        assert used - known == set(), name
    assert CliRunner().invoke(command, ["--help"]).exit_code == 0


def test_the_manifest_of_a_group_uses_existing_flags() -> None:
    from verbatim.cli.commands import rank, serve

    text = (ROOT / "deploy" / "ranks.yaml").read_text()
    for key, command in (("args", serve.command), ("command", rank.command)):
        [line] = re.findall(rf"^ +{key}: \[(.+)\]$", text, re.MULTILINE)
        used = set(re.findall(r"--[a-z-]+", line))
        assert "--rank-address" in used
        assert used <= {o for param in command.params for o in param.opts}
    ports = set(re.findall(r":(29\d+)\"|port: (29\d+)", text))
    assert {"".join(port) for port in ports} == {"29500"}


def test_prometheus_scrapes_the_address_that_needs_no_key() -> None:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    [port] = re.findall(r'prometheus.io/port: "(\d+)"', text)
    assert f'--metrics-address, "0.0.0.0:{port}"' in text
    assert f"containerPort: {port}, name: metrics" in text


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_container_image_copies_existing_files(name: str) -> None:
    """Every path that the image copies or admits exists, and everything that pyproject.toml needs
    is admitted."""
    text = (ROOT / "deploy" / name).read_text()
    copied = [
        words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    ]
    assert copied
    assert all((ROOT / path).exists() for paths in copied for path in paths)
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"--from=(\w+)", text)) <= stages
    kept = {
        line[1:]
        for line in (ROOT / "deploy" / f"{name}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert all((ROOT / path).exists() for path in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {
        project["readme"],
        *project["license-files"],
        "pyproject.toml",
        "CMakeLists.txt",
        "src",
    } <= kept
    extras = re.search(r"\.whl\)\[([\w,]+)\]", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    user, volume = (
        re.search(r"^USER (\w+)$", text, re.MULTILINE),
        re.search(r"^VOLUME (\S+)$", text, re.MULTILINE),
    )
    assert user is not None
    assert volume is not None
    # otherwise root would own the volume
    assert f"install -d -o {user[1]} -g {user[1]} {volume[1]}" in text


def test_the_systemd_unit_is_valid() -> None:
    unit = ROOT / "deploy" / "verbatim.service"
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(unit.read_text())  # raises on duplicate sections or keys
    assert set(parsed.sections()) == {"Unit", "Service", "Install"}
    drain = re.search(r"--drain-seconds (\d+)", parsed["Service"]["ExecStart"])
    assert drain is not None
    # otherwise systemd would kill it during its drain
    assert int(parsed["Service"]["TimeoutStopSec"]) > int(drain[1]) + 10
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_serving_md_names_existing_routes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    found: set[Any] = set(re.findall(r"`(?:GET |POST )?(/(?:v1|api)/[\w/{}]+)`", text))
    assert found <= {route.shown_path for route in ROUTES}
