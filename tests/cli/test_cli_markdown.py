"""Rendered answers on a terminal: pieces of any size give the same screen, and no character is
lost."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from verbatim.cli.lib.chat.chat_input import candidates
from verbatim.cli.lib.chat.markdown_stream import MarkdownStream, split_blocks

ROOT = Path(__file__).parents[2]
ANSWER = """\
# Rain

Soft on the roof,
a *silent* drum. See <b>it</b> at [home](https://example.org).

1. first

2. second

```python
def add(a, b):

    return a + b
```

The end, which is a longer paragraph that must be wrapped between words and not inside them.
"""


def screen_of(pieces: list[str], columns: int = 40, rows: int = 60) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=columns, height=rows, highlight=False)
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.push(piece)
    stream.close()
    screen = pyte.Screen(columns, rows)
    screen.set_mode(pyte.modes.LNM)  # the terminal driver turns \\n into \\r\\n
    pyte.Stream(screen).feed(file.getvalue())
    return [line.rstrip() for line in screen.display]


def test_the_screen_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verbatim.cli.lib.chat.markdown_stream.INTERVAL", 0.0)  # redraw at each
    whole = screen_of([ANSWER])
    assert screen_of(list(ANSWER)) == whole
    assert screen_of([ANSWER[i : i + 7] for i in range(0, len(ANSWER), 7)]) == whole


def test_every_word_is_on_the_screen_and_lines_are_wrapped_between_words() -> None:
    lines = screen_of([ANSWER])
    text = " ".join(" ".join(lines).split())
    for part in ("Soft on the roof,", "<b>it</b>", "https://example.org", "return a + b"):
        assert part in text, part
    assert any(line.strip() == "Soft on the roof," for line in lines), "a line break stays"
    words = ANSWER.rpartition("```")[2].split()
    assert " ".join(words) in text


def test_a_block_higher_than_the_screen_leaves_no_rest_of_its_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verbatim.cli.lib.chat.markdown_stream.INTERVAL", 0.0)
    tall = "\n".join(f"line {i}" for i in range(30))
    shown = screen_of(list(tall), rows=12)
    assert [line for line in shown if line] == [f"line {i}" for i in range(19, 30)]


@pytest.mark.parametrize(
    ("text", "blocks", "rest"),
    [
        ("a", [], "a"),
        ("a\n\n", [], "a\n\n"),
        ("a\n\nb", ["a"], "b"),
        ("- a\n\n  more\n\nb", ["- a\n\n  more"], "b"),
        ("```\na\n\nb\n```\n\nc", ["```\na\n\nb\n```"], "c"),
        ("~~~\n```\n\nx", [], "~~~\n```\n\nx"),
    ],
)
def test_blocks(text: str, blocks: list[str], rest: str) -> None:
    assert split_blocks(text) == (blocks, rest)


def test_tab_completion(tmp_path: object) -> None:
    commands = ["help", "params", "model", "save"]
    assert candidates("/m", "/m", commands, list) == ["/model "]
    assert candidates("/params min_", "min_", commands, list) == ["min_tokens=", "min_p="]
    assert candidates("/model sm", "sm", commands, lambda: ["smollm2", "qwen3:0.6b"]) == ["smollm2"]
    assert candidates(f"/save {tmp_path}", str(tmp_path), commands, list) == [f"{tmp_path}/"]
    assert candidates("hello /m", "/m", commands, list) == []


def test_the_recordings_are_there_and_fit_their_terminals() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import record_terminal
    finally:
        sys.path.remove(str(ROOT / "examples"))
    for name, (arguments, _) in record_terminal.COMMANDS.items():
        for columns in record_terminal.WIDTHS:
            lines = (record_terminal.TARGET / f"{name}-{columns}.txt").read_text().splitlines()
            assert lines[0] == f"$ verbatim {arguments}", "recorded with the present command"
            assert len(lines) > 3
            assert all(len(line) <= columns for line in lines[1:])
