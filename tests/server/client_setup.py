"""The cache folder of the tests (outside the repository), and in it the client packages: a virtual
environment and node_modules.

Both are installed from pinned lists, in the background, as soon as tests that need them are
collected, so that the rest of the suite does not wait. `python tests/server/client_setup.py` (make
clients) does it in the foreground.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    path = Path(os.environ.get("VERBATIM_TEST_CACHE") or os.path.join(home, "verbatim-tests"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def _key(name: str) -> str:
    return hashlib.sha256((HERE / name).read_bytes() + sys.version.encode()).hexdigest()[:12]


def python_home() -> Path:
    return cache_dir() / f"clients-{_key('clients.lock')}"


def node_home() -> Path:
    return cache_dir() / f"npm-{_key('package.json')}"


def install_python() -> None:
    home = python_home()
    if (home / "done").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "bin" / "python"),
        "install",
        "-q",
        "--no-deps",
    ]
    subprocess.run([*pip, "-r", str(HERE / "clients.lock")], check=True, timeout=600)
    (home / "done").touch()


def install_node() -> None:
    home = node_home()
    if (home / "done").exists() or shutil.which("npm") is None:
        return
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "package.json", home / "package.json")
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=home, check=True, timeout=600
    )
    (home / "done").touch()


def start() -> subprocess.Popen[bytes] | None:
    """Install in the background at low priority. None: everything is installed."""
    if (python_home() / "done").exists() and (
        (node_home() / "done").exists() or shutil.which("npm") is None
    ):
        return None
    log = open(cache_dir() / "setup.log", "wb")  # noqa: SIM115
    return subprocess.Popen(
        [sys.executable, __file__], stdout=log, stderr=log, preexec_fn=lambda: os.nice(10) and None
    )


if __name__ == "__main__":
    install_node()
    install_python()
