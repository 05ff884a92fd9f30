"""Every message that the command line can print, collected from the source.

`python tests/cli/cli_messages.py` prints them as Markdown, one line per message: for a review by
eye. In WHOLE packages a message is any string with a space that is not a docstring (the docstring
of a command is its help), so the list has some strings that are never printed. In the other
packages it is the text of an exception, or of a check that raises one. Values that a message
formats appear as {expression}. Texts of asserts are for bugs of ours and are left out.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "verbatim"
WHOLE = ("cli", "base", "diagnose", "hub/catalog.py", "hub/wheel_model.py")
WHOLE += ("hub/hub.py", "observe")
# Packages whose exceptions reach the terminal. The server's HTTP API answers clients, in the same
# words.
ERRORS = "text files formats hub encoder lora model schedule sampling grammar speculate"
ERRORS += " backend engine convert bench scale"
# Calls that build or raise an error: classes, and the helpers of the file readers.
RAISES = ("Error", "Exit", "Problem", "warn", "warning", "fail", "need", "check", "wrong", "refuse")


@dataclass(frozen=True)
class Message:
    file: str  # below src/verbatim
    line: int
    text: str


@cache
def messages() -> list[Message]:
    """Every message, by file and line."""
    found: dict[tuple[str, int, str], Message] = {}
    for paths, collect in ((WHOLE, _all_strings), ((*ERRORS.split(), "server"), _error_strings)):
        for path in (file for name in paths for file in _files(SOURCE / name)):
            for message in _of(path, collect):
                found[message.file, message.line, message.text] = message
    for message in _hints():
        found[message.file, message.line, message.text] = message
    return sorted(found.values(), key=lambda message: (message.file, message.line))


def _hints() -> Iterator[Message]:
    """The hints for names of other programs, which are data: one per line."""
    path = SOURCE / "base" / "migration_hints.json"
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        _, colon, text = line.strip().partition(": ")
        if colon and text.startswith('"') and is_prose(text):
            yield Message("base/migration_hints.json", number, json.loads(text.rstrip(",")))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _of(
    path: Path, collect: Callable[[ast.Module], Iterator[tuple[ast.expr, str]]]
) -> list[Message]:
    tree = ast.parse(path.read_text("utf-8"))
    name = path.relative_to(SOURCE).as_posix()
    return [
        Message(name, node.lineno, " ".join(text.split()))
        for node, text in collect(tree)
        if is_prose(text)
    ]


def is_prose(text: str) -> bool:
    """Whether a string is a sentence or a part of one, rather than a name, key or format."""
    words = text.split()
    return len(words) > 1 and any(word.strip("(\"'`,;:.").isalpha() for word in words)


def _all_strings(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """The outermost strings of a module, except the docstrings of what is not a command."""
    skipped = {id(node) for node in _docstrings(tree)}
    yield from _outermost(tree, skipped)


def _error_strings(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """The strings of exceptions: raised, or built by a call of a class that is named so."""
    seen: set[int] = set()
    for node in ast.walk(tree):
        raised = isinstance(node, ast.Raise) and node.exc is not None
        built = isinstance(node, ast.Call) and _name(node.func).endswith(RAISES)
        if (raised or built) and id(node) not in seen:
            seen.update(id(child) for child in ast.walk(node))
            yield from _outermost(node, set())


def _outermost(tree: ast.AST, skipped: set[int]) -> Iterator[tuple[ast.expr, str]]:
    if id(tree) in skipped or isinstance(tree, ast.Assert):
        return
    if isinstance(tree, (ast.JoinedStr, ast.Constant, ast.BinOp)):
        text = rendered(tree)
        if text is not None:
            yield tree, text
            return
    for child in ast.iter_child_nodes(tree):
        yield from _outermost(child, skipped)


def rendered(node: ast.AST) -> str | None:
    """The text of a string expression, with {…} for what it formats; None: not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
            else "{" + ast.unparse(part.value) + "}"
            if isinstance(part, ast.FormattedValue)
            else "{}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = rendered(node.left), rendered(node.right)
        if left is None and right is None:
            return None
        return "".join(
            "{" + ast.unparse(side) + "}" if text is None else text
            for side, text in ((node.left, left), (node.right, right))
        )
    return None


def _docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.body and not _is_command(node):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def _is_command(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(d, ast.Call) and _name(d.func) == "command" for d in decorators)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def as_markdown() -> str:
    lines: list[str] = []
    file = ""
    for message in messages():
        if message.file != file:
            file = message.file
            lines += ["", f"## {file}", ""]
        lines.append(f"- {message.line}: {message.text}")
    return "\n".join(lines).lstrip("\n")


if __name__ == "__main__":
    sys.stdout.write(as_markdown() + "\n")
