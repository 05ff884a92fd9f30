"""Every command and Python block of README.md and docs/ runs, and prints what the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import doc_blocks
import pytest

PAGES = doc_blocks.pages()
RUN = [page for page in PAGES if any(b.runs for b in doc_blocks.blocks(page.read_text("utf-8")))]


@pytest.mark.model
@pytest.mark.native
@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(
    "page",
    # the pages of the course take a quarter of the time; one of them stands for all
    [
        pytest.param(
            page,
            marks=[pytest.mark.soak] if "course" in page.parts and page.stem != "sampling" else [],
        )
        for page in RUN
    ],
    ids=doc_blocks.name,
)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, default_model: Path, doc_server: Callable[[], int]
) -> None:
    pytest.importorskip("verbatim.backend.cpu._native", reason="outputs are of the cpu backend")
    wrong = doc_blocks.run_page(page, doc_blocks.Runner(tmp_path, doc_server))
    assert not wrong, "\n".join(wrong) + "\n(python tests/docs/doc_blocks.py --write PAGE)"


@pytest.mark.parametrize("page", PAGES, ids=doc_blocks.name)
def test_a_block_that_does_not_run_says_why_and_has_right_flags(page: Path) -> None:
    for block in doc_blocks.blocks(page.read_text("utf-8")):
        where = f"{doc_blocks.name(page)}:{block.line + 1}"
        if block.language in doc_blocks.EXECUTED:
            assert not block.reason or block.reason in doc_blocks.REASONS, where
        elif block.language in ("", "text"):
            command = re.search(r"^(\$ |verbatim \w|pip install|curl )", block.text, re.MULTILINE)
            assert command is None, f"{where}: a command in a block that does not run"
        if block.reason and block.language in ("bash", "console"):
            for words in verbatim_commands(block.text):
                parse(words, where)


def verbatim_commands(text: str) -> list[list[str]]:
    """The `verbatim` commands of a script, without comments and redirections."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [re.sub(r"^(\$ )?", "", line) for line in lines]
    words = [shlex.split(line, comments=True) for line in found if line.startswith("verbatim ")]
    return [[word for word in line[1:] if word != "&"] for line in words]


def parse(words: list[str], where: str) -> None:
    """Raise if the command line has no such command or flag. Nothing is run."""
    from verbatim.cli.main import cli

    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, f"{where}: no command {words[0]}"
    try:
        command.make_context(words[0], words[1:], resilient_parsing=False)
    except click.exceptions.Exit:
        pass
    except click.ClickException as error:
        if "does not exist" in error.format_message():  # a file of the reader
            return
        pytest.fail(f"{where}: verbatim {' '.join(words)}: {error.format_message()}")


def test_dots_stand_for_any_text_and_any_lines() -> None:
    assert doc_blocks.matches("a … c\n…\nz\n", "a b c\n1\n2\nz\n")
    assert doc_blocks.matches("a\n…\n", "a\n")
    assert not doc_blocks.matches("a\n", "a\nb\n")
    assert not doc_blocks.matches("a…c\n", "a\nc\n")
    assert not doc_blocks.matches("a\n…\n", "b\n")


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    page = doc_blocks.ROOT / "docs" / "none.md"  # not written
    runner = doc_blocks.Runner(tmp_path, lambda: 1)
    block = doc_blocks.Block("python", "print(1 + 1)\n", 0, 0, "")
    assert runner.python(block, page) == "2\n"
    code, out, err = runner.shell("verbatim run --top-p 1.5 Hi")
    assert (code, out) == (2, "")
    assert err.startswith("verbatim: --top-p: 1.5 is above 1")
    assert runner.shell("echo a | tr a b; false")[:2] == (1, "b\n")
    assert doc_blocks.commands("$ one \\\n  two\nout\n\n$ three\n") == [
        doc_blocks.Command("one \\\n  two", "out"),
        doc_blocks.Command("three", ""),
    ]
