"""A protocol is one folder and one line: a copy of the package without either serves the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
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
# The app with a fake engine, without a socket. For each protocol: remove the folder and the line,
# import all that may know of protocols again, send the requests, put the protocol back.
SERVE = """
import asyncio, importlib, json, sys
from pathlib import Path
import httpx, verbatim
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings

API = Path(verbatim.__file__).parent / "server" / "api"
below = {*sys.modules}

async def answers(settings, supervisor, requests):
    for name in {*sys.modules} - below:
        if name.startswith("verbatim."):
            del sys.modules[name]
    importlib.invalidate_caches()
    from verbatim.server.app import make_app
    from verbatim.server.server_state import State
    app = httpx.ASGITransport(make_app(State(settings, supervisor)))
    async with httpx.AsyncClient(transport=app, base_url="http://localhost") as client:
        for method, path, body in requests:
            yield [path, (await client.request(method, path, json=body)).status_code]

async def main():
    settings = Settings(test_engine="pipeline", served_names=("m",))
    supervisor = Supervisor(settings)
    supervisor.start()
    await supervisor.ready.wait()
    table, found = (API / "routes.py").read_text(), {}
    for name, requests in json.load(sys.stdin).items():
        line = f'    "{name}",\\n'
        assert table.count(line) == 1
        (API / "routes.py").write_text(table.replace(line, ""))
        (API / name).rename(API.parent / "removed")
        found[name] = [row async for row in answers(settings, supervisor, requests)]
        (API.parent / "removed").rename(API / name)
    await supervisor.close()
    print(json.dumps([verbatim.__file__, found]))

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
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[object]]]:
    """Without each protocol: (path, status) of the requests of the others, of its own and of one
    for the description."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "verbatim")  # with the bytecode: it knows its source by time
    (root / "sitecustomize.py").write_text(SITE)
    asked = {}
    for name in NAMES:
        others = [REQUESTS[other] for other in NAMES if other != name]
        asked[name] = [*others, REQUESTS[name], ("GET", "/openapi.json", None)]
    done = subprocess.run(
        [sys.executable, "-B", "-c", SERVE],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    where, found = json.loads(done.stdout)
    assert Path(where).is_relative_to(root), "the test needs the copy"
    return dict(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_protocol_is_deleted_with_its_folder_and_its_line(
    name: str, answers: dict[str, list[list[object]]]
) -> None:
    *others, own, described = answers[name]
    assert others == [[REQUESTS[other][1], 200] for other in NAMES if other != name]
    assert (own, described) == ([REQUESTS[name][1], 404], ["/openapi.json", 200])


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
