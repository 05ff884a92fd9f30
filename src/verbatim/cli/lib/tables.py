"""Tables on stdout for the commands that print reports. Uses `rich`, so import it inside a command
only: the commands that print an answer must not wait for it.

A table fits 80 columns. In a pipe there is no colour, and the width is 80 or $COLUMNS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

# Control characters of a model's text would move the cursor: show their Unicode pictures instead.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys(range(127, 160), 9254)
WIDEST = 120  # columns; longer lines are hard to read


def console() -> Console:
    from rich.console import Console

    class Out(Console):
        def on_broken_pipe(self) -> None:
            """Let main.py choose the exit code; rich itself would end with 1."""
            raise BrokenPipeError

    out = Out(highlight=False, soft_wrap=False, emoji=False, markup=False)
    if out.width > WIDEST:
        out = Out(highlight=False, soft_wrap=False, emoji=False, markup=False, width=WIDEST)
    return out


def visible(text: str) -> str:
    """A model's text for a table, without control characters other than newline and tab."""
    return text.translate(_PICTURES)


def put(out: Console, what: RenderableType) -> None:
    """Print a table. If stdout is not a terminal, strip the spaces at the end of each line."""
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as captured:
        out.print(what)
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")


def section(
    out: Console,
    title: str,
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[int] = (),
    header: Sequence[str] = (),
    wide: int | None = None,
) -> None:
    """A title in bold and rows in columns below it. `right`: columns aligned to the right.
    `wide`: the one column that may wrap; the others keep their width."""
    from rich.table import Table

    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    listed = [list(row) for row in rows]
    for at in range(max((len(row) for row in listed), default=0)):
        table.add_column(
            header[at] if at < len(header) else "",
            justify="right" if at in right else "left",
            no_wrap=wide is not None and at != wide,
            overflow="fold",
            header_style="dim",
            ratio=1 if at == wide else None,
        )
    for row in listed:
        table.add_row(*row)
    if title:
        out.print()
        out.print(title, style="bold")
    put(out, table)
