"""The code blocks of README.md and docs/, and how a test runs them.

| fence | what happens |
|---|---|
| `console` | each `$ command` runs; the lines below it are its output |
| `bash` | the whole block runs as one script and must succeed |
| `python` | runs; all blocks of a page share one namespace |
| `output` | what the `python` block above prints |

`…` stands for any text inside a line, and alone on a line for any lines. The output of a command is
its stdout; of a command that fails (a line that starts with `verbatim: `) also its stderr. A block
that names 127.0.0.1:8000 gets a server of the default model there. A block below the comment
`<!-- not run: REASON -->` does not run, but the flags of its `verbatim` commands are checked.

    python tests/docs/doc_blocks.py --write [PAGE ...]      records the outputs again
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVER = "127.0.0.1:8000"
EXECUTED = ("console", "bash", "python")
# Why a block may not run: each is something that a test machine lacks.
REASONS = {
    "network": "a model hub or an index beyond the package registries",
    "GPU": "an NVIDIA GPU",
    "Docker": "a container engine",
    "Ray": "the extra ray, or a cluster; `make test-ray` runs on a local one",
    "another engine": "vLLM, llama.cpp, Ollama or transformers with weights",
    "until stopped": "it serves or listens until it is stopped; the test has its own server",
    "two machines": "a second machine; tests/parallel/test_machines.py runs it on one",
    "minutes": "takes minutes, or changes the environment",
    "another client": "a client package; tests/server/test_server_clients.py runs it",
}
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    start: int  # offset of the text in the page
    line: int
    reason: str  # why it does not run, or ""

    @property
    def runs(self) -> bool:
        return self.language in EXECUTED and not self.reason


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    out = []
    for match in FENCE.finditer(text):
        start, indent = match.start("text"), match["indent"]
        body = "".join(
            line.removeprefix(indent) for line in match["text"].splitlines(keepends=True)
        )
        line = text.count("\n", 0, start)
        out.append(Block(match["language"], body, start, line, match["reason"] or ""))
    return out


@dataclass(frozen=True)
class Command:
    """One `$ command` of a console block and the output that the page shows."""

    words: str
    shown: str


def commands(text: str) -> list[Command]:
    out = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        count = 1
        while lines[count - 1].endswith("\\") or not _closed("\n".join(lines[:count])):
            count += 1
        out.append(Command("\n".join(lines[:count]), "\n".join(lines[count:]).strip("\n")))
    return out


def _closed(text: str) -> bool:
    """Whether every quotation of a command is closed."""
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def matches(shown: str, printed: str) -> bool:
    """Whether the shown text describes the printed one."""
    pattern = []
    for line in shown.splitlines():
        if line.strip() == "…":
            pattern.append(r"(?:.*\n)*?")
        else:
            pattern.append(r"[^\n]*?".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n")
    return re.fullmatch("".join(pattern), printed.rstrip("\n") + "\n") is not None


# ------------------------------------------------------------------------------------------ running


class Runner:
    """Runs the blocks of one page in an empty directory. `server` returns the server's port."""

    def __init__(self, directory: Path, server: Callable[[], int]) -> None:
        self.directory, self.server = directory, server
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.directory.joinpath("examples").symlink_to(ROOT / "examples")

    def prepared(self, text: str) -> str:
        return text.replace(SERVER, f"127.0.0.1:{self.server()}") if SERVER in text else text

    def python(self, block: Block, page: Path) -> str:
        """What the block prints."""
        out = io.StringIO()
        code = "\n" * block.line + self.prepared(block.text)  # so that tracebacks name the line
        with contextlib.redirect_stdout(out), contextlib.chdir(self.directory):
            exec(compile(code, str(page), "exec", dont_inherit=True), self.names)
        return out.getvalue()

    def shell(self, text: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        text = self.prepared(text)
        words = _plain(text)
        if words is not None:
            return self._in_process(words)
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.directory,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    def _in_process(self, words: list[str]) -> tuple[int, str, str]:
        """A command without a new interpreter: half of the time of a command is its start."""
        from verbatim.cli.main import main

        code = 0
        with contextlib.chdir(self.directory), _captured() as (out, err), _environ(environment()):
            try:
                if words[0] == "python":
                    _run_script(words[1:])
                else:
                    main(words[1:])
            except SystemExit as done:
                code = int(done.code or 0)
        return code, out.getvalue(), err.getvalue()


def _run_script(words: list[str]) -> None:
    """`python FILE …`, with the file's folder first on the path, as the interpreter does."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = words, [str((ROOT / words[0]).parent)]
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _plain(text: str) -> list[str] | None:
    """The words of a single `verbatim` or `python examples/…` command without shell syntax; None
    for anything else."""
    joined = text.replace("\\\n", " ").strip()
    if not joined.startswith(("verbatim ", "python examples/")) or "\n" in joined:
        return None
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    shell = any(set(word) <= set("();<>|&") for word in words) or "$" in joined or "*" in joined
    return None if shell else shlex.split(joined)


def environment() -> dict[str, str]:
    """The environment of a user without settings, on a terminal of 100 columns."""
    kept = {key: value for key, value in os.environ.items() if key not in UNSET}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}


UNSET = ("VERBATIM_MODEL", "VERBATIM_API_KEY", "FORCE_COLOR")


@contextlib.contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """stdout and stderr as files with a `buffer`, as commands expect them."""
    raw = [io.BytesIO(), io.BytesIO()]
    wrapped = [io.TextIOWrapper(part, "utf-8", write_through=True) for part in raw]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(wrapped[0]), contextlib.redirect_stderr(wrapped[1]):
        try:
            yield out, err
        finally:
            for part, target in zip(raw, (out, err), strict=True):
                target.write(part.getvalue().decode())


def printed(code: int, out: str, err: str) -> str:
    return out + err if code else out


def run_page(page: Path, runner: Runner, write: bool = False) -> list[str]:
    """Run the blocks of a page in order; return what is wrong. `write`: correct the page."""
    text = page.read_text("utf-8")
    wrong: list[str] = []
    changes: list[tuple[Block, str]] = []
    found = blocks(text)
    for number, block in enumerate(found):
        where = f"{name(page)}:{block.line + 1}"
        if not block.runs:
            continue
        if block.language == "python":
            said = runner.python(block, page)
            after = found[number + 1] if number + 1 < len(found) else None
            if after is not None and after.language == "output" and not matches(after.text, said):
                wrong.append(f"{where}: prints\n{said}")
                changes.append((after, said))
        elif block.language == "bash":
            code, out, err = runner.shell(block.text)
            if code:
                wrong.append(f"{where}: exit code {code}\n{out}{err}")
        else:
            new = ""
            for command in commands(block.text):
                code, out, err = runner.shell(command.words)
                said = printed(code, out, err)
                fails = re.search(r"^verbatim: ", said, re.MULTILINE) is not None
                good = matches(command.shown, said) and fails == bool(code)
                if not good:
                    wrong.append(f"{where}: $ {command.words} (exit code {code})\n{said}{err}")
                shown = command.shown if good else said.rstrip("\n")
                new += f"$ {command.words}\n{shown}\n" if shown else f"$ {command.words}\n"
                new += "\n"
            changes.append((block, new.rstrip("\n") + "\n"))
    if write:
        for block, new in reversed(changes):
            end = block.start + len(block.text)
            assert text[block.start : end] == block.text, "an indented block; correct it by hand"
            text = text[: block.start] + new + text[end:]
        page.write_text(text, "utf-8")
    return wrong


def main() -> None:
    """Record the outputs of the pages named, or of all."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server")]
    from doc_server import DocServer

    names = [word for word in sys.argv[1:] if word != "--write"]
    server = DocServer()
    try:
        for page in [Path(word).resolve() for word in names] or pages():
            with tempfile.TemporaryDirectory() as directory:
                runner = Runner(Path(directory), server.port)
                for line in run_page(page, runner, "--write" in sys.argv):
                    print(line)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
