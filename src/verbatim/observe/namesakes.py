"""Other distributions that install a module `verbatim` into this environment.

The names verbatim and verbatim-llm on the public index are other projects. Where two distributions
install into one folder, the files of the later one replace those of the earlier one.
"""

from __future__ import annotations

OURS = "verbatim-engine"


def namesakes() -> list[str]:
    """Their names, from the file list of every distribution here: some 100 ms."""
    from importlib.metadata import distributions

    found = set()
    for distribution in distributions():
        files = distribution.read_text("RECORD") or ""
        if files.startswith("verbatim/") or "\nverbatim/" in files:
            found.add(distribution.metadata["Name"])
    return sorted(found - {OURS})


def conflict() -> str:
    """One line about them and the remedy; empty without any."""
    names = namesakes()
    text = f"the module `verbatim` also belongs to {' and '.join(names)}, which is another project"
    remedy = f"pip uninstall {' '.join(names)}, then install {OURS} again"
    return f"{text}: {remedy}" if names else ""
