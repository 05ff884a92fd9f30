"""Line editing of `verbatim chat`: history across sessions, and Tab completion. Uses readline where
the platform has it."""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
from collections.abc import Callable
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.base.params import FIELDS

MAX_LINES = 1000  # lines of the history file
FILES = ("/save", "/load")


def history_file() -> Path | None:
    """VERBATIM_HISTORY, else `chat_history` in the cache; None if the variable is empty or off."""
    chosen = os.environ.get("VERBATIM_HISTORY")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen not in ("", "off") else None
    from verbatim.hub.catalog import cache_dir

    try:
        return cache_dir() / "chat_history"
    except ModelError:  # a user without a home directory
        return None


def enable_line_editing(commands: list[str], models: Callable[[], list[str]]) -> None:
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
    readline.set_completer_delims(" ")

    def complete(word: str, state: int) -> str | None:
        found = candidates(readline.get_line_buffer(), word, commands, models)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    path = history_file()
    if path is None:
        return
    with contextlib.suppress(OSError):  # no history yet, or the file is not readable
        readline.read_history_file(path)
    readline.set_history_length(MAX_LINES)
    atexit.register(_save_history, path)


def _save_history(path: Path) -> None:
    import readline

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch(0o600)  # prompts are private
        readline.write_history_file(path)


def candidates(
    line: str, word: str, commands: list[str], models: Callable[[], list[str]]
) -> list[str]:
    """What Tab may complete `word` to, at the end of `line`.

    >>> candidates("/re", "/re", ["reset", "retry", "save"], list)
    ['/reset ', '/retry ']
    """
    name, space, _ = line.lstrip().partition(" ")
    if not name.startswith("/"):
        return []
    if not space:
        return [f"/{c} " for c in commands if f"/{c}".startswith(word)]
    if name == "/params":
        return [f"{field}=" for field in FIELDS if field.startswith(word)]
    if name == "/model":
        return [model for model in models() if model.startswith(word)]
    if name in FILES:
        found = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
        return [file + "/" if os.path.isdir(file) else file for file in found]
    return []


def model_names() -> list[str]:
    """The downloaded models, for Tab."""
    from verbatim.hub.model_list import list_models

    return [record.name for record in list_models() if record.ready]
