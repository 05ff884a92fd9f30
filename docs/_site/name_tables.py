"""Tables of the public names: what the pages of docs/reference show where no site is built.

The site shows the whole docstrings beside them: `<!-- ::: verbatim.NAME -->` (hooks.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from markdown_table import code, table

import verbatim

REFERENCE = Path(__file__).parents[1] / "reference"
ENTRY = re.compile(r"^<!-- ::: verbatim\.(\w+)", re.MULTILINE)
ENGINES = ("LLM", "AsyncEngine", "Stream", "AsyncStream")
INTERNAL = {"from_loaded", "from_parts", "submit_to", "call"}  # tests/test_exports.py names them


def _names() -> list[str]:
    return [name for name in verbatim.__all__ if not name.startswith("__")]


def _summary(thing: object) -> str:
    """The first paragraph of a docstring. An alias of a type has none."""
    text = inspect.getdoc(thing) if _ours(thing) else "an alias of a type"
    assert text, thing
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|").replace("<", "&lt;")


def _ours(thing: object) -> bool:
    return getattr(thing, "__module__", "").startswith("verbatim")


def public_names() -> str:
    """Every public name with the page of its entry."""
    pages = {page.name: page.read_text("utf-8") for page in sorted(REFERENCE.glob("*.md"))}
    where = {name: page for page, text in pages.items() for name in ENTRY.findall(text)}
    rows = (
        (f"[`{name}`]({where.get(name, 'engines.md')})", _summary(getattr(verbatim, name)))
        for name in _names()
    )
    return table(("name", ""), rows)


def methods() -> str:
    """The public methods and properties of the engines and streams."""
    rows = []
    for owner in ENGINES:
        for name, thing in inspect.getmembers_static(getattr(verbatim, owner)):
            plain = thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing
            if name.startswith("_") or name in INTERNAL or not inspect.getdoc(plain):
                continue
            shown = f"{owner}.{name}"
            if callable(plain):
                shown += f"({', '.join(_arguments(plain))})"
            elif not isinstance(plain, property):
                continue
            rows.append(
                (code(shown), _summary(plain.fget if isinstance(plain, property) else plain))
            )
    return table(("", ""), rows)


def _arguments(function: object) -> list[str]:
    out = []
    for name, given in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
        if given.kind is given.VAR_KEYWORD:
            name = f"**{name}"
        elif given.kind is given.VAR_POSITIONAL:
            name = f"*{name}"
        if name != "self":
            out.append(name)
    return out


def records() -> str:
    """The fields of every public record."""
    rows = []
    for name in _names():
        record = getattr(verbatim, name)
        if dataclasses.is_dataclass(record) and name not in ("SamplingParams", "EngineConfig"):
            fields = dataclasses.fields(record)
            rows += [(code(f"{name}.{f.name}"), code(f.type)) for f in fields if f.name[0] != "_"]
    return table(("field", "type"), rows)


def other_names() -> str:
    """Entries of public names that no page shows: a new export is never missing."""
    text = "".join(page.read_text("utf-8") for page in REFERENCE.glob("*.md"))
    shown = set(ENTRY.findall(text))
    return "\n\n".join(f"<!-- ::: verbatim.{name} -->" for name in _names() if name not in shown)
