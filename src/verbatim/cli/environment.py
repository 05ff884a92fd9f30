"""The environment variables that Verbatim reads, and warnings about names that it does not.

A setting that is written as a variable that nothing reads would otherwise be dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module

VARIABLES = {
    "VERBATIM_API_KEY": "API keys of the server, separated by spaces",
    "VERBATIM_CACHE": "folder of models and measured limits",
    "VERBATIM_DEBUG": "1: print tracebacks, as --debug",
    "VERBATIM_HISTORY": "file with the lines typed in `verbatim chat`; off: none",
    "VERBATIM_ISA": "instruction set of the CPU kernels",
    "VERBATIM_LOG": "log level of the engine process",
    "VERBATIM_MODEL": "default model of the command line",
    "VERBATIM_RANK_SECRET": "what ranks on several machines must know to join",
}
# What Kubernetes tells every pod about a Service named "verbatim" (VERBATIM_PORT only with an
# address as value), and variables of the test suite.
FOREIGN = re.compile(
    r"VERBATIM_(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT(_\d+_\w+)?=(\w+://.*)?"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*|TEST_\w+=.*|WRITE_DOCS=.*)",
    re.DOTALL,
)


def unknown_variables(environ: Mapping[str, str], serves: bool = False) -> list[str]:
    """A warning for each variable with a VERBATIM_ name that has no effect on this command.
    `serves`: the command is `verbatim serve`, whose flags are variables, too."""
    names = [
        name
        for name, value in environ.items()
        if name.startswith("VERBATIM_")
        and name not in VARIABLES
        and not FOREIGN.fullmatch(f"{name}={value}")
    ]
    if not names:
        return []
    from difflib import get_close_matches

    command = import_module("verbatim.cli.commands.serve").command
    flags = {str(param.envvar) for param in command.params if param.envvar}
    warnings = []
    for name in names:
        near = get_close_matches(name, [*VARIABLES, *flags], 1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VARIABLES)}"
        if name not in flags:
            warnings.append(f"{name} is no variable of Verbatim and has no effect; {hint}")
        elif not serves:
            warnings.append(f"{name} is a setting of `verbatim serve` and has no effect here")
    return warnings
