"""pip install with its progress in lines, for the Makefile:

    .venv/bin/python tests/install.py -c constraints.txt -e .

The arguments are pip's. pip shows either nothing of a build or everything; this shows downloads,
which of how many files is compiled, and if pip fails everything from 20 lines before the
first error on.
"""

from __future__ import annotations

import re
import subprocess
import sys

# Python compiles what it imports, a tenth of the modules; compiling all is half of pip's time.
PIP = [sys.executable, "-m", "pip", "install", "-v", "--no-compile", "--disable-pip-version-check"]
ERROR = re.compile(r"^\s*(FAILED:|CMake Error|error:|ERROR:)")
SHOWN = (
    (r"\[(\d+)/(\d+)\] Building CXX object .*?(\w[\w-]*)\.dir/(?:.*/)?(\S+)\.o", r"\1/\2 \3 \4"),
    (r"\[(\d+)/(\d+)\] Linking .* (\S+)", r"\1/\2 link \3"),
    (r"Downloading (?:\S+/)?([^/\s-]+)-\S+ (\(.*\))", r"download \1 \2"),
    (r"Installing build dependencies: started", "install the build tools"),
    (r"Installing collected packages: (.*)", r"install \1"),
    (r"(verbatim: .*)", r"\1"),
)


def progress(line: str) -> str | None:
    """What a user reads of one line of pip's output; None: nothing."""
    for pattern, text in SHOWN:
        if found := re.fullmatch(pattern, line.strip()):
            return found.expand(text)
    return None


def main(arguments: list[str]) -> int:
    process = subprocess.Popen(
        [*PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    log = []
    for line in process.stdout:
        log.append(line)
        if text := progress(line):
            print(f"  {text}", flush=True)
    if process.wait():
        first = next((i for i, line in enumerate(log) if ERROR.match(line)), len(log))
        sys.stderr.writelines(log[max(0, first - 20) :])  # before it: what a killed tool said
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
