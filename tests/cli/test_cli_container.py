"""deploy/Dockerfile without a container: its RUN lines, ENTRYPOINT and HEALTHCHECK are executed in
two virtual environments, one for each stage."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from eventually import HANG_SECONDS, eventually

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
# Commands that change the image's system, not the program. The rest is executed.
SYSTEM = ("apt-get update", "apt-get install", "rm -rf /var/lib/apt/lists", "useradd", "install -d")


def stages() -> list[list[tuple[str, str]]]:
    """(instruction, text) of each stage, in order."""
    out: list[list[tuple[str, str]]] = []
    for line in DOCKERFILE.splitlines():
        word, _, text = line.partition(" ")
        if word == "FROM":
            out.append([])
        elif word.isupper():
            out[-1].append((word, " ".join(text.split())))
    return out


def commands(stage: list[tuple[str, str]]) -> list[str]:
    """What the RUN lines of a stage execute, without SYSTEM."""
    every = [part.strip() for word, text in stage if word == "RUN" for part in text.split("&&")]
    return [command for command in every if not command.startswith(SYSTEM)]


def exec_form(name: str) -> list[str]:
    """The words of ENTRYPOINT or of HEALTHCHECK's CMD."""
    [text] = [text for word, text in stages()[-1] if word == name]
    words: list[str] = json.loads(text[text.index("[") :])
    return words


def test_what_is_executed_is_all_but_the_system() -> None:
    build, final = stages()
    assert [command.split()[:2] for command in commands(build)] == [["pip", "wheel"]]
    assert [command.split()[:2] for command in commands(final)] == [["pip", "install"]]
    assert exec_form("ENTRYPOINT")[:2] == ["verbatim", "serve"]
    assert exec_form("HEALTHCHECK")[:2] == ["python", "-c"]
    compile(exec_form("HEALTHCHECK")[2], "HEALTHCHECK", "exec")
    for word in shlex.split(" ".join(text for _, text in final)):
        assert not word.startswith("./"), "the second stage has no sources"


def copy_context(target: Path) -> None:
    """The files that Dockerfile.dockerignore admits."""
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    target.mkdir()
    for line in lines:
        path = ROOT / line[1:]
        if line.startswith("!") and path.is_dir():
            shutil.copytree(path, target / line[1:], ignore=ignored)
        elif line.startswith("!"):
            shutil.copy(path, target / line[1:])


@pytest.mark.soak
def test_the_image_builds_and_serves(tmp_path: Path, default_model: Path) -> None:
    """Every command of the file in its order: wheel, install, server, health check, SIGTERM."""
    context, wheels, keys = tmp_path / "src", tmp_path / "wheels", tmp_path / "keys"
    copy_context(context)
    keys.write_text("a-key-for-this-test\n")
    path = os.environ["PATH"]
    for number, stage in enumerate(stages()):
        venv = tmp_path / f"stage{number}"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        env = {**os.environ, "PATH": f"{venv / 'bin'}:{path}"}
        for command in commands(stage):
            here = context if number == 0 else tmp_path
            subprocess.run(
                command.replace("/wheels", str(wheels)), shell=True, check=True, cwd=here, env=env
            )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])

    def words(name: str) -> list[str]:
        text = [re.sub(r"\b8000\b", port, word) for word in exec_form(name)]
        return [str(keys) if word == "/run/secrets/verbatim-keys" else word for word in text]

    health = words("HEALTHCHECK")
    server = subprocess.Popen(words("ENTRYPOINT"), env=env, cwd=tmp_path)
    try:

        def is_healthy() -> bool:
            assert server.poll() is None, "the server ended"
            return subprocess.run(health, env=env, stderr=subprocess.DEVNULL).returncode == 0

        eventually(is_healthy, "the health check never succeeded")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/models",
            headers={"Authorization": "Bearer a-key-for-this-test"},
        )
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            assert json.load(answer)["data"][0]["id"] == "smollm2"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(HANG_SECONDS) == 0
