"""Markdown tables and their cells."""

from __future__ import annotations

from collections.abc import Iterable


def cell(text: object) -> str:
    escaped = str(text).replace("|", "\\|").replace("[", "\\[")
    return escaped.replace("<", "&lt;").replace("\n", "\\n")


def code(text: object) -> str:
    """Inline code in a table cell: only the column separator needs an escape."""
    return "`" + str(text).replace("|", "\\|").replace("\n", "\\n") + "`"


def codes(names: Iterable[str]) -> str:
    return ", ".join(map(code, names))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
