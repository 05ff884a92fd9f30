"""Generated documents are up to date: docs/api-fields.md, the tables of docs/serving.md, the
index in SECURITY.md, deploy/.

`VERBATIM_WRITE_DOCS=1 pytest tests/server/test_server_docs.py` regenerates them.
"""

from __future__ import annotations

import asyncio
import configparser
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from eventually import HANG_SECONDS
from verbatim.base.records import Usage
from verbatim.server.api.common.field_table import PROTOCOLS, QUERIES
from verbatim.server.problem import CODES
from verbatim.server.process import ledger as ledger_of
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings, limits_table

ROOT = Path(__file__).parents[2]
WRITE = os.environ.get("VERBATIM_WRITE_DOCS") == "1"

HEAD = """# Every field of every protocol

Generated from the field tables of `src/verbatim/server/api`, which also validate requests.

- **honoured**: has the effect that its protocol defines.
- **label**: stored with the request (log, stored object); has no effect on the tokens.
- **ignored**: cannot change the answer on this server: accepted, and listed in the answer's
  `warnings`. Values in brackets hold anyway and get no warning.
- **refused**: a field of the protocol that is not supported: 400, naming it. Values in brackets
  have no effect and are accepted.

Any other field is unknown: 400, naming it. `null` means "not given". Ranges of Verbatim's own
parameters are in [sampling.md](sampling.md).
"""

USAGE = """
## Usage fields of a response

| member of `usage` | |
|---|---|
| `prompt_tokens`, `completion_tokens`, `total_tokens` | tokens of all prompts and choices |
| `prompt_tokens_details.cached_tokens` | prompt tokens found in the prefix cache |
| `completion_tokens_details.accepted_prediction_tokens` | accepted draft tokens |
| `completion_tokens_details.rejected_prediction_tokens` | rejected draft tokens |
| `completion_tokens_details.mean_accepted_length` | mean tokens per step; 1 without drafts |
| `completion_tokens_details.saved_seconds` | time saved by drafts; negative: lost |

The Responses API calls them `input_tokens`, `output_tokens`, `output_tokens_details`. The usage
objects of `/v1/messages` and `/api/` have no fields for drafts; a response of these routes that
used drafts has `speculation`: `drafted_tokens`, `accepted_tokens`, `mean_accepted_length`,
`saved_seconds`.
"""

QUERY_HEAD = """
## Query parameters

Any other query parameter is unknown: 400, naming it. Only `/health`, `/metrics` and `/openapi.json`
ignore unknown ones.
"""


def fields_page() -> str:
    parts = [HEAD]
    for route, (_, table) in PROTOCOLS.items():
        rows = ["| field | | |", "|---|---|---|"]
        for name, rule in table.items():
            passes = f" [{', '.join(json.dumps(v) for v in rule.only)}]" if rule.only else ""
            needed = " **required**" if rule.required else ""
            text = (rule.help + passes).replace("|", "\\|")
            rows.append(f"| `{name}` | {rule.kind}{needed} | {text} |")
        parts.append(f"\n## POST {route}\n\n" + "\n".join(rows) + "\n")
    parts.append(USAGE)
    parts.append(QUERY_HEAD)
    for route, queries in QUERIES.items():
        rows = [f"| `{name}` | {rule.help} |" for name, rule in queries.items()]
        parts.append(
            f"\n### {route}\n\n" + "\n".join(["| parameter | |", "|---|---|", *rows]) + "\n"
        )
    return "".join(parts)


def between(text: str, name: str) -> tuple[str, str, str]:
    begin, end = (
        f"<!-- {name}: made by tests/server/test_server_docs.py -->\n",
        f"<!-- end of {name} -->",
    )
    head, rest = text.split(begin)
    body, tail = rest.split(end)
    return head + begin, body, end + tail


def check_part(path: Path, name: str, made: str) -> None:
    head, body, tail = between(path.read_text(), name)
    if WRITE and body != made:
        path.write_text(head + made + tail)
        body = made
    assert body == made, f"{name} in {path.name} is out of date; see this file's docstring"


def test_the_field_table_is_documented() -> None:
    path = ROOT / "docs" / "api-fields.md"
    if WRITE:
        path.write_text(fields_page())
    assert path.read_text() == fields_page(), (
        "docs/api-fields.md is out of date; see this file's docstring"
    )


def test_limits_and_errors_are_documented() -> None:
    path = ROOT / "docs" / "serving.md"
    rows = "\n".join(
        f"| `{flag}` | {default} | {meaning} | {error} |"
        for flag, default, meaning, error in limits_table()
    )
    check_part(
        path, "limits", f"| flag | default | bounds | what happens |\n|---|---|---|---|\n{rows}\n"
    )
    codes = "\n".join(f"| `{code}` | {status} | {text} |" for code, (status, text) in CODES.items())
    check_part(path, "errors", f"| code | status | |\n|---|---|---|\n{codes}\n")


SDK_FIELDS = [
    (
        "/v1/chat/completions",
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsBase",
    ),
    ("/v1/completions", "openai.types.completion_create_params", "CompletionCreateParamsBase"),
    ("/v1/responses", "openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    ("/v1/embeddings", "openai.types.embedding_create_params", "EmbeddingCreateParams"),
]


@pytest.mark.parametrize(("route", "module", "name"), SDK_FIELDS)
def test_every_field_of_the_installed_sdk_has_its_row(route: str, module: str, name: str) -> None:
    """A new field of OpenAI is supported, stored as a label or rejected by name: never ignored."""
    from importlib import import_module

    kind = getattr(import_module(module), name)
    known = set(PROTOCOLS[route][1])
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
    for name in ("Dockerfile", "verbatim.service"):
        text = (ROOT / "deploy" / name).read_text().replace("\\\n", "")  # continued lines
        called = " ".join(
            x for x in text.splitlines() if x.startswith(("ENTRYPOINT", "ExecStart="))
        )
        used = set(re.findall(r"--[a-z-]+", called))
        assert used
        assert used - known == set(), name
    assert CliRunner().invoke(command, ["--help"]).exit_code == 0


def test_the_container_image_copies_existing_files() -> None:
    """Every path that the image copies or admits exists, and everything that pyproject.toml needs
    is admitted."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = [
        words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    ]
    assert copied
    assert all((ROOT / path).exists() for paths in copied for path in paths)
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"--from=(\w+)", text)) <= stages
    kept = {
        line[1:]
        for line in (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
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
    assert (
        f"install -d -o {user[1]} -g {user[1]} {volume[1]}" in text
    )  # otherwise root would own the volume


def test_the_systemd_unit_is_valid() -> None:
    unit = ROOT / "deploy" / "verbatim.service"
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(unit.read_text())  # raises on duplicate sections or keys
    assert set(parsed.sections()) == {"Unit", "Service", "Install"}
    drain = re.search(r"--drain-seconds (\d+)", parsed["Service"]["ExecStart"])
    assert drain is not None
    assert (
        int(parsed["Service"]["TimeoutStopSec"]) > int(drain[1]) + 10
    )  # otherwise systemd would kill it during its drain
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
    from verbatim.server.app import ROUTES

    text = (ROOT / "docs" / "serving.md").read_text()
    found: set[Any] = set(re.findall(r"`(?:GET |POST )?(/(?:v1|api)/[\w/{}]+)`", text))
    assert {f.replace("{id}", "{id:path}") if f == "/v1/models/{id}" else f for f in found} <= set(
        ROUTES
    )
