"""Variables of the user's shell that change what the suite's commands do.

A user may have a default model, an API key, a proxy, colours or a line width of their own. None of
them may decide whether a test passes, so the suite runs without them.
"""

from __future__ import annotations

from collections.abc import MutableMapping

# VERBATIM_CACHE holds the default model; VERBATIM_ISA chooses the kernels under test.
KEPT = ("VERBATIM_CACHE", "VERBATIM_ISA", "VERBATIM_TEST_")
# make's variables are those of `make test`: with -B or -n its tests of the Makefile would see them.
REMOVED = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "MAKEFLAGS", "MFLAGS")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def remove_user_settings(environment: MutableMapping[str, str]) -> None:
    for name in list(environment):
        ours = name.startswith("VERBATIM_") and not name.startswith(KEPT)
        if ours or name in REMOVED:
            del environment[name]
    environment["TERM"] = "xterm"
    # A proxy stays, because packages and models may need it, but servers of tests are local.
    names = ("NO_PROXY", "no_proxy")
    hosts = [host for name in names for host in environment.get(name, "").split(",") if host]
    environment |= dict.fromkeys(names, ",".join(dict.fromkeys((*hosts, *LOOPBACK))))
