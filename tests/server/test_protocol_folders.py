"""A protocol is one folder and one line: a copy of the package without either serves the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import verbatim
from eventually import HANG_SECONDS
from verbatim.server.api.routes import NAMES, PROTOCOLS

PACKAGE = Path(verbatim.__file__).parent
SERVER = PACKAGE / "server"
IMPORTS = re.compile(r"^ *(?:from|import) verbatim\.server\.([\w.]+)(?: import (\w+))?", re.M)

# One request of each protocol, which a server without another protocol still serves.
REQUESTS = {
    "openai": ("POST", "/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2}),
    "native": ("GET", "/health", None),
    "llamacpp": ("POST", "/completion", {"prompt": "hi", "n_predict": 2}),
    "anthropic": ("POST", "/v1/messages", {"model": "m", "max_tokens": 2,
                                           "messages": [{"role": "user", "content": "hi"}]}),
    "ollama": ("POST", "/api/generate", {"model": "m", "prompt": "hi", "stream": False,
                                         "options": {"num_predict": 2}}),
    "lens": ("GET", "/lens/api/info", None),
    "chat": ("GET", "/", None),
}  # fmt: skip
# The app with a fake engine, without a socket. Prints the status of each request.
SERVE = """
import asyncio, json, sys
import httpx, verbatim
from verbatim.server.app import make_app
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.server_state import State
from verbatim.server.settings import Settings

async def main():
    settings = Settings(test_engine="pipeline", served_names=("m",))
    supervisor = Supervisor(settings)
    supervisor.start()
    await supervisor.ready.wait()
    app = httpx.ASGITransport(make_app(State(settings, supervisor)))
    async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
        for method, path, body in json.load(sys.stdin):
            print(path, (await client.request(method, path, json=body)).status_code)
    await supervisor.close()

print(verbatim.__file__)
asyncio.run(main())
"""
# An editable install may have a finder that knows the files of the original.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
"""


def test_each_folder_is_registered() -> None:
    folders = {path.parent.name for path in SERVER.glob("api/*/protocol.py")}
    assert folders == set(NAMES) == set(REQUESTS)
    assert len(PROTOCOLS) == len(NAMES) + 1, "and the two routes that describe them all"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "verbatim")  # with the bytecode: it knows its source by time
    (root / "sitecustomize.py").write_text(SITE)
    return root


@pytest.fixture(params=NAMES)
def without(request: pytest.FixtureRequest, copied: Path) -> Iterator[str]:
    """The copy without the folder and the line of one protocol; put back afterwards."""
    name = str(request.param)
    api = copied / "verbatim" / "server" / "api"
    table = (api / "routes.py").read_text()
    line = f'    "{name}",\n'
    assert table.count(line) == 1
    (api / "routes.py").write_text(table.replace(line, ""))
    (api / name).rename(copied / name)
    yield name
    (copied / name).rename(api / name)
    (api / "routes.py").write_text(table)


def test_a_protocol_is_deleted_with_its_folder_and_its_line(without: str, copied: Path) -> None:
    others = [REQUESTS[name] for name in NAMES if name != without]
    done = subprocess.run(
        [sys.executable, "-B", "-c", SERVE],
        input=json.dumps([*others, REQUESTS[without], ("GET", "/openapi.json", None)]),
        env={**os.environ, "PYTHONPATH": str(copied)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    where, *answers = done.stdout.splitlines()
    assert Path(where).is_relative_to(copied), "the test needs the copy"
    expected = [f"{path} 200" for _, path, _ in others]
    assert answers == [*expected, f"{REQUESTS[without][1]} 404", "/openapi.json 200"]


def imported(folder: str) -> set[tuple[str, str]]:
    """(file, module below verbatim.server) of each import in a folder of the server."""
    return {
        (path.name, f"{found[1]}.{found[2] or ''}")
        for path in (SERVER / folder).rglob("*.py")
        for found in IMPORTS.finditer(path.read_text())
    }


@pytest.mark.parametrize("folder", ["process", "http"])
def test_the_layers_below_know_nothing_of_the_api(folder: str) -> None:
    assert not {row for row in imported(folder) if row[1].startswith(("api", "app"))}


@pytest.mark.parametrize("folder", [*NAMES, "common"])
def test_a_protocol_imports_no_other_protocol(folder: str) -> None:
    """Nor does what they share."""
    others = tuple(f"api.{name}." for name in NAMES if name != folder)
    found = imported(f"api/{folder}")
    assert found, "the pattern finds imports"
    assert not {row for row in found if row[1].startswith((*others, "api.routes"))}
