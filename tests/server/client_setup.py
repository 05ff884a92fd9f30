"""The cache folder of the tests (outside the repository), and in it the client packages: a virtual
environment and node_modules.

Both are installed from pinned lists, in the background, as soon as tests that need them are
collected, so that the rest of the suite does not wait. Each worker of the suite starts the
installation; one runs, and the others wait for it. `python tests/server/client_setup.py` (make
clients) does it in the foreground.
"""

from __future__ import annotations

import fcntl
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
        "--no-compile",  # most modules are never imported
    ]
    subprocess.run([*pip, "-r", str(HERE / "clients.lock")], check=True)
    (home / "done").touch()


def install_node() -> None:
    home = node_home()
    if (home / "done").exists() or shutil.which("npm") is None:
        return
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "package.json", home / "package.json")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=home, check=True)
    (home / "done").touch()


def start() -> subprocess.Popen[bytes] | None:
    """Install in the background. None: everything is installed. Its process group includes pip. No
    lower priority: beside other work it would take longer than the suite."""
    if (python_home() / "done").exists() and (
        (node_home() / "done").exists() or shutil.which("npm") is None
    ):
        return None
    with open(cache_dir() / "setup.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, __file__], stdout=log, stderr=log, start_new_session=True
        )


def main() -> None:
    with open(cache_dir() / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, also by a kill
        install_node()
        install_python()


if __name__ == "__main__":
    main()
