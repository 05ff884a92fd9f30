"""Record commands as a user sees them, on terminals of 80 and 120 columns.

    python examples/record_terminal.py             writes docs/recordings/*.txt
    python examples/record_terminal.py run chat    only these

Each command runs in a pseudo-terminal; pyte, a terminal emulator, turns its output into the lines
of the screen. A recording is one text file: the typed command, then the screen. Texts and tokens
are the same on every machine with the same fingerprint; times are those of the machine that
recorded.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import sys
import termios
from pathlib import Path

import pyte

TARGET = Path(__file__).parents[1] / "docs" / "recordings"
WIDTHS = (80, 120)
ROWS = 40
PROMPT = b">>> "
# name -> (arguments, lines that are typed at the prompt of a chat)
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": ('run --verbose "Name the capital of France."', ()),
    "chat": (
        "chat --max-tokens 90",
        (
            "Name three fruits as a list.",
            "Which of them is yellow?",
            "/stats",
            "/retry",
            "/explain 1",
            "/undo",
            "/quit",
        ),
    ),
    "explain": (
        "explain --max-tokens 3 --temperature 0.8 --what-if temperature=1.5 --continue"
        ' "Name the capital of France."',
        (),
    ),
    "bench": ("bench --quick --prefills 32 --contexts 32 --batches 1,4 --repeats 3", ()),
}


def record(arguments: str, typed: tuple[str, ...], columns: int) -> str:
    """The screen after the command has ended, with everything that scrolled off it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", VERBATIM_HISTORY="off")
        os.environ.pop("NO_COLOR", None)
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        command = [sys.executable, "-m", "verbatim", *shlex.split(arguments)]
        os.execv(sys.executable, command)
    seen = b""
    waiting = list(typed)
    answered = 0  # bytes before the last prompt that was answered
    while True:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
            if not piece:
                break
            seen += piece
        elif waiting and PROMPT in seen[answered:]:
            answered = len(seen)
            os.write(terminal, waiting.pop(0).encode() + b"\n")
    os.waitpid(pid, 0)
    os.close(terminal)
    return _screen(seen, columns)


def _screen(seen: bytes, columns: int) -> str:
    screen = pyte.HistoryScreen(columns, ROWS, history=100_000, ratio=1)
    pyte.ByteStream(screen).feed(seen)
    above = ["".join(line[i].data for i in range(columns)) for line in screen.history.top]
    lines = [line.rstrip() for line in (*above, *screen.display)]
    return re.sub(r"\n+\Z", "\n", "\n".join(lines) + "\n")


def main(names: list[str]) -> None:
    TARGET.mkdir(exist_ok=True)
    for name in names or COMMANDS:
        arguments, typed = COMMANDS[name]
        for columns in WIDTHS:
            text = record(arguments, typed, columns)
            path = TARGET / f"{name}-{columns}.txt"
            path.write_text(f"$ verbatim {arguments}\n{text}", "utf-8")
            print(f"{path.name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
