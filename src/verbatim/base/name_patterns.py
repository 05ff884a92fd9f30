"""Regular expressions of a model's config, matched by Python's `re` in a child process.

In: a pattern and a module name. Out: what `re.match` or `re.fullmatch` finds, as a bool. Config
files are untrusted, and `re` backtracks: `(a+)+$` takes hours on a name of 60 characters. A match
may use MATCH_SECONDS of CPU time; then the kernel ends the child, and the pattern is refused. A
pattern without special characters is matched here, so most files start no child.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref

from verbatim.base.errors import ModelError

MAX_PATTERN = 500  # characters of a pattern; those in use have at most some 200
MAX_NAME = 1000  # characters of a name
MATCH_SECONDS = 0.5  # CPU time of one match; those in use take microseconds
MEMORY = 256 << 20  # bytes of address space of the child
_SPECIAL = re.compile(r"[\\^$*+?{}\[\]()|]")
_CHILD = f"""
import json, re, resource, signal, sys, warnings
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for line in sys.stdin:
    how, pattern, name = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, {MATCH_SECONDS})
    try:
        found = getattr(re, how)(pattern, name) is not None
    except (re.error, OverflowError, RecursionError) as error:
        found = str(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(found), flush=True)
"""


class NamePatterns:
    """The patterns of one file. The child starts with the first special character."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def match(self, pattern: str, name: str) -> bool:
        """re.match(pattern, name) is not None"""
        return self._find("match", pattern, name)

    def fullmatch(self, pattern: str, name: str) -> bool:
        """re.fullmatch(pattern, name) is not None"""
        return self._find("fullmatch", pattern, name)

    def ends(self, pattern: str, name: str) -> bool:
        """Whether the pattern matches the name, or what follows one of its dots."""
        if not _SPECIAL.search(pattern):
            names = (name, *(name[i + 1 :] for i, c in enumerate(name) if c == "."))
            return any(self.fullmatch(pattern, end) for end in names)
        return self._find("fullmatch", rf"(.*\.)?({pattern})", name)

    def _find(self, how: str, pattern: str, name: str) -> bool:
        if len(pattern) > MAX_PATTERN:
            raise ModelError(f"a pattern has more than {MAX_PATTERN} characters")
        if len(name) > MAX_NAME:
            raise ModelError(f"the name {name[:40]!r}… has more than {MAX_NAME} characters")
        if not _SPECIAL.search(pattern):
            return getattr(re, how)(pattern, name) is not None
        found = self._ask(json.dumps([how, pattern, name]))
        if found is None:
            raise ModelError(
                f"the pattern {pattern!r:.60} takes too long to match module names; write it with "
                "fewer repeats"
            )
        if isinstance(found, str):
            raise ModelError(f"{pattern!r:.60} is not a regular expression: {found}")
        return found

    def _ask(self, line: str) -> bool | str | None:
        """The child's response; None: it ended."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            weakref.finalize(self, _stop, self._child)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            print(line, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            return None
        reply = self._child.stdout.readline()
        found: bool | str | None = json.loads(reply) if reply else None
        return found


def _stop(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()
